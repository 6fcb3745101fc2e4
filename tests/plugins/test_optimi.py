"""Hold the optimizers of torch-optimi to the law of a reset."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from variants import Options, Setting, Table, cast, draw, no_gradient, not_finite, optimizers_in

from miles_reset.testing import WARMUPS, Parameters, Trial, assert_reset_is_fresh, sample_parameters

optimi = pytest.importorskip("optimi")

pytestmark = pytest.mark.filterwarnings(
    "ignore:Parameter `foreach` is deprecated:DeprecationWarning",
    "ignore:You are using weight_decay up to:UserWarning",
)

CLASSES = optimizers_in(optimi)
DECAY: list[Options] = [
    {},
    {"weight_decay": 0.05},
    {"decouple_lr": True, "weight_decay": 0.05},
    {"foreach": True},
]
VARIANTS: dict[str, list[Options]] = {
    "Adam": [*DECAY, {"decouple_wd": True, "weight_decay": 0.05}],
    "AdamW": DECAY,
    "Adan": [*DECAY, {"adam_wd": True, "weight_decay": 0.05}],
    "Lion": DECAY,
    "RAdam": DECAY,
    "Ranger": [*DECAY, {"k": 3}],
    "SGD": [
        {"momentum": 0.9},
        {"momentum": 0.9, "dampening": True},
        {"momentum": 0.9, "dampening": True, "torch_init": True, "weight_decay": 0.05},
        {"momentum": 0.9, "foreach": True},
        {"kahan_sum": False},
    ],
    "StableAdamW": [{"triton": False, **options} for options in DECAY],
}
"""The options of each class that change its state, or how it is used."""

LEFT_OUT = {"OptimiOptimizer": "the base of the others, which cannot step"}
WITH_RATE: dict[str, list[Options]] = {
    name: [{"lr": 0.01, **options} for options in variants] for name, variants in VARIANTS.items()
}

SETTINGS = {
    "plain": Setting(),
    "many steps": Setting(law={"warmups": WARMUPS, "further": 12}, once=True),
    "no gradient": Setting(build=no_gradient, once=True),
    "bfloat16": Setting(parameters=cast(torch.bfloat16)),
    "bfloat16, no Kahan sums": Setting(lambda: {"kahan_sum": False}, cast(torch.bfloat16), once=True),
    "bfloat16 and float32": Setting(parameters=cast(torch.bfloat16, torch.float32), once=True),
    "not finite": Setting(build=not_finite, once=True),
}


def has_history(name: str, options: Options) -> bool:
    return name != "SGD" or "momentum" in options


TABLE = Table(
    {name: CLASSES[name] for name in VARIANTS},
    WITH_RATE,
    SETTINGS,
    {},
    has_history=has_history,
    package="torch-optimi",
    sample=4,
)


@pytest.mark.parametrize("case", TABLE.cases())
def test_a_reset_is_fresh(case: Any, hold: Any) -> None:
    hold(case)


@pytest.mark.parametrize("case", TABLE.first_cases())
def test_a_reset_is_fresh_where_a_gradient_comes_late(case: Any) -> None:
    case.assert_late_gradients_are_fresh()


def released(cls: Any, accumulate: int, parameters: Parameters, **options: Any) -> Trial:
    """Step in the backward pass; only every so often, and else accumulate gradients in the moments."""
    optimizer = cls(parameters, lr=0.01, gradient_release=True, **options)
    model = torch.nn.Module()
    for number, parameter in enumerate(parameters):
        model.register_parameter(str(number), parameter)
    optimi.prepare_for_gradient_release(model, optimizer)

    def step(i: int) -> None:
        optimizer.optimizer_accumulation = i % accumulate != accumulate - 1
        sum((parameter * draw(parameter, i)).sum() for parameter in parameters).backward()

    return Trial(optimizer, step, lambda: parameters)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_reset_with_gradient_release_is_fresh(name: str, accumulate: int) -> None:
    """What it saves holds its groups, and so the parameters: it is not loaded here. It takes no scalars."""

    def parameters() -> Parameters:
        return [parameter for parameter in sample_parameters() if parameter.ndim]

    build = partial(released, CLASSES[name], accumulate, **VARIANTS[name][0])
    law = {"warmups": (4, 6), "further": 7, "round_trips": [False]}
    assert_reset_is_fresh(build, parameters=parameters, **law)


def test_epsilon_is_the_one_that_the_group_has_now() -> None:
    stable = partial(CLASSES["StableAdamW"], lr=0.01, triton=False, eps=1e-6)
    assert_reset_is_fresh(stable, warmups=(4,), further=5, hyperparameters={"eps": 0.5})


def test_every_class_of_optimi_is_here() -> None:
    assert CLASSES.keys() == VARIANTS.keys() | LEFT_OUT.keys()
