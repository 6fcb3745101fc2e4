"""Show that the law fails where a reset is wrong, and says where; what passes it is in tests/plugins."""

from contextlib import nullcontext
from itertools import count

import pytest
import torch
from fakes import plugin
from quantized import Codes
from torch.optim import SGD, Adam, NAdam, Optimizer
from variants import cast

from miles_reset import (
    Initial,
    Registry,
    StateSchema,
    clock,
    history,
    kept,
    load_registry,
    momentum,
    variance,
)
from miles_reset.registry import class_name
from miles_reset.testing import Parameters, assert_reset_is_fresh


def declaring(cls: type[Optimizer], *slots: object) -> Registry:
    """Return a registry in which a plugin declares a class in these words."""
    return load_registry(plugins=[plugin("wrong", StateSchema(class_name(cls), *slots, override=True))])


RESETS = count()
MOMENTS = (momentum("exp_avg"), variance("exp_avg_sq"))
NUMBER = r"-?[\d.]+(e[-+]\d+)?"
OFF = rf"off by {NUMBER} \(fresh: {NUMBER}\) from a fresh optimizer's"


class Toy(Optimizer):
    """Steps with momentum."""

    __module__ = "toys"

    def __init__(self, params: Parameters) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state.setdefault("exp_avg", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.1)
            parameter.sub_(state["exp_avg"], alpha=self.rate())

    def rate(self) -> float:
        return 0.1


class Traces(Toy):
    """Keeps a sum of gradients, and steps without it."""

    __module__ = "toys"

    def step(self, closure: None = None) -> None:
        super().step()
        for parameter, state in self.state.items():
            state["trace"] = state.get("trace", 0) + parameter.grad


@pytest.mark.parametrize(
    ("factory", "slots", "match"),
    [
        pytest.param(
            Adam,
            [kept("exp_avg"), kept("exp_avg_sq"), kept("step")],
            rf"after the reset \(1 warm-up steps\), step 1 of 12 leaves weight 0 {OFF}",
            id="nothing is reset",
        ),
        pytest.param(
            NAdam,
            [*MOMENTS, clock("step"), history("mu_product")],
            rf"step 1 of 12 leaves weight 0 {OFF}",
            id="zero where it starts at one",
        ),
        pytest.param(
            Adam,
            [*MOMENTS, kept("step")],
            rf"step 1 of 12 leaves weight 0 {OFF}",
            id="the clock is left alone",
        ),
        pytest.param(
            lambda parameters: SGD(parameters, momentum=0.9, dampening=0.3),
            [momentum("momentum_buffer")],
            rf"step 1 of 12 leaves weight 0 {OFF}",
            id="zero where it starts as the first gradient",
        ),
        pytest.param(
            Traces,
            [momentum("exp_avg"), kept("trace")],
            rf"step 1 of 12 leaves Traces, parameter 0, 'trace' {OFF}",
            id="state differs and weights do not",
        ),
        pytest.param(
            Adam,
            [*MOMENTS, clock("step", Initial.computed(lambda *_: 0.0))],
            r"after the reset \(1 warm-up steps\), a step raises RuntimeError",
            id="a number takes a tensor's place",
        ),
        pytest.param(
            Toy,
            [momentum("exp_avg", Initial.computed(lambda parameter, *_: parameter.detach().zero_()))],
            rf"the reset moved weight 0 by {NUMBER} .*\(1 warm-up steps\)",
            id="weights are moved",
        ),
        pytest.param(
            Adam,
            [*MOMENTS, clock("step", Initial.computed(lambda *_: torch.tensor(float(next(RESETS)))))],
            r"a second reset changed Adam, parameter 0, 'step' \(1 warm-up steps\)",
            id="a second reset does something else",
        ),
    ],
)
def test_wrong_schema_is_found_and_the_message_says_where(factory, slots, match) -> None:
    cls = factory if isinstance(factory, type) else SGD
    with pytest.raises(AssertionError, match=match):
        assert_reset_is_fresh(factory, registry=declaring(cls, *slots))


def test_fault_that_shows_only_after_a_load_is_found() -> None:
    # A load casts mu_product to the parameter's bfloat16, in which a fresh optimizer does not keep it.
    registry = declaring(NAdam, *MOMENTS, clock("step"), history("mu_product", Initial.ONES))
    law = {"parameters": cast(torch.bfloat16), "registry": registry}
    assert_reset_is_fresh(NAdam, round_trips=(False,), **law)
    with pytest.raises(
        AssertionError, match=r"1 warm-up steps, state saved and loaded\), step 1 of 12 .*mu_product"
    ):
        assert_reset_is_fresh(NAdam, **law)


class EverySixth(Toy):
    """Makes each sixth step a large one, by a count that no plugin declares."""

    __module__ = "toys"
    steps = 0

    def step(self, closure: None = None) -> None:
        self.steps += 1
        super().step()

    def rate(self) -> float:
        return 0.1 if self.steps % 6 else 1.0


def test_fault_that_shows_late_is_found() -> None:
    law = {"registry": declaring(Toy, momentum("exp_avg"))}
    assert_reset_is_fresh(EverySixth, **law, warmups=(1,), further=4, round_trips=(False,))
    with pytest.raises(AssertionError, match=r"\(1 warm-up steps\), step 5 of 12 leaves weight 0"):
        assert_reset_is_fresh(EverySixth, **law)


def test_fault_in_phase_with_one_number_of_warm_up_steps_is_found_by_another() -> None:
    law = {"registry": declaring(Toy, momentum("exp_avg"))}
    assert_reset_is_fresh(EverySixth, **law, warmups=(12,))
    with pytest.raises(AssertionError, match=r"\(3 warm-up steps\), step 3 of 12 leaves weight 0"):
        assert_reset_is_fresh(EverySixth, **law, warmups=(12, 3))


def test_law_that_cannot_fail_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"cannot fail here.*has_history=False"):
        assert_reset_is_fresh(SGD, warmups=(4,))
    assert_reset_is_fresh(SGD, warmups=(4,), has_history=False)


def test_history_that_is_said_not_to_be_there_is_found() -> None:
    with pytest.raises(AssertionError, match="has_history=False, yet"):
        assert_reset_is_fresh(Adam, warmups=(4,), has_history=False)


def test_a_step_that_fails_after_the_reset_is_told_of_as_such() -> None:
    class Presence(torch.optim.Optimizer):
        def __init__(self, parameters: Parameters) -> None:
            super().__init__(parameters, {"lr": 0.1})

        @torch.no_grad()
        def step(self) -> None:
            for parameter in self.param_groups[0]["params"]:
                state = self.state[parameter]
                if "first" not in state:
                    state["first"], state["second"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                parameter.sub_(state["second"].add_(parameter.grad), alpha=0.1)

    schema = StateSchema(
        f"{Presence.__module__}.{Presence.__qualname__}",
        history("first"),
        history("second", Initial.ABSENT),
    )
    registry = load_registry(plugins=[plugin("presence", schema)], entry_points=False)
    with pytest.raises(AssertionError, match=r"after the reset .* a step raises KeyError\('second'\)"):
        assert_reset_is_fresh(Presence, registry=registry)


class Coded(Toy):
    """Keeps its mean in a tensor made of others."""

    __module__ = "toys"

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            table = torch.arange(256.0)
            state = self.state[parameter]
            mean = state.setdefault("mean", Codes(torch.zeros(parameter.shape, dtype=torch.uint8), table))
            mean.codes.add_(1)
            parameter.sub_(mean.table[mean.codes.long()], alpha=self.rate())


@pytest.mark.parametrize("right", [True, False])
def test_law_sees_what_a_tensor_is_made_of(right: bool) -> None:
    codes = history("codes", at="attribute") if right else kept("codes", at="attribute")
    parts = StateSchema(class_name(Codes), codes, kept("table", at="attribute"))
    registry = load_registry(
        plugins=[plugin("coded", StateSchema(class_name(Coded), momentum("mean")), parts)]
    )
    expected = nullcontext() if right else pytest.raises(AssertionError, match=r"'mean', 'codes' off by")
    with expected:
        assert_reset_is_fresh(Coded, registry=registry, warmups=(3,), round_trips=[False])
