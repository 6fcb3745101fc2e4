"""Tensors that are gone, that are weights, or that several states share."""

from typing import Any

import pytest
import torch
from fakes import plugin

from miles_reset import (
    StateSchema,
    UnreachableStateError,
    UnsupportedOptimizerState,
    load_registry,
    momentum,
    reset_optimizer_states,
)


def adam(count: int = 2, size: int = 4) -> torch.optim.Adam:
    weights = [torch.nn.Parameter(torch.ones(size)) for _ in range(count)]
    optimizer = torch.optim.Adam(weights)
    for weight in weights:
        weight.grad = torch.ones(size)
    optimizer.step()
    return optimizer


def test_a_released_storage_is_refused_wherever_the_view_begins() -> None:
    optimizer = adam()
    bucket = torch.ones(1 << 20)
    first, second = optimizer.state.values()
    first["exp_avg"], second["exp_avg"] = bucket[:4], bucket[-4:]
    bucket.untyped_storage().resize_(0)
    with pytest.raises(UnreachableStateError, match=r"'exp_avg' was released .* Nothing was changed"):
        reset_optimizer_states(optimizer)
    first["exp_avg"] = torch.ones(4)
    with pytest.raises(UnreachableStateError):
        reset_optimizer_states(optimizer)
    assert first["step"] == 1
    assert first["exp_avg"].all()


@pytest.mark.parametrize(
    "view", [lambda weight: weight, lambda weight: weight.data, lambda weight: weight[:2]]
)
def test_a_parameter_in_a_slot_is_refused(view: Any) -> None:
    optimizer = adam()
    weight = optimizer.param_groups[0]["params"][1]
    optimizer.state[weight]["exp_avg"] = view(weight)
    with pytest.raises(UnsupportedOptimizerState, match="would change the weights"):
        reset_optimizer_states(optimizer)
    assert weight.data.all()
    assert optimizer.state[weight]["step"] == 1


@pytest.mark.parametrize("at", [0, 2, 5, 9])
def test_state_in_any_of_the_weights_of_one_buffer_is_refused(at: int) -> None:
    buffer = torch.ones(40)
    weights = [torch.nn.Parameter(buffer[i : i + 4]) for i in range(0, 40, 4)]
    optimizer = torch.optim.Adam(weights)
    for weight in weights:
        weight.grad = torch.ones(4)
    optimizer.step()
    optimizer.state[weights[0]]["exp_avg"] = buffer[4 * at + 3 :][:1]
    with pytest.raises(UnsupportedOptimizerState, match="lies within one"):
        reset_optimizer_states(optimizer)
    assert buffer.all()


@pytest.mark.parametrize("key", ["step", "exp_avg"])
def test_a_tensor_that_states_share_stays_in_the_first_and_the_others_get_their_own(key: str) -> None:
    optimizer = adam(3)
    first, *others = optimizer.state.values()
    for state in others:
        state[key] = first[key]
    shared = first[key]
    report = reset_optimizer_states(optimizer)
    assert first[key] is shared
    assert len({state[key].data_ptr() for state in optimizer.state.values()}) == 3
    assert not any(state[key].any() for state in optimizer.state.values())
    assert report.counts["replaced: one tensor was shared"] == 2


def test_a_tensor_that_two_slots_share_is_parted_too() -> None:
    optimizer = adam(1)
    (state,) = optimizer.state.values()
    state["exp_avg_sq"] = state["exp_avg"]
    reset_optimizer_states(optimizer)
    assert state["exp_avg_sq"].data_ptr() != state["exp_avg"].data_ptr()


def test_empty_and_sparse_tensors_share_nothing() -> None:
    optimizer = adam(2, size=0)
    reset_optimizer_states(optimizer)
    optimizer = adam()
    for state in optimizer.state.values():
        state["exp_avg"] = torch.ones(4).to_sparse()
    reset_optimizer_states(optimizer)
    assert all(state["exp_avg"]._nnz() == 0 for state in optimizer.state.values())


def test_two_optimizers_over_one_state_reset_it_once() -> None:
    optimizer = adam()
    other = torch.optim.Adam(optimizer.param_groups[0]["params"])
    other.state = optimizer.state
    tensors = [state["exp_avg"] for state in optimizer.state.values()]
    reset_optimizer_states([optimizer, other])
    assert all(a is b["exp_avg"] for a, b in zip(tensors, other.state.values(), strict=True))
    assert not any(tensor.any() for tensor in tensors)


def test_state_that_cannot_be_asked_for_is_refused() -> None:
    class Closed(torch.optim.SGD):
        @property
        def state(self) -> Any:
            raise AssertionError("not now")

        @state.setter
        def state(self, value: Any) -> None: ...

    schema = StateSchema(f"{Closed.__module__}.{Closed.__qualname__}", momentum("momentum_buffer"))
    registry = load_registry(plugins=[plugin("closed", schema)], entry_points=False)
    with pytest.raises(UnreachableStateError, match="does not give its state: AssertionError"):
        reset_optimizer_states(Closed([torch.nn.Parameter(torch.ones(1))]), registry=registry)


def test_weights_are_seen_wherever_they_are() -> None:
    def states(optimizer: torch.optim.Adam) -> list[dict[str, Any]]:
        return list(optimizer.state.values())

    within = adam(1)
    weight = within.param_groups[0]["params"][0]
    flat = torch.ones(8)
    weight.data = flat[:4]
    states(within)[0]["exp_avg"] = flat[2:6]  # begins within a parameter

    frozen = adam(2)
    unstepped = frozen.param_groups[0]["params"][1]
    del frozen.state[unstepped]
    states(frozen)[0]["exp_avg"] = unstepped.data  # a parameter that has no state

    elsewhere = adam(1)
    other = torch.optim.SGD([torch.nn.Parameter(torch.ones(4))])
    other.param_groups[0]["params"][0].data = states(elsewhere)[0]["exp_avg"]  # another optimizer's

    kept = adam(1)
    states(kept)[0]["master_param"] = states(kept)[0]["exp_avg"]  # a master weight

    for optimizer in (within, frozen, [elsewhere, other], kept):
        with pytest.raises(UnsupportedOptimizerState, match="would change the weights"):
            reset_optimizer_states(optimizer)


def test_two_optimizers_over_one_parameter_keep_each_its_own_group() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizers = [torch.optim.Rprop([weight], lr=rate) for rate in (0.1, 0.5)]
    for optimizer in optimizers:
        weight.grad = torch.ones(2)
        optimizer.step()
    reset_optimizer_states(optimizers)
    rates = [optimizer.state[weight]["step_size"] for optimizer in optimizers]
    assert all(map(torch.equal, rates, (torch.full((2,), 0.1), torch.full((2,), 0.5))))
