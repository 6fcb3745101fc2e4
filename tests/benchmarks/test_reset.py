"""The time of a reset against the loop that it replaces, against plain zeroing, and as trees grow."""

from collections.abc import Callable
from functools import partial
from time import process_time
from typing import Any

import pytest
from benchmarks.conftest import Scales
from large import HybridStandIn, state_tensors, stepped_adamw
from seed import seed_reset

from miles_reset import default_registry, reset_optimizer_states
from miles_reset.walk import walk

SECONDS_PER_LEAF = 10e-6


def resetting(optimizer: Any, values: int) -> Callable[[], None]:
    """Return a function that resets an optimizer, once it is seen that this sets so many values to zero."""
    assert reset_optimizer_states(optimizer).changed == values
    assert not any(tensor.any() for tensor in state_tensors(optimizer))

    def reset() -> None:
        reset_optimizer_states(optimizer)

    return reset


def test_many_parameters_take_no_longer_than_with_the_seed(scales: Scales) -> None:
    optimizer = stepped_adamw(20_000)
    ours = resetting(optimizer, 60_000)
    scales.weigh(
        "20,000 parameters of 64 elements in one AdamW", ours,
        "the seed's loop", partial(seed_reset, optimizer), bound=1.0, aim=0.7,
    )  # fmt: skip


def test_many_leaves_take_no_longer_than_with_the_seed(scales: Scales) -> None:
    hybrid = HybridStandIn(5_000)
    ours = resetting(hybrid, 15_000)
    scales.weigh(
        "5,000 AdamW of one parameter in one wrapper", ours,
        "the seed's loop", partial(seed_reset, hybrid), bound=1.0,
    )  # fmt: skip


@pytest.mark.benchmark(timer=process_time)
def test_the_walk_takes_little_for_each_leaf(scales: Scales) -> None:
    hybrid, registry = HybridStandIn(5_000), default_registry()
    assert len(walk(hybrid, registry).leaves) == 5_000
    scales.limit(
        "walk over 5,000 leaves", lambda: walk(hybrid, registry), "10 us a leaf", 5_000 * SECONDS_PER_LEAF
    )


def test_large_tensors_take_the_time_of_zeroing_them(scales: Scales) -> None:
    optimizer = stepped_adamw(50, 4_000_000, foreach=False)
    ours = resetting(optimizer, 150)
    tensors = list(state_tensors(optimizer))

    def zero() -> None:
        for tensor in tensors:
            tensor.zero_()

    scales.weigh(
        "50 parameters of 4,000,000 elements in one AdamW", ours,
        "zeroing the same tensors one by one", zero, bound=1.1, rounds=9,
    )  # fmt: skip


@pytest.mark.parametrize(("what", "build"), [("leaves", HybridStandIn), ("parameters", stepped_adamw)])
def test_cost_grows_linearly(scales: Scales, what: str, build: Callable[[int], Any]) -> None:
    small, large = (resetting(build(count), 3 * count) for count in (1_000, 10_000))
    scales.weigh(f"10,000 {what}", large, f"1,000 {what}", small, bound=11.0)
