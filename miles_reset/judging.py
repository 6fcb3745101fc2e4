"""What a resume is about, and what becomes of each part: checks that change nothing and read little."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from miles_reset.agree import rank_and_world
from miles_reset.checkpoint.saved import Checkpoint
from miles_reset.errors import NOTHING_CHANGED, CheckpointError, PolicyError
from miles_reset.policy import PARTS, ResumePolicy, Verdict, decide
from miles_reset.receipt import PartLine
from miles_reset.registry import Registry
from miles_reset.scheduler import Schedule, SchedulerRule


@dataclass
class Resume:
    """What a resume is about: a policy, a checkpoint, and what is live.

    Attributes:
        policy: What comes back.
        checkpoint: What was saved.
        optimizer: The live optimizer.
        scheduler: The live scheduler.
        model: The live model.
        extras: Further live parts.
        registry: Where records are looked up.
        group: The ranks that must agree.
        timeout: How long they wait for each other.
        notes: What is worth telling.
    """

    policy: ResumePolicy
    checkpoint: Checkpoint
    optimizer: Any
    scheduler: Any
    model: Any
    extras: dict[str, Any]
    registry: Registry
    group: Any
    timeout: timedelta | float
    notes: list[str] = field(default_factory=list)

    @property
    def unit(self) -> str | None:
        """What the iteration counts."""
        return self.policy.iteration_unit or self.checkpoint.iteration_unit

    @property
    def live(self) -> dict[str, Any]:
        """The live parts, by name."""
        return {"optimizer": self.optimizer, "scheduler": self.scheduler, **self.extras}

    @property
    def groups(self) -> list[Any]:
        """The param groups of the live optimizer."""
        return groups_of(self.optimizer)

    def schedule(self) -> Schedule:
        """Return the live scheduler with its rule."""
        return Schedule(self.scheduler, self.registry.table(SchedulerRule))

    def action(self, name: str) -> str | int:
        """Return what the policy says; a clock that nothing was said about goes the way of the iteration."""
        chosen = self.policy.action(name)
        counts_anew = self.policy.iteration != "restore" and self.policy.iteration != "restore-if-present"
        if name == "reset_clock" and name not in self.policy.extras and counts_anew:
            return "fresh"
        return chosen

    def line(self, name: str, verdict: Verdict) -> PartLine:
        """Tell what becomes of one part."""
        saved = self.checkpoint.part(name)
        what = saved.where if saved.there else str(saved.presence)
        action, chosen_by = str(self.action(name)), self.policy.chosen_by(name)
        return PartLine(name, what, action, chosen_by, verdict.outcome, verdict.reason)


def judged(resume: Resume) -> dict[str, Verdict]:
    """Return what becomes of each part.

    Raises:
        CheckpointError: A part is refused.
        PolicyError: The policy, or the trainer, names what the other does not know.
    """
    _check_world(resume.checkpoint)
    _check_live(resume)
    if unknown := sorted(set(resume.policy.extras) - set(resume.extras)):
        raise PolicyError(
            unknown[0],
            f"it is an extra of the policy, and the trainer gives {_named(resume.extras)}: take it out of "
            "[extras], or give it.",
        )
    live = resume.live
    verdicts = {
        name: _judge(resume, name, live.get(name)) for name in dict.fromkeys([*PARTS, *resume.extras])
    }
    if refused := {name: v.reason for name, v in verdicts.items() if v.outcome == "refuse"}:
        first = next(iter(refused))
        why = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
        detail = resume.checkpoint.part(first).detail.replace(NOTHING_CHANGED, "").strip()
        problem = f'is refused. {why}. {detail} Bring it back, or say "fresh" for it in the policy.'
        raise CheckpointError(resume.checkpoint.path, first, " ".join(problem.split()))
    return verdicts


def _check_world(checkpoint: Checkpoint) -> None:
    saved = checkpoint.world_size
    _, now = rank_and_world()
    if saved is not None and saved != now:
        raise CheckpointError(checkpoint.path, "", f"was saved by {saved} ranks, and this run has {now}.")


def _check_live(resume: Resume) -> None:
    if taken := sorted({"optimizer", "scheduler", "iteration", "rng"} & set(resume.extras)):
        raise PolicyError(taken[0], "it is a part of its own, and cannot be an extra.")
    for name, part in resume.live.items():
        if part is not None and not callable(getattr(part, "load_state_dict", None)):
            raise PolicyError(
                name, f"the live one is a {type(part).__name__}, which has no load_state_dict()."
            )
    if resume.optimizer is not None and resume.scheduler is not None:
        own = {id(group) for group in resume.groups}
        if own.isdisjoint(map(id, resume.schedule().groups)):
            raise PolicyError(
                "scheduler", "the live one is over another optimizer than the one that was given."
            )


def _judge(resume: Resume, name: str, live: Any) -> Verdict:
    saved, action = resume.checkpoint.part(name), resume.action(name)
    if resume.checkpoint.format == "none" and not isinstance(action, int):
        return Verdict(
            "fresh" if live is not None or name == "iteration" else "skip", "there is no checkpoint"
        )
    is_live = live is not None or name in ("iteration", "rng")
    chosen = resume.policy.chosen_by(name) != "default"
    verdict = decide(action, saved.presence, live=is_live, chosen=chosen)
    if name == "optimizer" and verdict.outcome == "restore" and resume.policy.reset.on_resume:
        return Verdict("reset", "the policy resets it when a run resumes")
    return verdict


def groups_of(optimizer: Any) -> list[Any]:
    """Return the param groups of an optimizer, if it has some."""
    return list(getattr(optimizer, "param_groups", ()))


def _named(extras: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, extras)) or "none"
