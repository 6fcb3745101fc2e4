"""What comes back from a checkpoint: one choice for each part, and the pure function that carries it out."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from miles_reset.checkpoint.saved import Presence
from miles_reset.errors import PolicyError
from miles_reset.policy_file import explain, nearest, read_policy


class Action(enum.StrEnum):
    """What is done about a part."""

    RESTORE = "restore"
    """It comes back; it must be there."""
    RESTORE_IF_PRESENT = "restore-if-present"
    """It comes back if it was saved; else the live one is made fresh."""
    FRESH = "fresh"
    """The saved part is not read; the live one is made fresh."""
    RESET = "reset"
    """Of an optimizer: hyper-parameters come back, history is fresh."""


PartAction = Literal["restore", "restore-if-present", "fresh"]
OptimizerAction = Literal["restore", "restore-if-present", "fresh", "reset"]
Unit = Literal["step", "epoch", "rollout", "sample"]
Override = bool | int | float | str | list[float]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ResetSchedule(_Strict):
    """When a run resets its optimizer, besides at a resume.

    Attributes:
        every: Reset each time that so many units have passed.
        at: Reset at these counts.
        unit: What is counted.
        on_resume: Reset when a run resumes, whatever the optimizer's action is.
    """

    every: Annotated[int, Field(ge=1)] | None = None
    at: list[Annotated[int, Field(ge=0)]] = []
    unit: Unit = "step"
    on_resume: bool = False

    def due(self, count: int) -> bool:
        """Say whether the optimizer is reset once ``count`` units are done."""
        return count in self.at or bool(self.every and count > 0 and count % self.every == 0)


class ResumePolicy(_Strict):
    """What comes back from a checkpoint, part by part. Each combination is legal.

    Attributes:
        version: The version of this schema.
        optimizer: restore, restore-if-present, fresh, or reset.
        scheduler: restore, restore-if-present, or fresh.
        iteration: restore, restore-if-present, fresh (0), or the number itself.
        iteration_unit: What the iteration counts; what the checkpoint's format says, by default.
        rng: The states of the random number generators.
        grad_scaler: The loss scale of mixed precision, and what it has found out.
        extras: Further parts, by the names that the trainer gives them.
        overrides: Values for param groups and schedulers (lr, weight_decay, max_lr, ...). They come last.
        on_missing: Whether a checkpoint that is not there at all is refused, or a fresh start.
        allow: Dotted names of further globals that may be unpickled.
        reset: When a run resets its optimizer.
    """

    version: Literal[1] = 1
    optimizer: OptimizerAction = "restore"
    scheduler: PartAction = "restore"
    iteration: PartAction | Annotated[int, Field(ge=0)] = "restore"
    iteration_unit: Unit | None = None
    rng: PartAction = "restore-if-present"
    grad_scaler: PartAction = "restore-if-present"
    extras: dict[str, PartAction] = {}
    overrides: dict[str, Override] = {}
    on_missing: Literal["refuse", "fresh"] = "refuse"
    allow: list[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$")]] = []
    reset: ResetSchedule = ResetSchedule()
    _because: dict[str, str] = PrivateAttr(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _version_first(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("version", 1) != 1:
            raise ValueError(f"version {data['version']!r} is not known; this library reads version 1")
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Check a policy given as plain data.

        Raises:
            PolicyError: A key or a value is not one that a policy may have.
        """
        return cls._checked(data, "the policy")

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Read a policy file, TOML (``.toml``) or YAML (``.yaml``, ``.yml``).

        Raises:
            PolicyError: The file is not there, not readable, or no policy.
        """
        path = Path(path)
        return cls._checked(read_policy(path), str(path))

    @classmethod
    def preset(cls, name: str) -> Self:
        """Return a policy by the name of what it does; see :data:`PRESETS`."""
        if name not in PRESETS:
            raise PolicyError("preset", f"there is no preset {name!r}{nearest(name, PRESETS)}.")
        return cls._checked(PRESETS[name][1], f"preset {name}")

    @classmethod
    def _checked(cls, data: Mapping[str, Any], source: str) -> Self:
        if not isinstance(data, Mapping):
            raise PolicyError("policy", f"{source} is no table of parts but a {type(data).__name__}.")
        try:
            return cls.model_validate(dict(data))
        except ValidationError as error:
            raise PolicyError(*explain(error.errors(include_url=False), _keys(cls), source)) from error
        except RecursionError as error:
            raise PolicyError("policy", f"{source} contains itself.") from error

    def infer(self, choices: Mapping[str, Any], because: str) -> Self:
        """Return a policy that also has these choices where none was made by hand.

        An explicit choice is never changed.
        """
        new = {key: value for key, value in choices.items() if key not in self.model_fields_set}
        policy = self._checked({**self.model_dump(exclude_unset=True), **new}, because)
        policy._because.update({**self._because, **dict.fromkeys(new, because)})
        return policy

    def chosen_by(self, part: str) -> str:
        """Say who chose what is done about a part: the policy, the default, or what was inferred."""
        chosen = part in self.model_fields_set or part in self.extras
        return self._because.get(part) or ("policy" if chosen else "default")

    def action(self, part: str) -> str | int:
        """Return what is to be done about a part; an extra that is not named comes back if it was saved."""
        if part in PARTS:
            chosen: str | int = getattr(self, part)
            return chosen
        return self.extras.get(part, "restore-if-present")

    def digest(self) -> str:
        """Return the choices as text, equal on all ranks that have the same policy."""
        return json.dumps(self.model_dump(), sort_keys=True)


PARTS = ("optimizer", "scheduler", "iteration", "rng", "grad_scaler")

PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "everything": ("All parts come back.", {}),
    "no-load-optim": (
        "Megatron's --no-load-optim as it should be: fresh optimizer, the schedule goes on.",
        {"optimizer": "fresh"},
    ),
    "finetune": (
        "Megatron's --finetune: the weights alone, from iteration 0.",
        {"optimizer": "fresh", "scheduler": "fresh", "iteration": "fresh", "rng": "fresh"},
    ),
    "rl-from-sft": (
        "Reinforcement learning after supervised training: fresh optimizer, schedule, count and loss scale.",
        {
            "optimizer": "fresh",
            "scheduler": "fresh",
            "iteration": "fresh",
            "rng": "fresh",
            "grad_scaler": "fresh",
        },
    ),
    "weights-only": (
        "Nothing but the weights comes back, and the count.",
        {"optimizer": "fresh", "scheduler": "fresh", "rng": "fresh", "grad_scaler": "fresh"},
    ),
    "reset-history": (
        "Hyper-parameters, schedule and count come back; the optimizer forgets.",
        {"optimizer": "reset"},
    ),
}
"""Named policies: what each is for, and its choices."""


class Verdict(NamedTuple):
    """What becomes of one part.

    Attributes:
        outcome: ``restore``, ``fresh``, ``reset``, ``set`` (an iteration), ``skip`` (none live), ``refuse``.
        reason: Why, in a few words.
    """

    outcome: str
    reason: str


def decide(action: str | int, presence: Presence, *, live: bool, chosen: bool) -> Verdict:
    """Decide about one part. Pure: what is tried out in a table of all combinations.

    Args:
        action: What the policy says.
        presence: Whether the part was saved, and in which of four ways it was not.
        live: Whether there is a live part.
        chosen: Whether the action was chosen by hand, and not by default.
    """
    if isinstance(action, int):
        return Verdict("set", f"the policy says {action}")
    if not live:
        if chosen and action not in (Action.FRESH, Action.RESTORE_IF_PRESENT):
            return Verdict("refuse", f"the policy says {action}, and there is no live one to {action}")
        return Verdict("skip", "there is no live one")
    if action == Action.FRESH:
        return Verdict("fresh", "what was saved is not read")
    if presence is Presence.TORN:
        return Verdict("refuse", "what was saved cannot be read")
    if presence is Presence.PRESENT:
        outcome = "reset" if action == Action.RESET else "restore"
        return Verdict(
            outcome, "hyper-parameters come back, history is fresh" if outcome == "reset" else "saved"
        )
    if action == Action.RESTORE_IF_PRESENT:
        return Verdict("fresh", f"not saved: {presence}")
    return Verdict("refuse", f"the policy says {action}, and it was not saved: {presence}")


def _keys(cls: type[BaseModel]) -> dict[str, list[str]]:
    """Return the keys that a policy, and each table in it, may have."""
    return {"": list(cls.model_fields), "reset": list(ResetSchedule.model_fields)}
