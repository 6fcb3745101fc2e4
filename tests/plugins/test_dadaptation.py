"""Hold the optimizers of dadaptation to the law of a reset."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from variants import (
    Options,
    Setting,
    Table,
    as_matrices,
    cast,
    lookup_in,
    no_gradient,
    not_finite,
    optimizers_in,
)

from miles_reset import reset_optimizer_states
from miles_reset.testing import (
    WARMUPS,
    Parameters,
    Trial,
    assert_reset_is_fresh,
    sample_parameters,
    trial_of,
)

dadaptation = pytest.importorskip("dadaptation")

CLASSES = optimizers_in(dadaptation)
COMMON: list[Options] = [{}, {"weight_decay": 0.05}, {"d0": 0.01}]
GROWING: list[Options] = [*COMMON, {"growth_rate": 1.02}]
VARIANTS: dict[str, list[Options]] = {
    "DAdaptAdaGrad": [*GROWING, {"momentum": 0.9}],
    "DAdaptAdam": [*GROWING, {"use_bias_correction": True}, {"decouple": True, "weight_decay": 0.05}],
    "DAdaptAdamPreprint": [*GROWING, {"decouple": True, "weight_decay": 0.05}],
    "DAdaptAdan": [*GROWING, {"no_prox": True}],
    "DAdaptAdanIP": [*GROWING, {"no_prox": True}],
    "DAdaptLion": COMMON,
    "DAdaptSGD": [*GROWING, {"momentum": 0.9}],
}
"""The options of each class that change its state, or how it is used."""


def several_groups(cls: type[Any], parameters: Parameters, options: Options) -> Trial:
    """Give each parameter a group of its own: the counts and sums of the first one are those of all."""
    return trial_of(cls([{"params": [parameter]} for parameter in parameters], **options), parameters)


def grown(cls: type[Any], parameters: Parameters, options: Options) -> Trial:
    """Let the step size grow at the fourth step, as it would with gradients that agree."""
    inner = several_groups(cls, parameters, options)

    def step(i: int) -> None:
        inner.step(i)
        if i == 3:
            for group in inner.optimizer.param_groups:
                group["d"] *= 3

    return Trial(inner.optimizer, step, inner.weights)


SETTINGS = {
    "plain": Setting(),
    "many steps": Setting(law={"warmups": WARMUPS, "further": 12}, once=True),
    "no gradient": Setting(build=no_gradient, once=True),
    "several groups": Setting(build=several_groups, once=True),
    "step size grown": Setting(build=grown, once=True),
    "bfloat16": Setting(parameters=cast(torch.bfloat16), once=True),
    "not finite": Setting(build=not_finite, once=True),
}
TABLE = Table(
    {name: CLASSES[name] for name in VARIANTS}, VARIANTS, SETTINGS, {}, package="dadaptation", sample=4
)


@pytest.mark.parametrize("case", TABLE.cases())
def test_a_reset_is_fresh(case: Any, hold: Any) -> None:
    hold(case)


@pytest.mark.parametrize("case", TABLE.first_cases())
def test_a_reset_is_fresh_where_a_gradient_comes_late(case: Any) -> None:
    case.assert_late_gradients_are_fresh()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_a_reset_of_sparse_sums_is_fresh() -> None:
    def sparse(parameters: Parameters) -> Trial:
        optimizer = dadaptation.DAdaptAdaGrad(parameters)
        return Trial(optimizer, lambda i: optimizer.step(lookup_in(parameters, i)), lambda: parameters)

    assert_reset_is_fresh(
        sparse, parameters=lambda: as_matrices(sample_parameters()), warmups=(4,), further=5
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_what_no_later_step_reads_is_fresh_too(name: str) -> None:
    parameters = sample_parameters()
    trial = trial_of(CLASSES[name](parameters, d0=0.01), parameters)
    for i in range(4):
        trial.step(i)
    reset_optimizer_states(trial.optimizer)
    group, right = (one.param_groups[0] for one in (trial.optimizer, CLASSES[name](parameters, d0=0.01)))
    assert {**group, "params": None} == {**right, "params": None}


def test_every_class_of_dadaptation_is_here() -> None:
    assert CLASSES.keys() == VARIANTS.keys()
