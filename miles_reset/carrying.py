"""What a resume does to the live parts: tried out before, then done in its order."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from miles_reset.agree import agree
from miles_reset.checkpoint.saved import check_bits, check_sizes
from miles_reset.discovery import default_registry
from miles_reset.errors import CheckpointError, PolicyError, ResetError
from miles_reset.fit import fitted, is_plain, load, match, saved_groups
from miles_reset.judging import Resume
from miles_reset.policy import Verdict
from miles_reset.registry import Registry
from miles_reset.report import ResetReport
from miles_reset.reset import plan_reset
from miles_reset.rng import check_rng, restore_rng
from miles_reset.scheduler import copies_of, override, put
from miles_reset.schema import Place
from miles_reset.walk import walk


@dataclass
class Work:
    """What is done, in its order, and what must be known for it before.

    Attributes:
        resume: What it is about.
        verdicts: What becomes of each part.
        iteration: Where the run goes on, once that is known.
    """

    resume: Resume
    verdicts: Mapping[str, Verdict]
    iteration: int | None = None
    _saved: Mapping[str, Any] = field(default_factory=dict)
    _saved_optimizer: Any = None
    _cast: frozenset[tuple[Any, str]] = frozenset()
    _saved_scheduler: Any = None
    _groups: list[Mapping[str, Any]] | None = None
    _own: list[dict[str, Any]] | None = None
    _own_state: Any = None

    def prepare(self) -> Sequence[float]:
        """Check all that may fail, and return the rate of each group after the resume."""
        resume, optimizer = self.resume, self.resume.optimizer
        self.iteration = self._iteration()
        if optimizer is not None:
            self._prepare_optimizer()
        rates = self._rehearse() if resume.scheduler is not None else self._rates_without()
        self._saved = {
            name: resume.checkpoint.read(name)
            for name in ("rng", *resume.extras)
            if self._outcome(name) == "restore"
        }
        for name, content in self._saved.items():
            check_bits(content, resume.checkpoint.part(name).where, name)
        if "rng" in self._saved:
            check_rng(self._saved["rng"], resume.checkpoint.part("rng").where)
        if self._saved.get("grad_scaler") == {} and resume.extras["grad_scaler"].state_dict() != {}:
            where = resume.checkpoint.part("grad_scaler").where
            raise CheckpointError(where, "grad_scaler", "is empty: it was saved where it was disabled.")
        return rates

    def _outcome(self, name: str) -> str:
        verdict = self.verdicts.get(name)
        return verdict.outcome if verdict is not None else "skip"

    def _iteration(self) -> int | None:
        action, outcome = self.resume.policy.iteration, self._outcome("iteration")
        if isinstance(action, int):
            return action
        if outcome != "restore":
            return 0
        value = self.resume.checkpoint.read("iteration")
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            problem = f"is {value!r}, and must be a whole number."
            raise CheckpointError(self.resume.checkpoint.path, "iteration", problem)
        return value

    def _prepare_optimizer(self) -> None:
        resume, optimizer, outcome = self.resume, self.resume.optimizer, self._outcome("optimizer")
        saved, live = resume.checkpoint.part("optimizer"), resume.groups
        if outcome == "restore" and is_plain(optimizer):
            content = saved.read()
            fit = fitted(optimizer, content, saved.where, self._names())
            check_bits(content, saved.where, "optimizer")
            self._saved_optimizer, self._cast, self._groups = (
                fit.content,
                fit.cast,
                fit.content["param_groups"],
            )
            resume.notes += fit.notes
        elif outcome in ("restore", "reset"):
            self._saved_optimizer = saved.read()
            check_sizes(self._saved_optimizer, saved.where, "optimizer")
            if outcome == "restore":
                check_bits(self._saved_optimizer, saved.where, "optimizer")
            self._groups = self._matched(saved_groups(self._saved_optimizer), saved.where)
        elif self._outcome("scheduler") == "restore" and saved.there:
            try:
                self._groups = self._matched(saved_groups(saved.read()), saved.where) if live else None
            except Exception as error:  # noqa: BLE001  # it is not restored: the scheduler may know enough
                resume.notes.append(f"the saved param groups are of no use: {error}")
        if self._outcome("scheduler") == "restore" and not self._groups:
            resume.notes.append(
                "no param groups that fit were saved: the rate comes from the scheduler's own state"
            )
        if outcome != "restore":
            plan_reset(optimizer, registry=resume.registry)

    def _matched(self, groups: list[Mapping[str, Any]], where: str) -> list[Mapping[str, Any]]:
        """Return the saved groups, once it is seen that they are about the live parameters."""
        live = self.resume.groups
        if isinstance(self.resume.optimizer, torch.optim.Optimizer):
            match(groups, live, self._names(), where)
        elif len(groups) != len(live):
            problem = f"has {len(groups)} param groups, the live one {len(live)}."
            raise CheckpointError(where, "optimizer", problem)
        return groups

    def _names(self) -> dict[int, str]:
        named = getattr(self.resume.model, "named_parameters", None)
        return {id(parameter): name for name, parameter in named()} if named else {}

    def _rates_without(self) -> list[float]:
        back = self._outcome("optimizer") in ("restore", "reset") and self._groups
        held = (self._groups if back else None) or self.resume.groups
        groups = copies_of(held)
        override(self.resume.policy.overrides, groups, None)
        return [float(group["lr"]) for group in groups if "lr" in group]

    def _rehearse(self) -> list[float]:
        """Try on copies what may fail, and return the rates that come out."""
        resume, schedule = self.resume, self.resume.schedule()
        self._own = schedule.owned(schedule.groups)
        self._own_state = copy.deepcopy(schedule.scheduler.state_dict())
        saved = resume.checkpoint.part("scheduler")
        copied = schedule.rehearsal()
        if self._outcome("scheduler") == "restore":
            self._saved_scheduler = saved.read()
            if isinstance(self._saved_scheduler, list) and len(self._saved_scheduler) == 1:
                self._saved_scheduler = self._saved_scheduler[0]
            schedule.check(self._saved_scheduler, saved.where)
            check_bits(self._saved_scheduler, saved.where, "scheduler")
            resume.notes += schedule.forgotten(self._saved_scheduler, self._groups)
            try:
                copied.restore(self._saved_scheduler, self._groups)
            except Exception as error:
                raise CheckpointError(saved.where, "scheduler", f"cannot be restored: {error!r}.") from error
        elif schedule.stepped:
            resume.notes.append("the live scheduler has stepped before: it goes on from there")
        try:
            override(resume.policy.overrides, copied.groups, copied)
        except (ValueError, TypeError, AttributeError, ArithmeticError) as error:
            raise PolicyError("overrides", f"they cannot be applied: {error!r}.") from error
        rates = [float(group["lr"]) for group in copied.groups if "lr" in group]
        floor = getattr(resume.scheduler, "min_lr", getattr(resume.scheduler, "eta_min", None))
        if isinstance(floor, (int, float)) and rates and max(rates) <= floor:
            resume.notes.append(f"the learning rate after the resume is at its minimum, {floor}")
        return rates

    def carry_out(self) -> ResetReport | None:
        """Do it, on all ranks or on none, and return what was reset.

        Raises:
            RankDisagreementError: Another rank does not do the same.
            ResetError: A live part failed while it was changed.
        """
        resume = self.resume
        agree(None, {"iteration": self.iteration}, group=resume.group, timeout=resume.timeout)
        done: list[str] = []
        try:
            return self._change(done)
        except Exception as error:
            changed = ", ".join(done) or "nothing"
            raise ResetError(
                f"The resume failed midway: {error!r}. Changed for certain: {changed}. Build the run anew."
            ) from error

    def _change(self, done: list[str]) -> ResetReport | None:
        """Change the live parts, noting each that is done."""
        resume, optimizer, outcome = self.resume, self.resume.optimizer, self._outcome("optimizer")
        report = None
        if outcome == "restore":
            load(optimizer, self._saved_optimizer, self._cast)
        elif outcome == "reset":
            self._put_hyper_parameters()
        if optimizer is not None and outcome != "restore":
            report = plan_reset(optimizer, registry=resume.registry)._execute(logging.DEBUG)
            refresh_masters(optimizer, resume.registry)
        done.append("optimizer")
        schedule = resume.schedule() if resume.scheduler is not None else None
        if schedule is not None:
            if self._outcome("scheduler") == "restore":
                schedule.restore(self._saved_scheduler, self._groups)
            else:
                schedule.restore(self._own_state, self._own)
            done.append("scheduler")
        groups = resume.groups or (schedule.groups if schedule is not None else [])
        override(resume.policy.overrides, groups, schedule)
        for name, live in resume.extras.items():
            if name in self._saved:
                live.load_state_dict(copy.deepcopy(self._saved[name]))
                done.append(name)
        if "rng" in self._saved:
            restore_rng(self._saved["rng"])
        return report

    def _put_hyper_parameters(self) -> None:
        clocks = {
            slot.key for leaf in walk(self.resume.optimizer, self.resume.registry).leaves
            for slot in leaf.claim.record.at(Place.GROUP)
        }  # fmt: skip
        for group, saved in zip(self.resume.groups, self._groups or (), strict=False):
            for key, value in saved.items():
                if key in group and key not in ("params", "param_names") and key not in clocks:
                    put(group, key, value)


def refresh_masters(optimizer: Any, registry: Registry | None = None) -> int:
    """Copy the model's weights into the master weights of every wrapper that has some.

    For after weights were loaded without the optimizer: the first step would undo the load.

    Returns:
        The number of wrappers that did.
    """
    where = registry or default_registry()
    with torch.no_grad():
        rules = [(node.obj, node.claim.record.refresh_masters) for node in walk(optimizer, where).wrappers]
        for wrapper, refresh in (pair for pair in rules if pair[1] is not None):
            refresh(wrapper)
    return sum(refresh is not None for _, refresh in rules)
