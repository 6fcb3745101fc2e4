"""Hold the optimizers of lomo-optim, which step while gradients are computed, to the law of a reset."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fake_cuda import fake_cuda
from variants import Case, Options, Setting, Table, cast, draw, optimizers_in, step_some

from miles_reset import default_registry, reset_optimizer_states
from miles_reset.testing import WARMUPS, Parameters, Trial, assert_reset_is_fresh, sample_parameters

lomo_optim = pytest.importorskip("lomo_optim")

CLASSES = {"Lomo": lomo_optim.Lomo, "AdaLomo": lomo_optim.AdaLomo}
VARIANTS: dict[str, list[Options]] = {
    "Lomo": [{}, {"weight_decay": 0.05, "clip_grad_value": 0.5}, {"clip_grad_norm": 1.0}],
    "AdaLomo": [{}, {"weight_decay": 0.05}, {"clip_grad_norm": 1.0}, {"decay_rate": -0.5}],
}


def build(cls: type[Any], parameters: Parameters, options: Options) -> Trial:
    optimizer = cls(torch.nn.ParameterList(parameters), lr=0.01, **options)

    def loss(i: int) -> Any:
        return sum((p * draw(p, 100 * i + number)).sum() for number, p in enumerate(parameters))

    def step(i: int) -> None:
        if options.get("clip_grad_norm"):
            optimizer.grad_norm(loss(i))
        optimizer.fused_backward(loss(i), lr=0.01)

    return Trial(optimizer, step, lambda: parameters)


def not_finite(cls: type[Any], parameters: Parameters, options: Options) -> Trial:
    """Spoil the second moment after the fourth step: of a finite one, a first step reads nothing."""
    inner = build(cls, parameters, options)
    optimizer = inner.optimizer

    def step(i: int) -> None:
        inner.step(i)
        if i == 3:
            for held in (optimizer.exp_avg_sq, optimizer.exp_avg_sq_row, optimizer.exp_avg_sq_col):
                for tensor in held.values():
                    tensor.fill_(torch.nan)

    return Trial(optimizer, step, inner.weights)


def adapt(name: str, parameters: Parameters) -> Parameters:
    """Leave out the scalar, for which AdaLomo has no place."""
    return [p for p in parameters if p.ndim or name == "Lomo"]


SETTINGS = {
    "plain": Setting(build=build),
    "many steps": Setting(build=build, law={"warmups": WARMUPS, "further": 12}, once=True),
    "bfloat16": Setting(parameters=cast(torch.bfloat16), build=build, once=True),
}
TABLE = Table(
    CLASSES,
    VARIANTS,
    SETTINGS,
    {},
    adapt=adapt,
    has_history=lambda name, options: name != "Lomo",
    package="lomo-optim",
)


@pytest.fixture(autouse=True)
def without_a_gpu() -> Iterator[None]:
    """Let the CPU stand for a GPU: AdaLomo makes its state there."""
    with fake_cuda():
        yield


@pytest.mark.parametrize("case", TABLE.cases())
def test_a_reset_is_fresh(case: Case, hold: Any) -> None:
    hold(case)


def test_a_reset_is_fresh_after_an_overflow() -> None:
    def spoiled(parameters: Parameters) -> Trial:
        return not_finite(lomo_optim.AdaLomo, parameters, {})

    def parameters() -> Parameters:
        return adapt("AdaLomo", sample_parameters())

    assert_reset_is_fresh(spoiled, parameters=parameters, warmups=(4,), further=5)


@pytest.mark.parametrize("name", CLASSES)
def test_what_was_clipped_by_is_forgotten_and_the_scale_of_the_loss_is_kept(name: str) -> None:
    trial = step_some(build(CLASSES[name], adapt(name, sample_parameters()), {"clip_grad_norm": 1.0}))
    optimizer = trial.optimizer
    scale = "loss_scaler" if name == "Lomo" else "loss_scale"
    before = optimizer.loss_scaler = object() if name == "Lomo" else None
    assert optimizer.clip_coef is not None
    reset_optimizer_states(optimizer)
    assert optimizer.clip_coef is None
    assert getattr(optimizer, scale) == (before or 2**10)


def test_every_class_of_the_package_is_held_and_claimed() -> None:
    found = optimizers_in(lomo_optim)
    assert found.keys() == CLASSES.keys()
    for cls in found.values():
        claim = default_registry().find(cls)
        assert claim is not None
        assert claim.provider.plugin == "lomo_optim"
