"""Hold the optimizers and wrappers of schedulefree to the law of a reset."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from variants import Options, Setting, Table, draw, step_some

from miles_reset import reset_optimizer_states
from miles_reset.testing import WARMUPS, Parameters, Trial, assert_reset_is_fresh, sample_parameters, trial_of

schedulefree = pytest.importorskip("schedulefree")

CLASSES = {
    name: getattr(schedulefree, name)
    for name in dir(schedulefree)
    if name.endswith(("ScheduleFree", "Closure", "Paper", "ScheduleFreeReference"))
}
COMMON: list[Options] = [{}, {"r": 0.5}, {"foreach": False}]
WARM: list[Options] = [{"warmup_steps": 4, "weight_decay": 0.05}]
VARIANTS = {name: COMMON if name.startswith("RAdam") else COMMON + WARM for name in CLASSES}


def stepping(optimizer: Any, parameters: Parameters) -> Trial:
    """Step with a closure where the class wants one, else in training mode."""
    if not type(optimizer).__name__.endswith("Closure"):
        optimizer.train()
        return trial_of(optimizer, parameters)

    def step(i: int) -> None:
        def closure() -> float:
            for parameter in parameters:
                parameter.grad = draw(parameter, i)
            return 0.0

        optimizer.step(closure)

    return Trial(optimizer, step, lambda: parameters)


def build(cls: type[Any], parameters: Parameters, options: Options) -> Trial:
    return stepping(cls(parameters, **options), parameters)


SETTINGS = {
    "plain": Setting(build=build),
    "many steps": Setting(build=build, law={"warmups": WARMUPS, "further": 12}, once=True),
}
TABLE = Table(CLASSES, VARIANTS, SETTINGS, {}, package="schedulefree")


@pytest.mark.parametrize("case", TABLE.cases())
def test_a_reset_is_fresh(case: Any, hold: Any) -> None:
    hold(case)


def groups_of(optimizer: Any) -> list[dict[str, Any]]:
    groups = optimizer.param_groups
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]


@pytest.mark.parametrize("name", CLASSES)
def test_what_no_later_step_reads_is_fresh_too(name: str) -> None:
    parameters = sample_parameters()
    optimizer, fresh = (CLASSES[name](parameters) for _ in range(2))
    step_some(stepping(optimizer, parameters))
    if hasattr(fresh, "train"):
        fresh.train()
    reset_optimizer_states(optimizer)
    assert groups_of(optimizer) == groups_of(fresh)
    for parameter, entry in optimizer.state.items():
        copies = [entry[key] for key in "xyz" if key in entry]
        assert copies
        assert all(torch.equal(copy, parameter) for copy in copies)


@pytest.mark.parametrize("name", ["ScheduleFreeWrapper", "ScheduleFreeWrapperReference"])
def test_groups_below_a_wrapper_are_fresh_too(name: str) -> None:
    parameters = [parameter for parameter in sample_parameters() if parameter.ndim]
    base, fresh = (torch.optim.SGD(parameters, lr=0.01) for _ in range(2))
    wrapper, _ = (getattr(schedulefree, name)(inner) for inner in (base, fresh))
    step_some(stepping(wrapper, parameters))
    reset_optimizer_states(wrapper)
    assert groups_of(base) == groups_of(fresh)


@pytest.mark.parametrize("name", ["ScheduleFreeWrapper", "ScheduleFreeWrapperReference"])
@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "dampening": 0.5}, {"weight_decay": 0.01}])
def test_a_reset_through_a_wrapper_is_fresh(name: str, options: Options) -> None:
    """Over SGD: others of torch's take the wrapper's entry for a state of their own, and fail."""

    def wrapped(parameters: Parameters) -> Trial:
        return stepping(
            getattr(schedulefree, name)(torch.optim.SGD(parameters, lr=0.01, **options)), parameters
        )

    def parameters() -> Parameters:
        return [parameter for parameter in sample_parameters() if parameter.ndim]

    assert_reset_is_fresh(wrapped, parameters=parameters, warmups=(3, 4), further=5)


@pytest.mark.parametrize("base", [torch.optim.RMSprop, torch.optim.AdamW])
def test_what_the_wrapper_cannot_step(base: Any) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    wrapper = schedulefree.ScheduleFreeWrapper(base([weight]))
    wrapper.train()
    with pytest.raises(KeyError):
        wrapper.step()
