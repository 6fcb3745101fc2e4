"""Hold optimizers that come in packages of one or two classes to the law of a reset."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from variants import (
    Build,
    Case,
    Options,
    Setting,
    Table,
    alone,
    as_matrices,
    build,
    cast,
    no_gradient,
    not_finite,
    optimizers_in,
    step_some,
    step_with,
)

from miles_reset import default_registry, reset_optimizer_states
from miles_reset.testing import WARMUPS, Parameters, Trial, assert_reset_is_fresh, trial_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:This overload of :UserWarning"),  # how adabound and adamod call torch
    pytest.mark.filterwarnings("ignore:No device id is provided:UserWarning"),
]


@dataclass(frozen=True)
class Package:
    """A distribution.

    Attributes:
        module: The module that it is imported as.
        variants: The options of each class that decide what it keeps.
        build: Builds an optimizer.
        adapt: Makes parameters ones that its classes take.
        plugin: The plugin that declares it, where it has another name than the module.
    """

    module: str
    variants: Mapping[str, Sequence[Options]]
    build: Build = build
    adapt: Callable[[Parameters], Parameters] = list
    plugin: str = ""


# How some are built and stepped


def update_curvature(cls: type[Any], parameters: Parameters, options: Options) -> Trial:
    """Step, and estimate the curvature at every second step."""
    inner = build(cls, parameters, options)

    def step(i: int) -> None:
        inner.step(i)
        if i % 2 == 0:
            inner.optimizer.update_hessian()

    return Trial(inner.optimizer, step, inner.weights)


def restart_every_third_step(entry: dict[str, Any]) -> bool:
    return bool(entry["step"] % 3 == 2)


def named(cls: type[Any], parameters: Parameters, options: Options) -> Trial:
    """Name each parameter for what Adam-mini tells blocks by."""
    names = ["q_proj.weight", "mlp.weight", "bias", "scale"]
    pairs = zip(names, parameters, strict=True)
    return step_with(cls(pairs, dim=12, n_heads=6, verbose=False, **options), parameters)


def in_groups(cls: type[Any], parameters: Parameters, options: Options) -> Trial:
    """Step matrices by Muon and the others by Adam, where a class does both."""
    if "AuxAdam" not in cls.__name__:
        return trial_of(cls(parameters, **options), parameters)
    groups = [
        {"params": parameters[:2], "use_muon": True, **options},
        {"params": parameters[2:], "use_muon": False, "lr": 0.01},
    ]
    return trial_of(cls(groups), parameters)


@pytest.fixture(autouse=True)
def in_a_process_group() -> Iterator[None]:
    """Let Muon's classes gather from all ranks: there is one."""
    with alone():
        yield


# The packages

DECAY: Options = {"weight_decay": 0.05}
MUON: list[Options] = [{}, {"momentum": 0.8, "weight_decay": 0.05}]
PACKAGES = {
    "adabelief-pytorch": Package(
        "adabelief_pytorch",
        {
            "AdaBelief": [
                {"print_change_log": False, **options}
                for options in ({}, {"amsgrad": True}, {"rectify": False}, {"betas": (0.5, 0.9), **DECAY})
            ]
        },
    ),
    "adabound": Package("adabound", {"AdaBound": [{}, {"amsbound": True}, {"gamma": 0.1, "final_lr": 0.5}]}),
    "adamod": Package("adamod", {"AdaMod": [{}, {"beta3": 0.9}]}),
    "adamp": Package(
        "adamp",
        {
            "AdamP": [{}, {"nesterov": True}, {**DECAY, "delta": 10.0}],
            "SGDP": [
                {"lr": 0.05, "momentum": 0.9, **options}
                for options in ({}, {"dampening": 0.3}, {"nesterov": True, **DECAY})
            ],
        },
    ),
    "adan-pytorch": Package(
        "adan_pytorch", {"Adan": [{}, DECAY, {"restart_cond": restart_every_third_step}]}
    ),
    "adam-mini": Package("adam_mini", {"Adam_mini": [{}, DECAY]}, named),
    "came-pytorch": Package("came_pytorch", {"CAME": [{"lr": 0.01}, {"lr": 0.01, **DECAY}]}),
    "muon-optimizer": Package(
        "muon",
        dict.fromkeys(("Muon", "SingleDeviceMuon", "MuonWithAuxAdam", "SingleDeviceMuonWithAuxAdam"), MUON),
        in_groups,
        as_matrices,
    ),
    "sophia-opt": Package(
        "sophia_opt", {"SophiaG": [{}, {"rho": 0.5, "maximize": True}]}, update_curvature, plugin="sophia"
    ),
}


def settings_of(package: Package) -> dict[str, Setting]:
    def spoiled(cls: Any, parameters: Parameters, options: Options) -> Trial:
        return not_finite(cls, parameters, options, package.build)

    return {
        "plain": Setting(build=package.build),
        "many steps": Setting(build=package.build, law={"warmups": WARMUPS, "further": 12}, once=True),
        "not finite": Setting(build=spoiled, once=True),
        "bfloat16": Setting(parameters=cast(torch.bfloat16), build=package.build, once=True),
        "lr changed": Setting(build=package.build, law={"hyperparameters": {"lr": 0.05}}, once=True),
        **({"no gradient": Setting(build=no_gradient, once=True)} if package.build is build else {}),
    }


def table_of(name: str) -> Table | None:
    """Return the table of a package, or None where it is not installed."""
    package = PACKAGES[name]
    with contextlib.suppress(ImportError):
        module = importlib.import_module(package.module)
        classes = {cls: getattr(module, cls) for cls in package.variants}
        settings = settings_of(package)

        def adapt(_: str, parameters: Parameters) -> Parameters:
            return package.adapt(parameters)

        return Table(classes, package.variants, settings, {}, adapt=adapt, package=name, sample=4)
    return None


TABLES = {name: table_of(name) for name in PACKAGES}
NOT_INSTALLED = [
    pytest.param(None, id=name, marks=pytest.mark.skip(reason=f"{name} is not installed"))
    for name, table in TABLES.items()
    if table is None
]
CASES = [case for table in TABLES.values() if table is not None for case in table.cases()]


@pytest.mark.parametrize("case", CASES + NOT_INSTALLED)
def test_a_reset_is_fresh(case: Case, hold: Any) -> None:
    hold(case)


@pytest.mark.parametrize("name", PACKAGES)
def test_every_class_of_a_package_is_held_and_claimed(name: str) -> None:
    package = PACKAGES[name]
    found = optimizers_in(pytest.importorskip(package.module))
    assert found.keys() == package.variants.keys()
    for cls in found.values():
        claim = default_registry().find(cls)
        assert claim is not None
        assert claim.provider.plugin == (package.plugin or package.module)


def test_what_was_looked_up_for_other_betas_is_forgotten() -> None:
    """A group's buffer holds, for each of the last ten counts, what came of it."""
    adabelief_pytorch = pytest.importorskip("adabelief_pytorch")

    def built(parameters: Parameters) -> Any:
        return adabelief_pytorch.AdaBelief(parameters, print_change_log=False)

    assert_reset_is_fresh(built, warmups=(8,), further=9, hyperparameters={"betas": (0.5, 0.6)})


def test_state_that_a_load_made_narrow_is_made_anew() -> None:
    """CAME makes it in float32 for weights in bfloat16, where a load casts it to the weights' dtype."""
    came_pytorch = pytest.importorskip("came_pytorch")
    parameters = cast(torch.bfloat16)()
    trial = step_some(build(came_pytorch.CAME, parameters, {"lr": 0.01}))
    trial.reload()
    entry = trial.optimizer.state[parameters[0]]
    assert entry["exp_avg_res_row"].dtype == torch.bfloat16
    reset_optimizer_states(trial.optimizer)
    assert {value.dtype for key, value in entry.items() if key.startswith("exp_")} == {torch.float32}
    row = entry["exp_avg_res_row"]
    reset_optimizer_states(trial.optimizer)
    assert entry["exp_avg_res_row"] is row, "right already, it stays where it is"
