"""Hold torchtitan's container to the law of a reset."""

import copy
import warnings
from typing import Any

import pytest
import torch
from fakes import class_named
from torch.optim import AdamW, Optimizer
from variants import step_some

from miles_reset import UnknownOptimizerError, load_registry, plan_reset, reset_optimizer_states
from miles_reset.testing import Parameters, Trial, assert_reset_is_fresh, sample_parameters, trial_of

FROM_SOURCE = {
    "torchtitan.components.optimizer.OptimizersContainer": (
        "from the source of torchtitan before 0.3, not run here: 0.3 moved it; a stand-in has its shape"
    )
}
"""What is declared without being held to the law through the library itself, and why."""


class ContainerLike(Optimizer):
    """Stand in for the container of earlier versions: optimizers in a list, and itself one without state."""

    __module__ = "torchtitan.components.optimizer"
    __qualname__ = "OptimizersContainer"

    def __init__(self, parameters: Parameters) -> None:
        self.optimizers = [AdamW([parameter], lr=0.1) for parameter in parameters]
        super().__init__(parameters, {})

    def step(self, closure: None = None) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


def build_like(parameters: Parameters) -> Trial:
    optimizer = ContainerLike(parameters)

    def save_and_load() -> None:
        for one in optimizer.optimizers:
            one.load_state_dict(copy.deepcopy(one.state_dict()))

    inner = trial_of(optimizer, parameters)
    return Trial(optimizer, inner.step, inner.weights, save_and_load)


def test_a_reset_of_a_stand_in_is_fresh() -> None:
    assert_reset_is_fresh(build_like, warmups=(3,), further=4)


def test_a_container_in_backward_is_a_container() -> None:
    optimizer = ContainerLike(sample_parameters())
    optimizer.__class__ = class_named(
        "torchtitan.components.optimizer.OptimizersInBackwardContainer", ContainerLike
    )
    assert plan_reset(optimizer).leaves == 4


def test_a_container_that_no_plugin_unwraps_is_refused() -> None:
    with pytest.raises(UnknownOptimizerError):
        reset_optimizer_states(
            ContainerLike(sample_parameters()), registry=load_registry(disabled=["torchtitan"])
        )


# The container of the installed version


@pytest.fixture(scope="module")
def container() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("torchtitan.components.optimizer", exc_type=ImportError)


def trial(container: Any, implementation: str) -> Trial:
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 1))
    config = container.OptimizersContainer.Config(
        param_groups=[
            container.ParamGroupConfig(pattern="bias", optimizer_name="Adam", optimizer_kwargs={"lr": 0.1}),
            container.ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.1}),
        ],
        implementation=implementation,
    )
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    optimizer = container.OptimizersContainer(config, model_parts=[model])
    inner = trial_of(optimizer, list(model.parameters()))
    return Trial(optimizer, inner.step, inner.weights, inner.round_trip)


@pytest.mark.parametrize("implementation", ["for-loop", "foreach", "fused"])
def test_a_reset_is_fresh(container: Any, implementation: str) -> None:
    assert_reset_is_fresh(lambda _: trial(container, implementation), warmups=(3,), further=4)


def test_state_that_a_hook_makes_in_bfloat16_stays_so(container: Any) -> None:
    optimizer = trial(container, "for-loop").optimizer
    optimizer._register_bf16_optimizer_state_hook()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for hook in optimizer.optimizers[0]._optimizer_step_pre_hooks.values():
        for one in optimizer.optimizers:
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            hook(one, (), {})
    moments = [state["exp_avg"] for one in optimizer.optimizers for state in one.state.values()]
    for moment in moments:
        moment.fill_(1)
    reset_optimizer_states(optimizer)
    assert {moment.dtype for moment in moments} == {torch.bfloat16}
    assert not any(moment.any() for moment in moments)


def test_what_the_container_has_as_an_optimizer_stays_empty(container: Any) -> None:
    stepped = step_some(trial(container, "for-loop"))
    assert not stepped.optimizer.state
    assert reset_optimizer_states(stepped.optimizer).leaves == 2
