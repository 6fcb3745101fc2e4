"""Hold the optimizers of timm to the law of a reset."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from variants import (
    Options,
    Setting,
    Table,
    cast,
    no_gradient,
    not_finite,
    optimizers_in,
    over,
    step_with_curvature,
)

from miles_reset.testing import WARMUPS, Parameters, Trial, trial_of

timm = pytest.importorskip("timm.optim")

CLASSES = optimizers_in(timm)

ADAM: list[Options] = [{}, {"weight_decay": 0.05}]
ALONE: list[Options] = [{}, {"foreach": False}]
BUFFER: list[Options] = [
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.3},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.05},
    {"momentum": 0.9, "foreach": True},
    {},
]
VARIANTS: dict[str, list[Options]] = {
    "AdaBelief": [
        {},
        {"amsgrad": True},
        {"rectify": False},
        {"decoupled_decay": False, "weight_decay": 0.05},
        {"foreach": True},
    ],
    "Adafactor": [
        {"min_dim_size_to_factor": 4},
        {},
        {"caution": True},
        {"betas": (0.9, 0.999)},
        {"warmup_init": True},
        {"lr": 0.01, "weight_decay": 0.05},
    ],
    "AdafactorBigVision": [
        {"min_dim_size_to_factor": 4},
        {},
        {"caution": True},
        {"momentum": None},
        {"momentum_dtype": torch.float32},
    ],
    "Adahessian": [{}, {"update_each": 3}, {"n_samples": 2}, {"hessian_power": 0.5, "weight_decay": 0.05}],
    "AdamP": [*ADAM, {"nesterov": True}, {"caution": True}],
    "AdamWLegacy": [{}, {"amsgrad": True}, {"caution": True}, {"foreach": True}, {"maximize": True}],
    "Adan": [{}, {"foreach": False}, {"caution": True}, {"no_prox": True, "weight_decay": 0.05}],
    "Adopt": [
        {},
        {"foreach": True},
        {"decoupled": True, "weight_decay": 0.05},
        {"clip_exp": None},
        {"caution": True},
    ],
    "Kron": [
        {},
        {"preconditioner_update_probability": 0.4},
        {"precond_init_scale": 0.3},
        {"memory_save_mode": "one_diag"},
        {"memory_save_mode": "all_diag"},
        {"momentum_into_precond_update": False},
        {"mu_dtype": torch.bfloat16},
        {"precond_dtype": torch.float64},
        {"stochastic_weight_decay": True, "weight_decay": 0.05},
        {"deterministic": True},
        {"flatten": True, "flatten_start_dim": 0},
    ],
    "Lamb": [{}, {"foreach": True}, {"bias_correction": False}, {"caution": True}, {"always_adapt": True}],
    "LaProp": [*ADAM, {"foreach": True}, {"caution": True}],
    "Lars": [*BUFFER[:4], {"momentum": 0.9, "trust_clip": True}],
    "Lion": [{}, {"caution": True}, {"maximize": True}, {"foreach": True}],
    "MADGRAD": [*ADAM, {"momentum": 0.0}, {"decoupled_decay": True, "weight_decay": 0.05}],
    "Mars": [{}, {"caution": True}, {"mars_type": "lion"}, {"optimize_1d": True}],
    "Muon": [{}, {"nesterov": True}, {"algo": "adamuon"}],
    "NAdamLegacy": ADAM,
    "NAdamW": [*ADAM, {"foreach": True}, {"caution": True}, {"maximize": True}],
    "NvNovoGrad": [*ADAM, {"amsgrad": True}, {"grad_averaging": True}],
    "RAdamLegacy": ADAM,
    "RMSpropTF": [
        {},
        {"momentum": 0.9},
        {"centered": True, "momentum": 0.9},
        {"lr_in_momentum": False, "momentum": 0.9},
        {"foreach": True},
    ],
    "SGDP": [{"lr": 0.1, **options} for options in BUFFER[:3]] + [{"lr": 0.1}],
    "SGDW": BUFFER,
}
"""The options of each class that change its state, or how it is used."""

LEFT_OUT = {"Lookahead": "a wrapper: held to the law below"}


def build(cls: type[Any], parameters: Parameters, options: Options) -> Trial:
    step_with = step_with_curvature if cls.__name__ == "Adahessian" else trial_of
    return step_with(cls(parameters, **options), parameters)


SETTINGS = {
    "plain": Setting(build=build),
    "many steps": Setting(build=build, law={"warmups": WARMUPS, "further": 12}, once=True),
    "no gradient": Setting(build=no_gradient, once=True),
    "bfloat16": Setting(build=build, parameters=cast(torch.bfloat16), once=True),
    "not finite": Setting(build=partial(not_finite, build=build), once=True),
}
REFUSED = {
    ("Adahessian", "no gradient"): (RuntimeError, "does not require grad"),
}
TABLE = Table(
    {name: CLASSES[name] for name in VARIANTS},
    VARIANTS,
    SETTINGS,
    REFUSED,
    has_history=lambda name, options: name not in ("SGDP", "SGDW") or "momentum" in options,
    package="timm",
    sample=8,
)


WRAPPERS = Table(
    {"Lookahead": timm.Lookahead},
    {"Lookahead": [{"k": 3}, {"k": 2, "alpha": 0.8}]},
    {
        "over AdamW": Setting(build=over(torch.optim.AdamW)),
        "over SGD": Setting(build=over(torch.optim.SGD, momentum=0.9, dampening=0.3)),
        "over Adan": Setting(build=over(timm.Adan)),
        "over Adopt": Setting(build=over(timm.Adopt)),
        "over Lamb": Setting(build=over(timm.Lamb)),
        "over plain SGD": Setting(build=over(torch.optim.SGD, lr=0.1)),
    },
    {},
    package="timm",
    sample=2,
)


pytestmark = pytest.mark.usefixtures("nothing_is_compiled")


@pytest.mark.parametrize("case", TABLE.cases() + WRAPPERS.cases())
def test_a_reset_is_fresh(case: Any, hold: Any) -> None:
    hold(case)


@pytest.mark.parametrize("case", TABLE.first_cases())
def test_a_reset_is_fresh_where_a_gradient_comes_late(case: Any) -> None:
    case.assert_late_gradients_are_fresh()


@pytest.mark.parametrize(("case", "error", "match"), TABLE.refusals())
def test_what_timm_cannot_step(case: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        case.step_load_and_step()


def test_every_class_of_timm_is_here() -> None:
    assert CLASSES.keys() == VARIANTS.keys() | LEFT_OUT.keys()
