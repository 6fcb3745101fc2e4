"""Forget a part: some slots, some parameters, some rows of them, or all but the largest values.

A whole reset needs no choice. Here there is one, and each leaves something that no fresh optimizer
would hold. So the report says what was reset of how much, what was kept because parts share it, and,
where a clock and the moments no longer fit each other, how large the next update becomes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any, NamedTuple

import torch

from miles_reset.agree import together
from miles_reset.batch import Batch, Found
from miles_reset.choice import Choice
from miles_reset.discovery import default_registry
from miles_reset.draft import Draft
from miles_reset.errors import NOTHING_CHANGED, UnsupportedOptimizerState
from miles_reset.moments import Moments
from miles_reset.plan import plan_tree
from miles_reset.registry import Registry
from miles_reset.reset import write_all
from miles_reset.schema import Role, Slot
from miles_reset.values import PLAIN_TENSORS, How
from miles_reset.walk import Node, walk


class PartialLine(NamedTuple):
    """What became of one slot.

    Attributes:
        slot: Its key.
        role: What it is for.
        reset: How many numbers were reset.
        of: How many there are.
        why: Why the others were kept, if something but the choice kept them.
    """

    slot: str
    role: str
    reset: int
    of: int
    why: str = ""


@dataclass(frozen=True)
class PartialReport:
    """What a partial reset did. ``str()`` is a table.

    Attributes:
        lines: What became of each slot.
        notes: What the next step makes of it.
    """

    lines: tuple[PartialLine, ...]
    notes: tuple[str, ...] = ()

    @property
    def fraction(self) -> float:
        """The fraction of the numbers that were reset, in the slots where any was; 0 where none was."""
        touched = [line for line in self.lines if line.reset]
        return sum(line.reset for line in touched) / max(1, sum(line.of for line in touched))

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {"lines": [line._asdict() for line in self.lines], "notes": list(self.notes)}

    def __str__(self) -> str:
        """Return the report as a table."""
        cells = [("slot", "role", "reset", "of", "")]
        cells += [(line.slot, line.role, f"{line.reset:,}", f"{line.of:,}", line.why) for line in self.lines]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        rows = ["  " + "  ".join(map(str.ljust, cell, widths)).rstrip() for cell in cells]
        head = f"{self.fraction:.2%} of the numbers in the slots touched were reset."
        return "\n".join([head, *rows, *self.notes])


def reset_some_states(
    optimizer: object,
    *,
    slots: Collection[str] | None = None,
    parameters: Collection[torch.Tensor] | None = None,
    rows: Mapping[torch.Tensor, Sequence[int]] | None = None,
    keep: float | None = None,
    seed: int | None = None,
    registry: Registry | None = None,
    group: Any = None,
) -> PartialReport:
    """Reset, in place, a part of what every optimizer below remembers.

    What is chosen gets the value of a freshly built optimizer; everything else keeps its bits.
    What parts share is reset only where all of them are: a count of steps in a param group with the
    whole group, one in a parameter's state not with some rows of it.

    Args:
        optimizer: See :func:`miles_reset.plan_reset`.
        slots: Roles (``"momentum"``, ``"variance"``, ``"history"``, ``"clock"``) or keys
            (``"exp_avg"``) to reset; all by default.
        parameters: Tensors of the optimizer's param groups whose state is reset; all by default.
        rows: Indices along the first dimension, for each parameter that is touched: one slot of a stacked
            LoRA, a dead feature. Of slots that have the parameter's shape.
        keep: The ratio of each moment's numbers that survive, from 0 to 1: the ``round(keep * numel)``
            largest by magnitude; of equal ones, the first. A NaN survives nothing.
        seed: Keep a random choice of the same size, drawn with this seed, not the largest.
        registry: Where classes are looked up; the installed plugins by default.
        group: See :func:`miles_reset.reset_optimizer_states`.

    Raises:
        ValueError: A choice makes no sense, or names what is not there. Nothing was changed.
        UnsupportedOptimizerState: The state cannot be reset in that part; also what
            :func:`miles_reset.plan_reset` raises.
        RankDisagreementError: A rank of ``group`` refuses, or does not answer.
    """

    def plan() -> _PartialDraft:
        draft = _PartialDraft(choice=Choice(slots, parameters, rows, keep, seed))
        where = registry or default_registry()
        with torch.inference_mode(False), torch.no_grad():
            plan_tree(walk(optimizer, where), where, draft=draft)
        draft.check()
        return draft

    draft = together(plan, group)
    report = draft.report()
    write_all(draft)
    return report


@dataclass
class _PartialDraft(Draft):
    """A plan of what is chosen alone."""

    choice: Choice = field(kw_only=True)
    _lines: dict[tuple[str, str], list[Any]] = field(default_factory=dict)
    _named: set[str] = field(default_factory=set)
    _kept: set[int] = field(default_factory=set)
    _moments: dict[int, Moments] = field(default_factory=dict)

    def plan_slot(self, slot: Slot, batch: Batch, found: Found) -> None:
        """Plan those values of a slot that are chosen."""
        if slot.initial is None:
            super().plan_slot(slot, batch, found)
            return
        self._named |= {str(slot.role), slot.key, str(found.key)}
        taken = [self._takes(slot, found, i) for i in range(len(found.values))]
        chosen = [i for i, is_taken in enumerate(taken) if is_taken]
        for i, value in enumerate(found.values):
            self._count(slot, found, i, 0, _size(value))
            if not taken[i]:
                self._kept.update(tensor.data_ptr() for tensor in _tensors(value))
        if chosen and self.choice.within:
            for i in chosen:
                self._plan_within(slot, batch, found, i)
        elif chosen:
            super().plan_slot(slot, batch, found.select(chosen))
            for i in chosen:
                self._count(slot, found, i, _size(found.values[i]), 0)

    def plan_entries(self, slots: Mapping[Any, Slot], part: Found) -> None:
        """Plan the removal of those entries that are chosen, whole."""
        whole = not self.choice.within and all(self.choice.names(slot, key) for key, slot in slots.items())
        chosen = [i for i in range(len(part.nodes)) if self.choice.has(part.parameters[i])]
        if chosen and not whole and any(self.choice.names(slot, key) for key, slot in slots.items()):
            raise _refusal(
                part.nodes[chosen[0]], next(iter(slots)), "can be given up with its whole entry only"
            )
        for key, slot in slots.items():
            self._named |= {str(slot.role), slot.key, str(key)}
            for i, entry in enumerate(part.containers):
                size = _size(entry[key])
                self._count(slot, part._replace(key=key), i, size if whole and i in chosen else 0, size)
        if whole:
            super().plan_entries(slots, part.select(chosen))

    def _takes(self, slot: Slot, found: Found, i: int) -> bool:
        """Say whether a value is reset, and note why not where only its being shared is in the way."""
        choice = self.choice
        if not choice.names(slot, found.key):
            return False
        if found.parameters:
            return choice.has(found.parameters[i])
        if choice.parameters is None and not choice.within:
            return True
        container = found.containers[i]
        of_group = container.get("params") if isinstance(container, Mapping) else None
        if of_group and not choice.within and all(map(choice.has, of_group)):
            return True
        self._why(slot, found, "shared by what is kept")
        return False

    def _plan_within(self, slot: Slot, batch: Batch, found: Found, i: int) -> None:
        """Plan the reset of rows, or of all but the largest numbers, of one tensor."""
        node, value, parameter = found.nodes[i], found.values[i], found.parameters[i]
        if slot.role is Role.CLOCK:
            self._why(slot, found, "shared by what is kept")
            return
        if value is None:
            return
        if slot.role is Role.HISTORY and self.choice.slots is None:
            raise _refusal(
                node, found.key, "is neither a momentum nor a variance: name it in slots, or leave it out"
            )
        if type(value) not in PLAIN_TENSORS or (self.choice.rows and value.shape != parameter.shape):
            what = (
                f"of shape {tuple(value.shape)}"
                if isinstance(value, torch.Tensor)
                else "no number for each weight"
            )
            raise _refusal(
                node, found.key, f"is a {type(value).__name__} {what}, and has no rows to reset apart"
            )
        one = Draft()
        one.plan_slot(slot, batch, found.select([i]))
        for write in one.writes:
            if write.how not in (How.FILL, How.COPY):
                raise _refusal(node, found.key, f"would be {write.how}, which cannot be done in part")
            fresh = write.new[0] if write.how is How.COPY else write.new
            merge = (lambda tensor=value, about=parameter: self.choice.mask(about, tensor), fresh)
            self.writes.append(replace(write, how=How.MERGE, new=[merge]))
        self._count(slot, found, i, self.choice.count(parameter, value), 0)

    def _count(self, slot: Slot, found: Found, i: int, reset: int, of: int) -> None:
        line = self._lines.setdefault((str(found.key), str(slot.role)), [0, 0, ""])
        line[0] += reset
        line[1] += of
        moments = self._moments.setdefault(id(found.nodes[i]), Moments(found.nodes[i]))
        moments.see(slot, found.values[i] if found.values else None, reset)

    def _why(self, slot: Slot, found: Found, why: str) -> None:
        self._lines.setdefault((str(found.key), str(slot.role)), [0, 0, ""])[2] = why

    def check(self) -> None:
        """Refuse a choice that names what is not there, and a tensor that what is kept shares."""
        choice = self.choice
        if choice.slots is not None and (unknown := sorted(choice.slots - self._named)):
            near = get_close_matches(unknown[0], sorted(self._named), n=1)
            hint = (
                f"the nearest is {near[0]!r}"
                if near
                else f"there are {', '.join(sorted(self._named)) or 'none'}"
            )
            raise ValueError(f"no optimizer here has a slot {unknown[0]!r}; {hint}. {NOTHING_CHANGED}")
        strangers = set(choice.parameters or ()) - {id(weight) for weight in self.weights}
        for stranger in strangers:
            assert choice.parameters is not None
            shape = tuple(choice.parameters[stranger].shape)
            raise ValueError(
                f"a tensor of shape {shape} is in no param group here. Where there are master weights, the "
                f"groups hold copies: name those. {NOTHING_CHANGED}"
            )
        for write in self.writes:
            for i, old in enumerate(write.old):
                if isinstance(old, torch.Tensor) and old.numel() and old.data_ptr() in self._kept:
                    raise _refusal(write.nodes[i], write.key, "shares its tensor with state that is kept")

    def report(self) -> PartialReport:
        """Say what is reset."""
        lines = tuple(PartialLine(key, role, *counts) for (key, role), counts in self._lines.items())
        notes = dict.fromkeys(note for moments in self._moments.values() if (note := moments.note()))
        return PartialReport(lines, tuple(notes))


def _refusal(node: Node, key: Any, problem: str) -> UnsupportedOptimizerState:
    return UnsupportedOptimizerState(node.path, f"{key!r} at {node.path} {problem}. {NOTHING_CHANGED}")


def _size(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel()
    if isinstance(value, (list, tuple, dict)):
        return sum(map(_size, value.values() if isinstance(value, dict) else value))
    return int(value is not None)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.numel() and value.layout is torch.strided:
            yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)
