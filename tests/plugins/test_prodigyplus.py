"""Hold the optimizer of prodigy-plus-schedule-free to the law of a reset."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from variants import Options, Setting, Table, no_gradient, not_finite, optimizers_in, step_some

from miles_reset import reset_optimizer_states
from miles_reset.testing import WARMUPS, Parameters, Trial, sample_parameters, trial_of

prodigyplus = pytest.importorskip("prodigyplus")

CLASSES = optimizers_in(prodigyplus)
VARIANTS: list[Options] = [
    {},
    {"use_schedulefree": False},
    {"factored": False},
    {"factored_fp32": False},
    {"use_speed": True},
    {"use_speed": True, "use_schedulefree": False},
    {"use_adopt": True},
    {"use_focus": True},
    {"use_bias_correction": True},
    {"prodigy_steps": 3},
    {"prodigy_steps": 3, "use_schedulefree": False},
    {"split_groups_mean": True},
    {"eps": None},
    {"use_cautious": True},
    {"use_orthograd": True, "weight_decay": 0.05},
    {"schedulefree_c": 8, "beta3": 0.9},
    {"d0": 0.01},
    {"stochastic_rounding": False},
]
LEFT_OUT = {"CoreOptimiser": "the base of the other, which cannot step"}


def wide(dtype: torch.dtype = torch.float32) -> Parameters:
    """Return the sample and a matrix that is large enough to be factored."""
    matrix = torch.randn(40, 6, generator=torch.Generator().manual_seed(3))
    return [torch.nn.Parameter(p.detach().to(dtype)) for p in [*sample_parameters(), matrix]]


def one_is_zero() -> Parameters:
    parameters = wide()
    parameters[0].data.zero_()
    return parameters


def several_groups(cls: type[Any], parameters: Parameters, options: Options) -> Trial:
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.5}]
    return trial_of(cls(groups, **options), parameters)


def grown(cls: type[Any], parameters: Parameters, options: Options) -> Trial:
    """Let the step size grow at the fourth step, as it would with gradients that agree."""
    inner = several_groups(cls, parameters, options)

    def step(i: int) -> None:
        inner.step(i)
        if i == 3:
            for group in inner.optimizer.param_groups:
                group["d"] *= 3
                group["d_prev"] *= 2

    return Trial(inner.optimizer, step, inner.weights)


SETTINGS = {
    "plain": Setting(parameters=wide),
    "many steps": Setting(parameters=wide, law={"warmups": WARMUPS, "further": 12}, once=True),
    "several groups": Setting(parameters=wide, build=several_groups),
    "step size grown": Setting(parameters=wide, build=grown, once=True),
    "no gradient": Setting(parameters=wide, build=no_gradient, once=True),
    "bfloat16": Setting(parameters=lambda: wide(torch.bfloat16)),
    "a parameter of zeros": Setting(parameters=one_is_zero, once=True),
    "not finite": Setting(parameters=wide, build=not_finite, once=True),
}
TABLE = Table(
    {"ProdigyPlusScheduleFree": prodigyplus.ProdigyPlusScheduleFree},
    {"ProdigyPlusScheduleFree": VARIANTS},
    SETTINGS,
    {},
    package="prodigy-plus-schedule-free",
    sample=3,
)


@pytest.mark.parametrize("case", TABLE.cases())
def test_a_reset_is_fresh(case: Any, hold: Any) -> None:
    hold(case)


@pytest.mark.parametrize("case", [case for case in TABLE.cases() if str(case.id).endswith("-plain")])
def test_a_reset_is_fresh_where_a_gradient_comes_late(case: Any) -> None:
    case.assert_late_gradients_are_fresh()


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_what_no_later_step_reads_is_fresh_too(options: Options) -> None:
    parameters = wide()
    trial, fresh = (several_groups(prodigyplus.ProdigyPlusScheduleFree, parameters, options) for _ in "ab")
    step_some(trial)
    reset_optimizer_states(trial.optimizer)
    for group, right in zip(trial.optimizer.param_groups, fresh.optimizer.param_groups, strict=True):
        assert {**group, "params": None} == {**right, "params": None}
    assert trial.optimizer.parameters_to_process == fresh.optimizer.parameters_to_process


def test_a_reset_in_evaluation_mode_moves_no_weight() -> None:
    parameters = wide()
    trial = step_some(trial_of(prodigyplus.ProdigyPlusScheduleFree(parameters, d0=0.01), parameters))
    trial.optimizer.eval()
    averaged = [parameter.detach().clone() for parameter in parameters]
    reset_optimizer_states(trial.optimizer)
    assert not trial.optimizer.param_groups[0]["train_mode"]
    trial.optimizer.train()
    assert all(map(torch.equal, parameters, averaged))


def test_every_class_of_prodigyplus_is_here() -> None:
    assert CLASSES.keys() == TABLE.classes.keys() | LEFT_OUT.keys()
