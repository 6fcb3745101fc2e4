"""Hold Prodigy to the law of a reset."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from variants import Options, Setting, Table, build, cast, no_gradient, step_some

from miles_reset import reset_optimizer_states
from miles_reset.testing import WARMUPS, Parameters, sample_parameters

prodigyopt = pytest.importorskip("prodigyopt")

VARIANTS: list[Options] = [
    {},
    {"weight_decay": 0.05},
    {"safeguard_warmup": True},
    {"use_bias_correction": True},
    {"growth_rate": 1.02},
    {"d0": 0.01},
    {"slice_p": 11},
    {"beta3": 0.9, "decouple": False, "weight_decay": 0.05},
    {"betas": (0.0, 0.999)},
]


def one_is_zero() -> Parameters:
    parameters = sample_parameters()
    parameters[0].data.zero_()
    return parameters


SETTINGS = {
    "plain": Setting(),
    "many steps": Setting(law={"warmups": WARMUPS, "further": 12}, once=True),
    "no gradient": Setting(build=no_gradient, once=True),
    "bfloat16": Setting(parameters=cast(torch.bfloat16), once=True),
    "a parameter of zeros": Setting(parameters=one_is_zero, once=True),
}
TABLE = Table({"Prodigy": prodigyopt.Prodigy}, {"Prodigy": VARIANTS}, SETTINGS, {}, package="prodigyopt")


@pytest.mark.parametrize("case", TABLE.cases())
def test_a_reset_is_fresh(case: Any, hold: Any) -> None:
    hold(case)


def test_what_no_later_step_reads_is_fresh_too() -> None:
    parameters = one_is_zero()
    trial = build(prodigyopt.Prodigy, parameters, {})
    step_some(trial)
    parameters[0].data.zero_()
    reset_optimizer_states(trial.optimizer)
    fresh = prodigyopt.Prodigy(parameters)
    group, right = trial.optimizer.param_groups[0], fresh.param_groups[0]
    assert {**group, "params": None} == {**right, "params": None}
    assert trial.optimizer.state[parameters[0]]["p0"].shape == (), "one zero stands for all"
