"""What was found out about an optimizer, key by key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from miles_reset.schema import Initial, Kind, Slot, StateSchema

_GIVES_UP = {Kind.ABSENT, Kind.ABSENT_ENTRY, Kind.NONE}


@dataclass(frozen=True)
class Decision:
    """What was found out about one key.

    Attributes:
        slot: The slot that declares it.
        seen: What it was when it was first there.
        evidence: Why the word was chosen.
    """

    slot: Slot
    seen: str
    evidence: str

    @property
    def in_place(self) -> bool:
        """Whether a reset keeps what is there, and writes into it."""
        return not any(kind in _GIVES_UP for kind in _kinds(self.slot.initial))

    @property
    def undecided(self) -> bool:
        """Whether no word was found."""
        return self.slot.initial is not None and self.slot.initial.kind is Kind.REFUSED

    def to_dict(self) -> dict[str, Any]:
        """Return the decision as plain data."""
        return {
            "key": self.slot.key,
            "at": str(self.slot.at),
            "role": str(self.slot.role),
            "seen": self.seen,
            "fresh": None if self.slot.initial is None else str(self.slot.initial),
            "evidence": self.evidence,
            "in_place": self.in_place,
            "undecided": self.undecided,
        }


def _kinds(initial: Initial | None) -> set[Kind]:
    if initial is None:
        return set()
    return {initial.kind} | _kinds(initial.then) | _kinds(initial.otherwise)


@dataclass(frozen=True)
class Drafted:
    """A draft of a schema. ``str()`` says what was decided, and why.

    Attributes:
        schemas: The optimizer's schema, then those of the objects in its state.
        decisions: What was found out, key by key.
        failure: Where no schema passes the law, what is still wrong with the best one.
        notes: What else to know.
        variants: The titles of the variants that the schema holds for.
        forgetful: The titles of the variants that remember nothing.
        setting: The name of the kind of parameters that it was stepped with.
        way: What is put around the factory so that it can be stepped, such as ``WithClosure``.
        loads: Whether its state can be saved and loaded.
        tried: How many schemas were held to the law.
    """

    schemas: tuple[StateSchema, ...]
    decisions: tuple[Decision, ...]
    failure: str = ""
    notes: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()
    forgetful: tuple[str, ...] = ()
    setting: str = "sample"
    way: str = ""
    loads: bool = True
    tried: int = 0

    @property
    def schema(self) -> StateSchema:
        """The optimizer's schema."""
        return self.schemas[0]

    @property
    def decided(self) -> bool:
        """Whether the schema passes the law."""
        return not self.failure

    def to_dict(self) -> dict[str, Any]:
        """Return the draft as plain data."""
        return {
            "target": self.schema.target,
            "decided": self.decided,
            "failure": self.failure,
            "variants": list(self.variants),
            "decisions": [decision.to_dict() for decision in self.decisions],
            "notes": list(self.notes),
            "objects": [schema.target for schema in self.schemas[1:]],
        }

    def __str__(self) -> str:
        """Say what was decided, a line for each key."""
        lines = [f"{self.schema.target}: {'passes the law' if self.decided else 'undecided'}"]
        for one in self.decisions:
            fresh = one.slot.initial if one.slot.initial is not None else one.slot.role
            lines.append(f"  {one.slot.key} ({one.slot.at}): {fresh}; {one.evidence}")
        return "\n".join([*lines, *self.notes, *filter(None, [self.failure])])
