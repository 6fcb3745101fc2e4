"""Hold the optimizers of transformers to the law of a reset."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from variants import Case, Options, Setting, Table, cast, draw, no_gradient, not_finite, optimizers_in

from miles_reset import default_registry, reset_optimizer_states
from miles_reset.testing import WARMUPS, Parameters, Trial, assert_reset_is_fresh, sample_parameters

optimization = pytest.importorskip("transformers.optimization")
trainer_pt_utils = pytest.importorskip("transformers.trainer_pt_utils")

CLASSES = {"Adafactor": optimization.Adafactor}
LEFT_OUT = {"LayerWiseDummyOptimizer": "a wrapper, held to the law below"}
BY_HAND: Options = {"lr": 0.01, "relative_step": False}
VARIANTS = {
    "Adafactor": [
        {},
        {"warmup_init": True},
        {**BY_HAND, "scale_parameter": False},
        {**BY_HAND, "beta1": 0.9},
        {**BY_HAND, "weight_decay": 0.05, "decay_rate": -0.5},
    ]
}
SETTINGS = {
    "plain": Setting(),
    "many steps": Setting(law={"warmups": WARMUPS, "further": 12}, once=True),
    "no gradient": Setting(build=no_gradient, once=True),
    "not finite": Setting(build=not_finite),
    "bfloat16": Setting(parameters=cast(torch.bfloat16)),
}
TABLE = Table(CLASSES, VARIANTS, SETTINGS, {}, package="transformers", sample=2)


@pytest.mark.parametrize("case", TABLE.cases())
def test_a_reset_is_fresh(case: Case, hold: Any) -> None:
    hold(case)


# A Trainer that steps layer by layer


def layer_by_layer(parameters: Parameters) -> Trial:
    """Step each parameter in a hook of its own, as soon as it has its gradient."""
    held = {p: torch.optim.SGD([p], lr=0.01, momentum=0.9, dampening=0.3) for p in parameters}
    for parameter, optimizer in held.items():
        parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())

    def step(i: int) -> None:
        for parameter in parameters:
            parameter.grad = None
        losses = [(p * draw(p, 100 * i + number)).sum() for number, p in enumerate(parameters)]
        torch.autograd.backward(losses)

    def save_and_load() -> None:
        for optimizer in held.values():
            optimizer.load_state_dict(optimizer.state_dict())

    dummy = trainer_pt_utils.LayerWiseDummyOptimizer(optimizer_dict=held)
    return Trial(dummy, step, lambda: parameters, save_and_load)


def test_a_reset_reaches_the_optimizers_of_all_layers() -> None:
    assert_reset_is_fresh(layer_by_layer, warmups=(1, 4), further=5)
    report = reset_optimizer_states(layer_by_layer(sample_parameters()).optimizer)
    assert report.leaves == 4


def test_a_stand_in_without_optimizers_is_listed() -> None:
    report = reset_optimizer_states(trainer_pt_utils.LayerWiseDummyOptimizer())
    assert report.leaves == 0
    assert report.left_alone


# What there is


def test_every_class_of_transformers_is_held_or_left_out() -> None:
    found = optimizers_in(optimization).keys() | optimizers_in(trainer_pt_utils).keys()
    assert found == CLASSES.keys() | LEFT_OUT.keys()


def test_the_schemas_of_transformers_are_of_its_own_plugin() -> None:
    claim = default_registry().find(optimization.Adafactor)
    assert claim is not None
    assert claim.provider.plugin == "transformers"
