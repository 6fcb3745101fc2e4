"""Hold the optimizers of adam-atan2-pytorch to the law of a reset."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import Any

import pytest
import torch
from variants import Case, Options, Setting, Table, cast, no_gradient, step_some, step_with

from miles_reset import default_registry, reset_optimizer_states
from miles_reset.testing import WARMUPS, Parameters, Trial, sample_parameters

adam_atan2_pytorch = pytest.importorskip("adam_atan2_pytorch")

WHERE = {
    "AdamAtan2": "adam_atan2",
    "AdamAtan2ClipGrok": "adam_atan2_clip_grok",
    "AdamAtan2, orthogonal": "adam_atan2_with_orthog_grad",
    "AdamAtan2, Wasserstein": "adam_atan2_with_wasserstein_reg",
    "AdamAtan2, foreach": "foreach",
    "Adopt": "adopt",
    "AdoptAtan2": "adopt_atan2",
    "MuonAdamAtan2": "muon_adam_atan2",
    "PolarAdamAtan2": "polar_adam_atan2",
}
CLASSES: dict[str, Any] = {
    name: getattr(importlib.import_module(f"adam_atan2_pytorch.{module}"), name.partition(",")[0])
    for name, module in WHERE.items()
}
DECAY: Options = {"weight_decay": 0.05}
DRAWN_BACK: Options = {"regen_reg_rate": 0.5, "lr": 0.1}
VARIANTS: dict[str, list[Options]] = {name: [{}, DRAWN_BACK, DECAY] for name in CLASSES} | {
    "AdamAtan2": [{}, DRAWN_BACK, {**DECAY, "cautious_wd": True}, {"cautious_factor": 0.5}],
    "Adopt": [{}, DECAY],
    "AdoptAtan2": [{}, DRAWN_BACK, {"cautious_factor": 0.5}],
    "MuonAdamAtan2": [{}, DRAWN_BACK, {"use_normuon": True}, {"muon_beta1": 0.5, **DECAY}],
}


def build(cls: type[Any], parameters: Parameters, options: Options) -> Trial:
    """Give matrices to the half that orthogonalizes, where a class has one."""
    half = next(iter(inspect.signature(cls).parameters)).removesuffix("_params")
    if half == "params":
        return step_with(cls(parameters, **options), parameters)
    options = options | {f"remove_{half}_params_from_params": False}  # which would shuffle the others
    return step_with(cls(parameters[:2], parameters[2:], **options), parameters)


SETTINGS = {
    "plain": Setting(build=build),
    "many steps": Setting(build=build, law={"warmups": WARMUPS, "further": 12}, once=True),
    "no gradient": Setting(build=no_gradient, once=True),
    "bfloat16": Setting(parameters=cast(torch.bfloat16), build=build, once=True),
    "lr changed": Setting(build=build, law={"hyperparameters": {"lr": 0.05}}, once=True),
}
HALVES = ("MuonAdamAtan2", "PolarAdamAtan2")


def adapt(name: str, parameters: Parameters) -> Parameters:
    """Leave the scalar out for the one that cannot make it orthogonal to anything."""
    return [p for p in parameters if p.ndim] if name == "AdamAtan2, orthogonal" else parameters


TABLE = Table(
    CLASSES,
    VARIANTS,
    SETTINGS,
    {(name, "no gradient"): (TypeError, "missing") for name in HALVES},
    adapt=adapt,
    package="adam-atan2-pytorch",
    sample=4,
)


@pytest.mark.parametrize("case", TABLE.cases())
def test_a_reset_is_fresh(case: Case, hold: Any) -> None:
    hold(case)


@pytest.mark.parametrize(("case", "error", "match"), TABLE.refusals())
def test_what_cannot_be_built_over_parameters_alone(case: Case, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        case.step_load_and_step()


@pytest.mark.parametrize("name", [name for name in CLASSES if DRAWN_BACK in VARIANTS[name]])
def test_parameters_are_drawn_back_to_where_they_are_now(name: str) -> None:
    parameters = adapt(name, sample_parameters())
    trial = step_some(build(CLASSES[name], parameters, DRAWN_BACK))
    entries = [trial.optimizer.state[parameter] for parameter in parameters]
    starts = [entry["param_init"] for entry in entries]
    reset_optimizer_states(trial.optimizer)
    if name == "AdoptAtan2":
        assert not trial.optimizer.state, "all of it is made from the first gradient, or with what is"
        return
    assert all(entry["param_init"] is start for entry, start in zip(entries, starts, strict=True))
    for parameter, start in zip(parameters, starts, strict=True):
        assert torch.equal(parameter.flatten().sort().values, start.flatten().sort().values)


def test_gradients_are_made_orthogonal_to_none_at_first() -> None:
    name = "AdamAtan2, orthogonal"
    parameters = adapt(name, sample_parameters())
    trial = step_some(build(CLASSES[name], parameters, {}))
    means = trial.optimizer.state[parameters[0]]["grad_emas"]
    assert means.keys() == {"orig_grad"}
    reset_optimizer_states(trial.optimizer)
    assert trial.optimizer.state[parameters[0]]["grad_emas"] is means
    assert not means


def test_every_class_of_the_package_is_held_and_claimed() -> None:
    modules = pkgutil.iter_modules(adam_atan2_pytorch.__path__)
    assert {module.name for module in modules} == set(WHERE.values())
    for cls in CLASSES.values():
        claim = default_registry().find(cls)
        assert claim is not None
        assert claim.provider.plugin == "adam_atan2_pytorch"
