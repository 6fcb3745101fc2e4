"""Every scheduler of torch, through each way of resuming: the whole trajectory of what it owns."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR

from miles_reset import CheckpointError, PolicyError, ResumePolicy, plan_resume

SAVED_AT, STEPS = 9, 24

pytestmark = pytest.mark.filterwarnings("ignore:The epoch parameter in")  # SequentialLR of torch 2.6 uses it


def sequential(optimizer: Any, rate: float) -> Any:
    inner = [schedulers.LinearLR(optimizer, 0.5, total_iters=4), schedulers.ExponentialLR(optimizer, 0.9)]
    return schedulers.SequentialLR(optimizer, inner, [5])


def chained(optimizer: Any, rate: float) -> Any:
    inner = [schedulers.ConstantLR(optimizer, 0.5, total_iters=12), schedulers.ExponentialLR(optimizer, 0.9)]
    return schedulers.ChainedScheduler(inner, optimizer)


BUILD: dict[str, Callable[[Any, float], Any]] = {
    "LambdaLR": lambda o, r: schedulers.LambdaLR(o, lambda step: 1 - step / 100),
    "MultiplicativeLR": lambda o, r: schedulers.MultiplicativeLR(o, lambda step: 0.95),
    "StepLR": lambda o, r: schedulers.StepLR(o, 5, 0.5),
    "MultiStepLR": lambda o, r: schedulers.MultiStepLR(o, [4, 12, 13], 0.5),
    "ConstantLR": lambda o, r: schedulers.ConstantLR(o, 0.25, total_iters=14),
    "LinearLR": lambda o, r: schedulers.LinearLR(o, 0.25, total_iters=14),
    "ExponentialLR": lambda o, r: schedulers.ExponentialLR(o, 0.9),
    "CosineAnnealingLR": lambda o, r: schedulers.CosineAnnealingLR(o, 20, eta_min=1e-3),
    "CosineAnnealingWarmRestarts": lambda o, r: schedulers.CosineAnnealingWarmRestarts(o, 7, 2),
    "PolynomialLR": lambda o, r: schedulers.PolynomialLR(o, 18, 2.0),
    "CyclicLR": lambda o, r: schedulers.CyclicLR(o, r / 10, r, step_size_up=4, mode="exp_range", gamma=0.9),
    "OneCycleLR": lambda o, r: schedulers.OneCycleLR(o, r, 30),
    "ReduceLROnPlateau": lambda o, r: schedulers.ReduceLROnPlateau(o, patience=2, factor=0.5),
    "SequentialLR": sequential,
    "ChainedScheduler": chained,
    "SWALR": lambda o, r: SWALR(o, 0.05, anneal_epochs=15),
}
OPTIMIZERS: dict[str, Callable[[Any, float], Any]] = {
    "SGD": lambda groups, rate: torch.optim.SGD(groups, lr=rate, momentum=0.9),
    "AdamW": lambda groups, rate: torch.optim.AdamW(groups, lr=rate),
}
OWNED = ("lr", "momentum", "betas", "weight_decay")


class Run:
    """An optimizer of two groups, and a scheduler."""

    def __init__(self, name: str, kind: str, rate: float) -> None:
        self.weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
        groups = [{"params": [weight]} for weight in self.weights]
        self.optimizer = OPTIMIZERS[kind](groups, rate)
        self.scheduler = BUILD[name](self.optimizer, rate)

    def step(self, steps: int) -> list[Any]:
        """Step both, and return what the scheduler owned at each step of the optimizer."""
        seen = []
        for _ in range(steps):
            for weight in self.weights:
                weight.grad = torch.ones(3)
            seen.append([{key: group.get(key) for key in OWNED} for group in self.optimizer.param_groups])
            self.optimizer.step()
            loss = [1.0] if isinstance(self.scheduler, schedulers.ReduceLROnPlateau) else []
            self.scheduler.step(*loss)
        return seen

    def saved(self) -> dict[str, Any]:
        state = {"optimizer": self.optimizer.state_dict(), "scheduler": self.scheduler.state_dict()}
        return copy.deepcopy({**state, "iteration": SAVED_AT})


CASES = [
    pytest.param(
        optimizer,
        scheduler,
        in_file,
        id=f"{optimizer}-{scheduler}-{'both' if in_file else 'scheduler alone'} saved",
    )
    for optimizer in ("restore", "fresh", "reset")
    for scheduler in ("restore", "fresh")
    for in_file in (True, False)
    if in_file or optimizer == "fresh"
]


@pytest.mark.parametrize(("optimizer", "scheduler", "in_file"), CASES)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("name", BUILD)
def test_the_trajectory_after_a_resume_is_the_right_one(
    name: str, kind: str, optimizer: str, scheduler: str, in_file: bool
) -> None:
    run = Run(name, kind, 1.0)
    run.step(SAVED_AT)
    saved = run.saved() if in_file else {**run.saved(), "optimizer": None}
    right = (
        run.step(STEPS - SAVED_AT) if scheduler == "restore" else Run(name, kind, 0.1).step(STEPS - SAVED_AT)
    )
    resumed = Run(name, kind, 0.1)
    policy = ResumePolicy.from_dict({"optimizer": optimizer, "scheduler": scheduler})
    plan = plan_resume(policy, saved, optimizer=resumed.optimizer, scheduler=resumed.scheduler)
    before = copy.deepcopy(resumed.scheduler.state_dict())
    assert plan.rates == tuple(group["lr"] for group in right[0])
    assert resumed.scheduler.state_dict() == before, "a plan changes nothing"
    report = plan.apply()
    assert plan.apply().to_dict() == report.to_dict(), "twice is once"
    assert report.iteration == SAVED_AT
    assert resumed.step(STEPS - SAVED_AT) == right
    counts = {float(state["step"]) for state in resumed.optimizer.state.values() if "step" in state}
    assert counts in (set(), {float(STEPS - SAVED_AT * (optimizer != "restore"))})


def test_what_a_scheduler_cannot_save_is_said() -> None:
    run = Run("LambdaLR", "SGD", 1.0)
    run.step(3)
    policy = ResumePolicy.from_dict({})
    plan = plan_resume(policy, run.saved(), optimizer=run.optimizer, scheduler=run.scheduler)
    assert "LambdaLR cannot save its functions of groups [0, 1]: the live ones go on" in plan.notes


def test_a_cycle_that_cannot_be_found_again_is_refused_before_anything_changes() -> None:
    run = Run("OneCycleLR", "SGD", 1.0)
    run.step(5)
    saved = {"scheduler": run.saved()["scheduler"], "iteration": 5}
    resumed = Run("StepLR", "SGD", 0.1)
    resumed.scheduler = schedulers.OneCycleLR(resumed.optimizer, 0.1, 30, div_factor=3)
    before = copy.deepcopy(resumed.optimizer.state_dict())
    policy = ResumePolicy.from_dict({"optimizer": "fresh"})
    with pytest.raises(CheckpointError, match="build it with those of the saved run"):
        plan_resume(policy, saved, optimizer=resumed.optimizer, scheduler=resumed.scheduler)
    assert resumed.optimizer.state_dict() == before


@pytest.mark.parametrize(("saved", "live"), list(pairwise([*BUILD, "LambdaLR"])))
def test_a_state_of_another_class_is_refused(saved: str, live: str) -> None:
    run, resumed = Run(saved, "SGD", 1.0), Run(live, "SGD", 1.0)
    if set(run.scheduler.state_dict()) == set(resumed.scheduler.state_dict()):
        pytest.skip("their states have the same keys")
    with pytest.raises(CheckpointError, match=r"not of the live scheduler's class|holds 2 schedulers"):
        plan_resume(
            ResumePolicy(optimizer="fresh"),
            run.saved(),
            optimizer=resumed.optimizer,
            scheduler=resumed.scheduler,
        )


def test_a_state_about_other_groups_is_refused() -> None:
    run, resumed = Run("StepLR", "SGD", 1.0), Run("StepLR", "SGD", 1.0)
    saved = run.saved()
    saved["scheduler"]["base_lrs"] = [1.0]
    with pytest.raises(CheckpointError, match="about other param groups: base_lrs has 1, the live one 2"):
        plan_resume(
            ResumePolicy(optimizer="fresh"), saved, optimizer=resumed.optimizer, scheduler=resumed.scheduler
        )


class Halving:
    """A scheduler that is none of torch's, and that no plugin knows."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.count = optimizer, 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


@pytest.mark.parametrize("in_file", [True, False])
def test_a_scheduler_without_a_rule_gets_the_saved_rate_or_it_is_said(in_file: bool) -> None:
    run, resumed = Run("StepLR", "SGD", 0.5), Run("StepLR", "SGD", 0.1)
    saved = {"optimizer": run.optimizer.state_dict() if in_file else None, "scheduler": {"count": 3}}
    policy = ResumePolicy.from_dict({"optimizer": "fresh", "iteration": 3})
    scheduler = Halving(resumed.optimizer)
    report = plan_resume(policy, saved, optimizer=resumed.optimizer, scheduler=scheduler).apply()
    assert scheduler.count == 3
    assert resumed.optimizer.param_groups[0]["lr"] == (0.5 if in_file else 0.1)
    assert any("no plugin has a rule for Halving" in note for note in report.notes) == (not in_file)


ALL = list(BUILD)
PROPORTIONAL = [name for name in ALL[:10] if name != "CosineAnnealingLR"]  # that one has a floor here


def resumed_rates(name: str, choices: dict[str, Any], twice: bool) -> list[Any]:
    run, resumed = Run(name, "SGD", 1.0), Run(name, "SGD", 0.1)
    run.step(SAVED_AT)
    policy = ResumePolicy.from_dict(choices)
    plan = plan_resume(policy, run.saved(), optimizer=resumed.optimizer, scheduler=resumed.scheduler)
    plan.apply()
    if twice:
        plan.apply()
    assert plan.rates == tuple(group["lr"] for group in resumed.optimizer.param_groups)
    return [groups[0]["lr"] for groups in resumed.step(STEPS - SAVED_AT)]


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("optimizer", ["restore", "fresh", "reset"])
@pytest.mark.parametrize("name", PROPORTIONAL)
def test_an_overridden_rate_scales_the_schedule(name: str, optimizer: str, twice: bool) -> None:
    other = Run(name, "SGD", 0.5)
    whole = [groups[0]["lr"] for groups in other.step(STEPS)]
    for scheduler, right in (("restore", whole[SAVED_AT:]), ("fresh", whole[: STEPS - SAVED_AT])):
        choices = {"optimizer": optimizer, "scheduler": scheduler, "overrides": {"lr": 0.5}}
        assert resumed_rates(name, choices, twice) == pytest.approx(right, rel=1e-12)


@pytest.mark.parametrize("name", ["CyclicLR", "OneCycleLR", "ReduceLROnPlateau", "SWALR"])
def test_a_rate_that_no_schedule_starts_from_is_refused(name: str) -> None:
    with pytest.raises(PolicyError, match=f"'lr' is not what {name} starts from"):
        resumed_rates(name, {"overrides": {"lr": 0.5}}, twice=False)


def nested(optimizer: Any, inner: Any) -> Any:
    return schedulers.SequentialLR(
        optimizer, [schedulers.ConstantLR(optimizer, 0.5, 2), inner(optimizer)], [2]
    )


@pytest.mark.parametrize(
    "inner",
    [
        lambda o: schedulers.CyclicLR(o, 0.1, 1.0, step_size_up=4),
        lambda o: schedulers.CosineAnnealingLR(o, 8, eta_min=0.01),
        lambda o: nested(o, lambda p: schedulers.ExponentialLR(p, 0.5)),
    ],
    ids=["cyclic", "with a floor", "nested"],
)
def test_a_rate_of_a_sequence_that_is_not_proportional_is_refused(inner: Any) -> None:
    run = Run("StepLR", "SGD", 1.0)
    scheduler = nested(run.optimizer, inner)
    policy = ResumePolicy.from_dict({"optimizer": "fresh", "scheduler": "fresh", "overrides": {"lr": 0.1}})
    with pytest.raises(PolicyError, match="is not proportional to the rate it starts from"):
        plan_resume(policy, {"iteration": 1}, optimizer=run.optimizer, scheduler=scheduler)


class Absolute(schedulers.LRScheduler):
    """A scheduler of a user's own, which does not start from the rate of the groups."""

    def get_lr(self) -> list[float]:
        return [1.0 / (1 + self.last_epoch)] * len(self.optimizer.param_groups)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("StepLR", {"gamma": 0.9}, "'gamma' is in no param group and no setting of a scheduler"),
    ("OneCycleLR", {"max_lr": 0.9}, "'max_lr' is OneCycleLR's, which sets it"),
    ("StepLR", {"lr": True}, "'lr' is True, and takes the place of"),
    ("StepLR", {"lr": -1.0}, "'lr' is -1.0"),
    ("StepLR", {"lr": float("nan")}, "'lr' is nan"),
    ("StepLR", {"lr": "1e-4"}, "'lr' is '1e-4'"),
    ("StepLR", {"momentum": [1.0]}, "'momentum' is"),
]


@pytest.mark.parametrize(("name", "overrides", "said"), REFUSED)
def test_an_override_that_does_not_fit_is_refused(name: str, overrides: dict[str, Any], said: str) -> None:
    with pytest.raises(PolicyError, match=said):
        resumed_rates(name, {"overrides": overrides}, twice=False)


def test_a_rate_over_a_scheduler_that_nobody_knows_is_refused() -> None:
    run = Run("StepLR", "SGD", 1.0)
    policy = ResumePolicy.from_dict({"optimizer": "fresh", "scheduler": "fresh", "overrides": {"lr": 0.1}})
    with pytest.raises(PolicyError, match="'lr' is not what Absolute starts from"):
        plan_resume(policy, {"iteration": 1}, optimizer=run.optimizer, scheduler=Absolute(run.optimizer))


def test_the_betas_that_a_cycle_writes_are_refused() -> None:
    run = Run("OneCycleLR", "AdamW", 1.0)
    policy = ResumePolicy.from_dict(
        {"scheduler": "fresh", "optimizer": "fresh", "overrides": {"betas": [0.8, 0.9]}}
    )
    with pytest.raises(PolicyError, match="'betas' is OneCycleLR's"):
        plan_resume(policy, {"iteration": 1}, optimizer=run.optimizer, scheduler=run.scheduler)


def test_an_override_of_the_group_s_own_is_not_the_scheduler_s() -> None:
    run = Run("ReduceLROnPlateau", "AdamW", 1.0)
    policy = ResumePolicy.from_dict({"scheduler": "fresh", "optimizer": "fresh", "overrides": {"eps": 0.01}})
    plan_resume(policy, {"iteration": 1}, optimizer=run.optimizer, scheduler=run.scheduler).apply()
    assert run.optimizer.param_groups[0]["eps"] == 0.01
    assert run.scheduler.eps == 1e-8


def test_a_scheduler_over_another_optimizer_is_refused() -> None:
    run, other = Run("StepLR", "SGD", 1.0), Run("StepLR", "SGD", 1.0)
    with pytest.raises(PolicyError, match="over another optimizer"):
        plan_resume(ResumePolicy(), run.saved(), optimizer=run.optimizer, scheduler=other.scheduler)


def test_functions_of_a_trainer_are_not_copied() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.cannot_be_copied = (step for step in range(3))

        def rate(self, step: int) -> float:
            return 1 - step / 100

    run, trainer = Run("StepLR", "SGD", 1.0), Trainer()
    scheduler = schedulers.LambdaLR(run.optimizer, trainer.rate)
    policy = ResumePolicy.from_dict({"optimizer": "fresh"})
    saved = {"iteration": 1, "scheduler": scheduler.state_dict()}
    plan_resume(policy, saved, optimizer=run.optimizer, scheduler=scheduler).apply()


@pytest.mark.parametrize("name", ["SequentialLR", "ChainedScheduler"])
@pytest.mark.parametrize("saved_at", [2, SAVED_AT])
def test_an_overridden_rate_scales_the_schedulers_inside(name: str, saved_at: int) -> None:
    run, right, resumed = Run(name, "SGD", 1.0), Run(name, "SGD", 0.5), Run(name, "SGD", 0.1)
    run.step(saved_at)
    whole = [groups[0]["lr"] for groups in right.step(STEPS)]
    policy = ResumePolicy.from_dict({"overrides": {"lr": 0.5}})
    plan_resume(policy, run.saved(), optimizer=resumed.optimizer, scheduler=resumed.scheduler).apply()
    rates = [groups[0]["lr"] for groups in resumed.step(STEPS - saved_at)]
    assert rates == pytest.approx(whole[saved_at:], rel=1e-12)


def test_a_scheduler_of_a_user_s_own_comes_back_where_no_groups_were_saved() -> None:
    run, resumed = Run("StepLR", "SGD", 1.0), Run("StepLR", "SGD", 0.1)
    run.scheduler, resumed.scheduler = Absolute(run.optimizer), Absolute(resumed.optimizer)
    run.step(SAVED_AT)
    saved = {**run.saved(), "optimizer": None}
    policy = ResumePolicy.from_dict({"optimizer": "fresh"})
    plan_resume(policy, saved, optimizer=resumed.optimizer, scheduler=resumed.scheduler).apply()
    assert resumed.step(5) == run.step(5)
    assert resumed.optimizer.param_groups[0]["initial_lr"] == 1.0


def averaging(rate: float, averaged: float) -> Run:
    run = Run("StepLR", "SGD", rate)
    run.scheduler = SWALR(run.optimizer, averaged, anneal_epochs=15)
    return run


@pytest.mark.parametrize("in_file", [True, False])
def test_the_rate_that_swalr_anneals_to_is_in_the_groups_alone(in_file: bool) -> None:
    run, resumed = averaging(1.0, 0.05), averaging(1.0, 0.5)
    run.step(SAVED_AT)
    saved = run.saved() if in_file else {**run.saved(), "optimizer": None}
    policy = ResumePolicy.from_dict({"optimizer": "fresh"})
    plan = plan_resume(policy, saved, optimizer=resumed.optimizer, scheduler=resumed.scheduler)
    assert any("SWALR keeps swa_lr in the param groups alone" in note for note in plan.notes)
    plan.apply()
    assert (resumed.step(STEPS) == run.step(STEPS)) == in_file


def test_a_scale_of_a_user_s_own_cannot_be_saved_and_that_is_said() -> None:
    def cyclic(run: Run) -> Run:
        run.scheduler = schedulers.CyclicLR(run.optimizer, 0.1, 1.0, step_size_up=4, scale_fn=lambda x: 0.5)
        return run

    run, resumed = (cyclic(Run("StepLR", "SGD", 1.0)) for _ in range(2))
    run.step(3)
    plan = plan_resume(ResumePolicy(), run.saved(), optimizer=resumed.optimizer, scheduler=resumed.scheduler)
    assert plan.notes == ("CyclicLR cannot save its scale_fn: the live one goes on",)
    plan.apply()
    assert resumed.step(STEPS) == run.step(STEPS)
