"""Hold the optimizers of lion-pytorch to the law of a reset."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import pytest
import torch
from variants import Options, Setting, Table, cast, no_gradient, not_finite

lion_pytorch = pytest.importorskip("lion_pytorch")

COMMON: list[Options] = [
    {"lr": 0.01},
    {"lr": 0.01, "weight_decay": 0.05},
    {"lr": 0.01, "weight_decay": 0.05, "decoupled_weight_decay": True},
]
VARIANTS: dict[str, list[Options]] = {
    "lion_pytorch": COMMON,
    "cautious_lion": [*COMMON, {"lr": 0.01, "cautious_factor": 0.5}],
    "foreach": COMMON,
}
"""The options of the class of each module that change its state, or how it is used."""

LEFT_OUT = {"triton": "a kernel, which the first class can use on a GPU"}

SETTINGS = {
    "plain": Setting(),
    "no gradient": Setting(build=no_gradient, once=True),
    "bfloat16": Setting(parameters=cast(torch.bfloat16), once=True),
    "not finite": Setting(build=not_finite, once=True),
    "rate changed": Setting(law={"hyperparameters": {"lr": 0.05}}),
}
TABLE = Table(
    {name: importlib.import_module(f"lion_pytorch.{name}").Lion for name in VARIANTS},
    VARIANTS,
    SETTINGS,
    {},
    package="lion-pytorch",
)


@pytest.mark.parametrize("case", TABLE.cases())
def test_a_reset_is_fresh(case: Any, hold: Any) -> None:
    hold(case)


def test_every_module_of_lion_pytorch_is_here() -> None:
    modules = {found.name for found in pkgutil.iter_modules(lion_pytorch.__path__)}
    assert modules == VARIANTS.keys() | LEFT_OUT.keys()
