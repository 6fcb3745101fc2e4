"""Hold the optimizers of torchao to the law of a reset, and the one that offloads others to the CPU."""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from fake_cuda import fake_cuda
from variants import (
    Build,
    Case,
    Options,
    Refusal,
    Setting,
    Table,
    build,
    draw,
    no_gradient,
    optimizers_in,
    step_some,
)

from miles_reset import default_registry, reset_optimizer_states
from miles_reset.testing import Parameters, Trial, assert_reset_is_fresh, sample_parameters

torchao = pytest.importorskip("torchao")
optim = pytest.importorskip("torchao.optim")
cpu_offload = pytest.importorskip("torchao.optim.cpu_offload")

QUANTIZED = ["Adam4bit", "Adam8bit", "AdamFp8", "AdamW4bit", "AdamW8bit", "AdamWFp8"]
CLASSES: dict[str, Any] = {name: getattr(optim, name) for name in [*QUANTIZED, "_AdamW"]}
A_SCHEDULE = "a prototype: it trains a copy of the weights in the state, and its count is a schedule"
LEFT_OUT = {
    "CPUOffloadOptimizer": "a wrapper, held to the law below",
    "PruneOptimizer": A_SCHEDULE,
    "QuantOptimizer": A_SCHEDULE,
    "_AdamBase": "a base, which cannot make its state",
}
VARIANTS: dict[str, list[Options]] = {
    name: [{}, {"weight_decay": 0.05}, {"block_size": 64}] for name in QUANTIZED
} | {"_AdamW": [{}, {"weight_decay": 0.05}]}


def with_a_large_one(dtype: torch.dtype = torch.float32) -> Callable[[], Parameters]:
    """Return what makes the sample parameters and one of 4096 elements: no smaller one is quantized."""

    def parameters() -> Parameters:
        sample = [parameter.detach().to(dtype) for parameter in sample_parameters()]
        return [torch.nn.Parameter(p) for p in (*sample, sample[0].repeat(8, 11)[:, :64].contiguous())]

    return parameters


def through_a_file(build: Build) -> Build:
    """Save and load through a file: quantized tensors know no copy."""

    def built(cls: Any, parameters: Parameters, options: Options) -> Trial:
        trial = build(cls, parameters, options)

        def save_and_load() -> None:
            file = io.BytesIO()
            torch.save(trial.optimizer.state_dict(), file)
            file.seek(0)
            trial.optimizer.load_state_dict(torch.load(file))

        return replace(trial, round_trip=save_and_load)

    return built


LARGE, ITS_BUILD = with_a_large_one(), through_a_file(build)
SETTINGS = {
    "plain": Setting(parameters=LARGE, build=ITS_BUILD),
    "many steps": Setting(
        parameters=LARGE, build=ITS_BUILD, law={"warmups": (1, 5), "further": 12}, once=True
    ),
    "no gradient": Setting(parameters=LARGE, build=through_a_file(no_gradient), once=True),
    "bfloat16": Setting(parameters=with_a_large_one(torch.bfloat16), build=ITS_BUILD, once=True),
    "bfloat16, rounded by chance": Setting(
        lambda: {"bf16_stochastic_round": True}, with_a_large_one(torch.bfloat16), ITS_BUILD, once=True
    ),
    "lr changed": Setting(
        parameters=LARGE, build=ITS_BUILD, law={"hyperparameters": {"lr": torch.tensor(0.05)}}, once=True
    ),
    "amsgrad": Setting(lambda: {"amsgrad": True}, LARGE, ITS_BUILD, once=True),
    "amsgrad, small": Setting(lambda: {"amsgrad": True}, build=ITS_BUILD, once=True),
}
REFUSED: dict[tuple[str, str], Refusal] = {
    (name, "amsgrad"): (NotImplementedError, "maximum") for name in QUANTIZED
}
TABLE = Table(CLASSES, VARIANTS, SETTINGS, REFUSED, package="torchao", sample=5)


pytestmark = pytest.mark.usefixtures("nothing_is_compiled")


@pytest.mark.parametrize("case", TABLE.cases())
def test_a_reset_is_fresh(case: Case, hold: Any) -> None:
    hold(case)


@pytest.mark.parametrize(("case", "error", "match"), TABLE.refusals())
def test_torchao_cannot_step(case: Case, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        case.step_load_and_step()


@pytest.mark.parametrize("name", QUANTIZED)
def test_codes_and_scales_are_zero_and_tables_are_kept(name: str) -> None:
    parameters = LARGE()
    optimizer = step_some(build(CLASSES[name], parameters, {})).optimizer
    entry = optimizer.state[parameters[-1]]
    moments = [entry["exp_avg"], entry["exp_avg_sq"]]
    parts = [{part: getattr(moment, part) for part in moment.tensor_attrs} for moment in moments]
    tables = [{part: held[part].clone() for part in held.keys() - {"codes", "scale"}} for held in parts]
    assert all(held[part].float().any() for held in parts for part in ("codes", "scale"))
    reset_optimizer_states(optimizer)
    assert entry["exp_avg"] is moments[0]
    for moment, held, kept in zip(moments, parts, tables, strict=True):
        for part, tensor in held.items():
            assert getattr(moment, part) is tensor
            assert torch.equal(tensor.float(), kept.get(part, torch.zeros(tensor.shape)))


# The wrapper


def offloading(inner: Any, **options: Any) -> Callable[[Parameters], Trial]:
    """Return what builds the wrapper over parameters, of which the large go to the CPU."""

    def built(parameters: Parameters) -> Trial:
        optimizer = optim.CPUOffloadOptimizer(parameters, inner, minimal_size=30, **options)

        def step(i: int) -> None:
            loss = sum((p * draw(p, 100 * i + number)).sum() for number, p in enumerate(parameters))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return Trial(optimizer, step, lambda: parameters)

    return built


@pytest.fixture
def offload() -> Iterator[None]:
    """Let the CPU stand for the GPU from which it takes load."""
    devices = {"return_value": ["cpu", "cuda"]}
    with fake_cuda(), mock.patch.object(cpu_offload, "get_available_devices", **devices):
        yield


WRAPPED = {
    "AdamW": (torch.optim.AdamW, {}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.3}),
    "Adam8bit": (optim.Adam8bit, {}),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_a_reset_through_the_wrapper_is_fresh(name: str, offload: None) -> None:
    inner, options = WRAPPED[name]
    assert_reset_is_fresh(offloading(inner, **options), warmups=(1, 4), further=5)


def test_the_wrapper_holds_one_optimizer_for_each_large_parameter_and_one_more(
    offload: None,
) -> None:
    parameters = sample_parameters()
    trial = step_some(offloading(torch.optim.AdamW)(parameters))
    report = reset_optimizer_states(trial.optimizer)
    held = {line.path.partition(".")[0] for line in report.lines}
    assert held == {f"CPUOffloadOptimizer[{label}]" for label in ("0", "1", "on-device")}


def test_weights_that_were_loaded_come_to_the_cpu(offload: None) -> None:
    parameters = sample_parameters()
    trial = step_some(offloading(torch.optim.AdamW)(parameters))
    for parameter in parameters:
        parameter.data.fill_(3.0)
    rule = default_registry().find(type(trial.optimizer)).record
    rule.refresh_masters(trial.optimizer)
    assert all((on_cpu == 3.0).all() for on_cpu in trial.optimizer.param_d2h_map.values())


# What there is


def test_every_class_of_torchao_is_held_or_left_out() -> None:
    modules = [optim]
    for name in ("torchao.prototype.pat.optim", "torchao.prototype.parq.optim"):
        with contextlib.suppress(ImportError):
            modules.append(importlib.import_module(name))
    found = {name for module in modules for name in optimizers_in(module)}
    assert found <= CLASSES.keys() | LEFT_OUT.keys()


@pytest.mark.parametrize("name", CLASSES)
def test_every_class_is_claimed(name: str) -> None:
    claim = default_registry().find(CLASSES[name])
    assert claim is not None
    assert claim.provider.plugin == "torchao"
