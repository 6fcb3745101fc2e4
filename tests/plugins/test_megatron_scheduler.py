"""Megatron's own scheduler, brought back: the bounds of the rate, in it and in the groups."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron_cpu import UPSTREAM_WARNINGS

from miles_reset import ResumePolicy, plan_resume

pytestmark = pytest.mark.filterwarnings(*UPSTREAM_WARNINGS, "ignore:Could not determine rank")


class Run:
    """An optimizer whose groups have bounds of the rate, as Megatron's have: the second one its own."""

    def __init__(self, rate: float, own: float, **flags: bool) -> None:
        groups = [
            {"params": [torch.nn.Parameter(torch.ones(2))], "max_lr": most, "min_lr": least}
            for most, least in ((rate, rate / 10), (own, own / 10))
        ]
        self.optimizer = torch.optim.SGD(groups, lr=rate)
        self.scheduler = OptimizerParamScheduler(
            self.optimizer, init_lr=0.0, max_lr=rate, min_lr=rate / 10, lr_warmup_steps=0, lr_decay_steps=100,
            lr_decay_style="linear", start_wd=rate, end_wd=2 * rate, wd_incr_steps=100,
            wd_incr_style="linear", **flags,
        )  # fmt: skip

    def step(self, steps: int) -> list[Any]:
        """Return what the scheduler writes, step by step."""
        seen = []
        for _ in range(steps):
            seen.append([(group["lr"], group["weight_decay"]) for group in self.optimizer.param_groups])
            self.scheduler.step(increment=8)
        return seen

    def saved(self, *, whole: bool) -> dict[str, Any]:
        optimizer = self.optimizer.state_dict() if whole else None
        return copy.deepcopy(
            {"iteration": 4, "optimizer": optimizer, "scheduler": self.scheduler.state_dict()}
        )


def resumed(live: Run, saved: dict[str, Any], **choices: Any) -> list[Any]:
    policy = ResumePolicy.from_dict({"optimizer": "fresh", **choices})
    plan = plan_resume(policy, saved, optimizer=live.optimizer, scheduler=live.scheduler)
    plan.apply()
    plan.apply()
    assert plan.rates == tuple(group["lr"] for group in live.optimizer.param_groups)
    return live.step(5)


def test_bounds_come_back_group_by_group() -> None:
    run = Run(1.0, 4.0)
    run.step(4)
    saved = run.saved(whole=True)
    assert resumed(Run(0.5, 0.2), saved) == run.step(5)


def test_a_group_that_follows_the_scheduler_follows_it_to_the_file_s_bounds() -> None:
    run = Run(1.0, 4.0)
    run.step(4)
    saved = run.saved(whole=False)
    assert resumed(Run(0.5, 4.0), saved) == run.step(5), (
        "the second group has bounds of its own, and keeps them"
    )


@pytest.mark.parametrize("whole", [True, False])
def test_where_the_code_wins_its_bounds_stay(whole: bool) -> None:
    flags = {"use_checkpoint_opt_param_scheduler": False, "override_opt_param_scheduler": True}
    run, right = Run(1.0, 4.0), Run(0.5, 0.2)
    run.step(4)
    right.step(4)
    assert resumed(Run(0.5, 0.2, **flags), run.saved(whole=whole)) == right.step(5)


def test_its_settings_can_be_overridden() -> None:
    run, right = Run(1.0, 1.0), Run(1.0, 1.0)
    run.step(4)
    right.scheduler.max_lr = 3.0
    for group in right.optimizer.param_groups:
        group["max_lr"] = 3.0
    right.scheduler.step(0)
    right.step(4)
    assert resumed(Run(0.5, 0.5), run.saved(whole=True), overrides={"max_lr": 3.0}) == right.step(5)
