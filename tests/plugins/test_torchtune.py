"""Hold torchtune's optimizers that step in the backward pass to the law of a reset."""

import copy
import sys
import warnings
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.optim import AdamW, Optimizer
from variants import draw, step_some

from miles_reset import plan_reset
from miles_reset.testing import Parameters, Trial, assert_reset_is_fresh, sample_parameters

FROM_SOURCE = {
    "torchtune.training.memory.OptimizerInBackwardWrapper": (
        "from the source of torchtune 0.6, not run here: needs an older torchao; a stand-in has its shape"
    ),
    "torchtune.modules.optim.OptimizerInBackward": (
        "from the source of torchtune's repository, not run here: no release has it; a stand-in has its shape"
    ),
}
"""What is declared without being held to the law through the library itself, and why."""


class InBackwardLike(Optimizer):
    """Stand in for OptimizerInBackward: an optimizer by parameter, and itself one without state."""

    __module__ = "torchtune.modules.optim"
    __qualname__ = "OptimizerInBackward"

    def __init__(self, parameters: Parameters) -> None:
        self._optimizers = {i: AdamW([parameter], lr=0.1) for i, parameter in enumerate(parameters)}
        super().__init__(parameters, {})
        for i, parameter in enumerate(parameters):
            parameter.register_post_accumulate_grad_hook(partial(self._step, i))

    def _step(self, i: int, parameter: torch.Tensor) -> None:
        self._optimizers[i].step()
        parameter.grad = None

    def step(self, closure: None = None) -> None: ...


class WrapperLike:
    """Stand in for OptimizerInBackwardWrapper, which saves and loads: optimizers by name."""

    __module__ = "torchtune.training.memory"
    __qualname__ = "OptimizerInBackwardWrapper"

    def __init__(self, optim_map: dict[str, Optimizer]) -> None:
        self.optim_map = optim_map


def in_backward(wrap: Callable[[dict[str, Optimizer]], Any]) -> Callable[[Parameters], Trial]:
    def build(parameters: Parameters) -> Trial:
        by_parameter = {parameter: AdamW([parameter], lr=0.1) for parameter in parameters}

        def hook(parameter: torch.Tensor) -> None:
            by_parameter[parameter].step()
            by_parameter[parameter].zero_grad()

        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(hook)
        by_name = {f"layer.{i}": optimizer for i, optimizer in enumerate(by_parameter.values())}
        return trial(wrap(by_name), parameters, list(by_name.values()))

    return build


def trial(optimizer: Any, parameters: Parameters, inside: list[Optimizer]) -> Trial:
    def step(i: int) -> None:
        sum((parameter * draw(parameter, i)).sum() for parameter in parameters).backward()

    def save_and_load() -> None:
        if hasattr(optimizer, "load_state_dict") and not isinstance(optimizer, Optimizer):
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        else:
            for one in inside:
                one.load_state_dict(copy.deepcopy(one.state_dict()))

    return Trial(optimizer, step, lambda: parameters, save_and_load)


def build_like(parameters: Parameters) -> Trial:
    optimizer = InBackwardLike(parameters)
    return trial(optimizer, parameters, list(optimizer._optimizers.values()))


@pytest.mark.parametrize("build", [build_like, in_backward(WrapperLike)], ids=["optimizer", "wrapper"])
def test_a_reset_of_a_stand_in_is_fresh(build: Callable[[Parameters], Trial]) -> None:
    assert_reset_is_fresh(build, warmups=(3,), further=4)


def test_a_path_names_the_parameter() -> None:
    optimizer = step_some(in_backward(WrapperLike)(sample_parameters())).optimizer
    plan = plan_reset(optimizer)
    assert plan.leaves == 4
    assert "WrapperLike[layer.2].AdamW" in {line.path for line in plan.lines}


def test_a_reset_is_fresh_below_torchtune_s_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchao")
    moved = "torchao.dtypes.nf4tensor"  # newer versions of torchao lack it, and the wrapper has no use for it
    if moved not in sys.modules:
        module = ModuleType(moved)
        module.NF4Tensor = module.to_nf4 = module.linear_nf4 = torch.Tensor
        module.implements = lambda *operators: lambda function: function
        monkeypatch.setitem(sys.modules, moved, module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        memory = pytest.importorskip("torchtune.training.memory", exc_type=ImportError)
    assert_reset_is_fresh(in_backward(memory.OptimizerInBackwardWrapper), warmups=(3,), further=4)
