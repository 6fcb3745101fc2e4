"""A policy, a checkpoint and live objects become a plan; applying it carries the policy out.

Nothing changes before all that can fail was tried: the reset is planned, the saved optimizer is matched
with the live one, the scheduler is brought back in a rehearsal on copies, and all ranks agree.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from miles_reset.agree import TIMEOUT, agree, once_per_job
from miles_reset.carrying import Work, refresh_masters
from miles_reset.checkpoint.opening import open_checkpoint
from miles_reset.checkpoint.saved import Checkpoint
from miles_reset.discovery import default_registry
from miles_reset.errors import CheckpointError, ResetError
from miles_reset.judging import Resume, judged
from miles_reset.policy import ResumePolicy
from miles_reset.receipt import ResumeReport, Told
from miles_reset.registry import Registry

__all__ = ["ResumePlan", "plan_resume", "refresh_masters"]

logger = logging.getLogger("miles_reset")


@dataclass(frozen=True)
class ResumePlan(Told):
    """What a resume would do. ``str()`` is a table. It changes nothing until it is applied."""

    _work: Work = field(repr=False, compare=False)

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
        resume = Resume(policy, found, optimizer, scheduler, model, dict(extras or {}), where, group, timeout)
        plan = _planned(resume)
        facts["iteration"] = plan.iteration
    except ResetError as error:
        refused = error
    except Exception as error:  # noqa: BLE001  # other ranks wait for this one's verdict
        refused = CheckpointError(_path_of(checkpoint), "", f"cannot be resumed from: {error!r}.")
        refused.__cause__ = error
    agree(refused, facts, group=group, timeout=timeout)
    assert plan is not None
    return plan


def _planned(resume: Resume) -> ResumePlan:
    verdicts = judged(resume)
    work = Work(resume, verdicts)
    rates = work.prepare()
    lines = tuple(resume.line(name, verdict) for name, verdict in verdicts.items())
    return ResumePlan(lines, work.iteration, resume.unit, tuple(rates), tuple(resume.notes), work)


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
