"""A policy, a checkpoint and live objects become a plan; applying it carries the policy out.

Nothing changes before all that can fail was tried: the reset is planned, the saved optimizer is matched
with the live one, the scheduler is brought back in a rehearsal on copies, and all ranks agree.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from miles_reset.agree import TIMEOUT, agree, once_per_job, rank_and_world
from miles_reset.checkpoint.opening import open_checkpoint
from miles_reset.checkpoint.saved import Checkpoint, check_sizes
from miles_reset.discovery import default_registry
from miles_reset.errors import NOTHING_CHANGED, CheckpointError, PolicyError, ResetError
from miles_reset.fit import fitted, is_plain, load, match, saved_groups
from miles_reset.policy import PARTS, ResumePolicy, Verdict, decide
from miles_reset.receipt import PartLine, ResumeReport, Told
from miles_reset.registry import Registry
from miles_reset.report import ResetReport
from miles_reset.reset import plan_reset, reset_optimizer_states
from miles_reset.rng import check_rng, restore_rng
from miles_reset.scheduler import Schedule, SchedulerRule, copies_of, override, put
from miles_reset.schema import Place
from miles_reset.walk import walk

logger = logging.getLogger("miles_reset")


@dataclass(frozen=True)
class ResumePlan(Told):
    """What a resume would do. ``str()`` is a table. It changes nothing until it is applied."""

    _work: _Work = field(repr=False, compare=False)

    def apply(self) -> ResumeReport:
        """Carry the plan out, on all ranks or on none. Applying it twice equals applying it once.

        Raises:
            RankDisagreementError: Another rank does not apply the same plan.
            ResetError: A live part failed while it was changed. What had been changed is said.
        """
        told = {key: getattr(self, key) for key in Told.__dataclass_fields__}
        report = ResumeReport(**told, reset=self._work.carry_out())
        logger.log(once_per_job(logging.INFO), "%s", str(report).splitlines()[0])
        return report

    def __str__(self) -> str:
        """Return the preview as a table."""
        return self.as_table("to resume at")


def plan_resume(
    policy: ResumePolicy,
    checkpoint: Checkpoint | str | os.PathLike[str] | Mapping[str, Any],
    *,
    optimizer: Any = None,
    scheduler: Any = None,
    model: Any = None,
    extras: Mapping[str, Any] | None = None,
    group: Any = None,
    timeout: timedelta | float = TIMEOUT,
    registry: Registry | None = None,
) -> ResumePlan:
    """Work out what a policy does with a checkpoint and live objects, and check that it can be done.

    Where torch.distributed is in use, call it on all ranks: they agree, or refuse together.

    Args:
        policy: What comes back.
        checkpoint: A checkpoint, or what :func:`miles_reset.open_checkpoint` takes. What is in a mapping
            is copied when the plan is applied: it should not be the live state.
        optimizer: The live optimizer, or a wrapper, over weights that were loaded already.
        scheduler: The live scheduler, just built.
        model: The live model: its names are used where the optimizer has none.
        extras: Further live parts by name: what has ``load_state_dict``. ``grad_scaler`` is one.
        group: The ranks that must agree; all, by default.
        timeout: How long ranks wait for each other; a number is of seconds.
        registry: Where plugins' records are looked up; the installed plugins by default.

    Raises:
        CheckpointError: The checkpoint, or a part that must come back, is not there or does not fit.
        PolicyError: The policy names a part or an override that is not there.
        UnsupportedOptimizerState: The optimizer cannot be made fresh.
        RankDisagreementError: Ranks do not agree.
    """
    where = registry or default_registry()
    plan: ResumePlan | None = None
    refused: ResetError | None = None
    facts: dict[str, Any] = {"policy": policy.digest()}
    try:
        found = _opened(policy, checkpoint, where)
        facts["world size"] = found.world_size
        plan = _Planner(
            policy, found, optimizer, scheduler, model, dict(extras or {}), where, group, timeout
        ).plan()
        facts["iteration"] = plan.iteration
    except ResetError as error:
        refused = error
    except Exception as error:  # noqa: BLE001  # other ranks wait for this one's verdict
        refused = CheckpointError(_path_of(checkpoint), "", f"cannot be resumed from: {error!r}.")
        refused.__cause__ = error
    agree(refused, facts, group=group, timeout=timeout)
    assert plan is not None
    return plan


def _path_of(checkpoint: Any) -> str:
    if isinstance(checkpoint, Checkpoint):
        return checkpoint.path
    return "the mapping" if isinstance(checkpoint, Mapping) else str(checkpoint)


def _opened(policy: ResumePolicy, checkpoint: Any, registry: Registry) -> Checkpoint:
    if isinstance(checkpoint, Checkpoint):
        return checkpoint
    if not isinstance(checkpoint, Mapping) and not os.path.lexists(checkpoint):
        if policy.on_missing == "refuse":
            problem = 'is not there. To start without one, say on_missing = "fresh" in the policy.'
            raise CheckpointError(str(checkpoint), "", problem)
        return Checkpoint(str(checkpoint), "none", {}, facts={"missing": "there is no checkpoint"})
    return open_checkpoint(checkpoint, allow=policy.allow, registry=registry)


@dataclass
class _Planner:
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

    def plan(self) -> ResumePlan:
        self._check_world()
        live = {"optimizer": self.optimizer, "scheduler": self.scheduler, **self.extras}
        self._check_live(live)
        if unknown := sorted(set(self.policy.extras) - set(self.extras)):
            raise PolicyError(
                unknown[0],
                f"it is an extra of the policy, and the trainer gives {_named(self.extras)}: take it out of "
                "[extras], or give it.",
            )
        verdicts = {
            name: self._decide(name, live.get(name)) for name in dict.fromkeys([*PARTS, *self.extras])
        }
        if refused := {name: v.reason for name, v in verdicts.items() if v.outcome == "refuse"}:
            first = next(iter(refused))
            why = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
            detail = self.checkpoint.part(first).detail.replace(NOTHING_CHANGED, "").strip()
            problem = f'is refused. {why}. {detail} Bring it back, or say "fresh" for it in the policy.'
            raise CheckpointError(self.checkpoint.path, first, " ".join(problem.split()))
        work = _Work(self, verdicts)
        rates = work.prepare()
        lines = tuple(self._line(name, verdict) for name, verdict in verdicts.items())
        unit = self.policy.iteration_unit or self.checkpoint.iteration_unit
        return ResumePlan(lines, work.iteration, unit, tuple(rates), tuple(self.notes), work)

    def _check_world(self) -> None:
        saved = self.checkpoint.world_size
        _, now = rank_and_world()
        if saved is not None and saved != now:
            problem = f"was saved by {saved} ranks, and this run has {now}."
            raise CheckpointError(self.checkpoint.path, "", problem)

    def _check_live(self, live: Mapping[str, Any]) -> None:
        if taken := sorted({"optimizer", "scheduler", "iteration", "rng"} & set(self.extras)):
            raise PolicyError(taken[0], "it is a part of its own, and cannot be an extra.")
        for name, part in live.items():
            if part is not None and not callable(getattr(part, "load_state_dict", None)):
                raise PolicyError(
                    name, f"the live one is a {type(part).__name__}, which has no load_state_dict()."
                )
        if self.optimizer is not None and self.scheduler is not None:
            own = {id(group) for group in _groups_of(self.optimizer)}
            if own.isdisjoint(map(id, self._schedule().groups)):
                raise PolicyError(
                    "scheduler", "the live one is over another optimizer than the one that was given."
                )

    def _schedule(self) -> Schedule:
        return Schedule(self.scheduler, self.registry.table(SchedulerRule))

    def _decide(self, name: str, live: Any) -> Verdict:
        saved, action = self.checkpoint.part(name), self._action(name)
        if self.checkpoint.format == "none" and not isinstance(action, int):
            return Verdict(
                "fresh" if live is not None or name == "iteration" else "skip", "there is no checkpoint"
            )
        is_live = live is not None or name in ("iteration", "rng")
        chosen = self.policy.chosen_by(name) != "default"
        verdict = decide(action, saved.presence, live=is_live, chosen=chosen)
        if name == "optimizer" and verdict.outcome == "restore" and self.policy.reset.on_resume:
            return Verdict("reset", "the policy resets it when a run resumes")
        return verdict

    def _action(self, name: str) -> str | int:
        """Return what the policy says; a clock that nothing was said about goes the way of the iteration."""
        chosen = self.policy.action(name)
        counts_anew = self.policy.iteration != "restore" and self.policy.iteration != "restore-if-present"
        if name == "reset_clock" and name not in self.policy.extras and counts_anew:
            return "fresh"
        return chosen

    def _line(self, name: str, verdict: Verdict) -> PartLine:
        saved = self.checkpoint.part(name)
        what = saved.where if saved.there else str(saved.presence)
        action, chosen_by = str(self._action(name)), self.policy.chosen_by(name)
        return PartLine(name, what, action, chosen_by, verdict.outcome, verdict.reason)


@dataclass
class _Work:
    """What is done, in its order, and what must be known for it before."""

    planner: _Planner
    verdicts: Mapping[str, Verdict]
    iteration: int | None = None
    saved: Mapping[str, Any] = field(default_factory=dict)
    saved_optimizer: Any = None
    cast: frozenset[tuple[Any, str]] = frozenset()
    saved_scheduler: Any = None
    groups: list[Mapping[str, Any]] | None = None
    own: list[dict[str, Any]] | None = None
    own_state: Any = None

    def prepare(self) -> Sequence[float]:
        """Check all that may fail, and return the rate of each group after the resume."""
        planner, optimizer = self.planner, self.planner.optimizer
        self.iteration = self._iteration()
        if optimizer is not None:
            self._prepare_optimizer()
        rates = self._rehearse() if planner.scheduler is not None else self._rates_without()
        self.saved = {
            name: planner.checkpoint.read(name)
            for name in ("rng", *planner.extras)
            if self._outcome(name) == "restore"
        }
        if "rng" in self.saved:
            check_rng(self.saved["rng"], planner.checkpoint.part("rng").where)
        if self.saved.get("grad_scaler") == {} and planner.extras["grad_scaler"].state_dict() != {}:
            where = planner.checkpoint.part("grad_scaler").where
            raise CheckpointError(where, "grad_scaler", "is empty: it was saved where it was disabled.")
        return rates

    def _outcome(self, name: str) -> str:
        verdict = self.verdicts.get(name)
        return verdict.outcome if verdict is not None else "skip"

    def _iteration(self) -> int | None:
        action, outcome = self.planner.policy.iteration, self._outcome("iteration")
        if isinstance(action, int):
            return action
        if outcome != "restore":
            return 0
        value = self.planner.checkpoint.read("iteration")
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            problem = f"is {value!r}, and must be a whole number."
            raise CheckpointError(self.planner.checkpoint.path, "iteration", problem)
        return value

    def _prepare_optimizer(self) -> None:
        planner, optimizer, outcome = self.planner, self.planner.optimizer, self._outcome("optimizer")
        saved, live = planner.checkpoint.part("optimizer"), _groups_of(optimizer)
        if outcome == "restore" and is_plain(optimizer):
            fit = fitted(optimizer, saved.read(), saved.where, self._names())
            self.saved_optimizer, self.cast, self.groups = fit.content, fit.cast, fit.content["param_groups"]
            planner.notes += fit.notes
        elif outcome in ("restore", "reset"):
            self.saved_optimizer = saved.read()
            check_sizes(self.saved_optimizer, saved.where, "optimizer")
            self.groups = self._groups(saved_groups(self.saved_optimizer), saved.where)
        elif self._outcome("scheduler") == "restore" and saved.there:
            try:
                self.groups = self._groups(saved_groups(saved.read()), saved.where) if live else None
            except Exception as error:  # noqa: BLE001  # it is not restored: the scheduler may know enough
                planner.notes.append(f"the saved param groups are of no use: {error}")
        if self._outcome("scheduler") == "restore" and not self.groups:
            planner.notes.append(
                "no param groups that fit were saved: the rate comes from the scheduler's own state"
            )
        if outcome != "restore":
            plan_reset(optimizer, registry=planner.registry)

    def _groups(self, groups: list[Mapping[str, Any]], where: str) -> list[Mapping[str, Any]]:
        """Return the saved groups, once it is seen that they are about the live parameters."""
        live = _groups_of(self.planner.optimizer)
        if isinstance(self.planner.optimizer, torch.optim.Optimizer):
            match(groups, live, self._names(), where)
        elif len(groups) != len(live):
            problem = f"has {len(groups)} param groups, the live one {len(live)}."
            raise CheckpointError(where, "optimizer", problem)
        return groups

    def _names(self) -> dict[int, str]:
        named = getattr(self.planner.model, "named_parameters", None)
        return {id(parameter): name for name, parameter in named()} if named else {}

    def _rates_without(self) -> list[float]:
        back = self._outcome("optimizer") in ("restore", "reset") and self.groups
        held = (self.groups if back else None) or _groups_of(self.planner.optimizer)
        groups = copies_of(held)
        override(self.planner.policy.overrides, groups, None)
        return [float(group["lr"]) for group in groups if "lr" in group]

    def _rehearse(self) -> list[float]:
        """Try on copies what may fail, and return the rates that come out."""
        planner, schedule = self.planner, self.planner._schedule()
        self.own = schedule.owned(schedule.groups)
        self.own_state = copy.deepcopy(schedule.scheduler.state_dict())
        saved = planner.checkpoint.part("scheduler")
        copied = schedule.rehearsal()
        if self._outcome("scheduler") == "restore":
            self.saved_scheduler = saved.read()
            if isinstance(self.saved_scheduler, list) and len(self.saved_scheduler) == 1:
                self.saved_scheduler = self.saved_scheduler[0]
            schedule.check(self.saved_scheduler, saved.where)
            planner.notes += schedule.forgotten(self.saved_scheduler, self.groups)
            try:
                copied.restore(self.saved_scheduler, self.groups)
            except Exception as error:
                raise CheckpointError(saved.where, "scheduler", f"cannot be restored: {error!r}.") from error
        elif schedule.stepped:
            planner.notes.append("the live scheduler has stepped before: it goes on from there")
        try:
            override(planner.policy.overrides, copied.groups, copied)
        except (ValueError, TypeError, AttributeError, ArithmeticError) as error:
            raise PolicyError("overrides", f"they cannot be applied: {error!r}.") from error
        rates = [float(group["lr"]) for group in copied.groups if "lr" in group]
        floor = getattr(planner.scheduler, "min_lr", getattr(planner.scheduler, "eta_min", None))
        if isinstance(floor, (int, float)) and rates and max(rates) <= floor:
            planner.notes.append(f"the learning rate after the resume is at its minimum, {floor}")
        return rates

    def carry_out(self) -> ResetReport | None:
        planner = self.planner
        agree(None, {"iteration": self.iteration}, group=planner.group, timeout=planner.timeout)
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
        planner, optimizer, outcome = self.planner, self.planner.optimizer, self._outcome("optimizer")
        report = None
        if outcome == "restore":
            load(optimizer, self.saved_optimizer, self.cast)
        elif outcome == "reset":
            self._put_hyper_parameters()
        if optimizer is not None and outcome != "restore":
            report = reset_optimizer_states(optimizer, registry=planner.registry)
            refresh_masters(optimizer, planner.registry)
        done.append("optimizer")
        schedule = planner._schedule() if planner.scheduler is not None else None
        if schedule is not None:
            if self._outcome("scheduler") == "restore":
                schedule.restore(self.saved_scheduler, self.groups)
            else:
                schedule.restore(self.own_state, self.own)
            done.append("scheduler")
        groups = _groups_of(optimizer) or (schedule.groups if schedule is not None else [])
        override(planner.policy.overrides, groups, schedule)
        for name, live in planner.extras.items():
            if name in self.saved:
                live.load_state_dict(copy.deepcopy(self.saved[name]))
                done.append(name)
        if "rng" in self.saved:
            restore_rng(self.saved["rng"])
        return report

    def _put_hyper_parameters(self) -> None:
        clocks = {
            slot.key for leaf in walk(self.planner.optimizer, self.planner.registry).leaves
            for slot in leaf.claim.record.at(Place.GROUP)
        }  # fmt: skip
        for group, saved in zip(_groups_of(self.planner.optimizer), self.groups or (), strict=False):
            for key, value in saved.items():
                if key in group and key not in ("params", "param_names") and key not in clocks:
                    put(group, key, value)


def _groups_of(optimizer: Any) -> list[Any]:
    return list(getattr(optimizer, "param_groups", ()))


def _named(extras: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, extras)) or "none"


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
