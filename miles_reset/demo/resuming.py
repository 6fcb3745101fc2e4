"""A resume under a policy file, beside what plain loads do to the learning rate."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR

from miles_reset.policy import ResumePolicy
from miles_reset.resume import ResumePlan, plan_resume

POLICY = """\
optimizer = "fresh"      # as --no-load-optim
scheduler = "restore"    # the schedule goes on
iteration = "restore"
"""
SAVED_AT, STEPS = 50, 100
OLD_RATE, NEW_RATE = 1.0, 0.1
UNINTERRUPTED = "never interrupted"
UNDER_POLICY = "resumed under the policy"
PLAIN = "scheduler.load_state_dict() alone"
LOST = "scheduler lost with the optimizer"


@dataclass(frozen=True)
class Resumed:
    """What a resume found.

    Attributes:
        plan: The preview, as text.
        rates: The learning rates of the steps after the resume, by way to resume.
        same: Whether those under the policy are those of the run that was never interrupted.
    """

    plan: str
    rates: Mapping[str, Sequence[float]]
    same: bool


def resume() -> Resumed:
    """Save a run at half of its schedule, and resume it with a rate of a tenth in its configuration."""
    optimizer, scheduler = _run(OLD_RATE)
    _rates(optimizer, scheduler, SAVED_AT)
    with tempfile.TemporaryDirectory() as folder:
        saved, file = Path(folder, "checkpoint.pt"), Path(folder, "policy.toml")
        state = {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
        torch.save({**state, "iteration": SAVED_AT}, saved)
        file.write_text(POLICY)
        resumed = _run(NEW_RATE)
        plan: ResumePlan = plan_resume(
            ResumePolicy.from_file(file), saved, optimizer=resumed[0], scheduler=resumed[1]
        )
        plan.apply()
        plain, lost = _run(NEW_RATE), _run(NEW_RATE)
        plain[1].load_state_dict(torch.load(saved, weights_only=True)["scheduler"])
    runs = {UNINTERRUPTED: (optimizer, scheduler), UNDER_POLICY: resumed, PLAIN: plain, LOST: lost}
    rates = {way: _rates(*run, STEPS - SAVED_AT) for way, run in runs.items()}
    return Resumed(str(plan), rates, rates[UNDER_POLICY] == rates[UNINTERRUPTED])


def _run(rate: float) -> tuple[torch.optim.Optimizer, Any]:
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    optimizer = torch.optim.AdamW([weight], lr=rate)
    return optimizer, CosineAnnealingLR(optimizer, STEPS)


def _rates(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[float]:
    seen = []
    for _ in range(steps):
        seen.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return seen
