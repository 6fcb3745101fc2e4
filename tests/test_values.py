"""Each word for an initial value, on each kind of thing that it may meet in a state."""

import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import class_named, plugin

from miles_reset import (
    Initial,
    StateSchema,
    UndeclaredStateError,
    UnsupportedOptimizerState,
    clock,
    history,
    kept,
    load_registry,
    plan_reset,
    reset_optimizer_states,
)


class Toy(torch.optim.Optimizer):
    """An optimizer whose state a test fills in."""

    initial_value = 7.0
    flag = True

    def __init__(self, parameters: list[torch.nn.Parameter], **defaults: Any) -> None:
        super().__init__(parameters, {"lr": 0.5, "start": 0.25, **defaults})


TOY = f"{Toy.__module__}.{Toy.__qualname__}"


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.full(shape, 3.0, dtype=dtype))


def reset(value: Any, initial: Initial, weight: torch.nn.Parameter | None = None, *more: StateSchema) -> Any:
    """Put a value into a state, reset it, and return what is there then; absent gives ``...``."""
    weight = parameter(2, 2) if weight is None else weight
    optimizer = Toy([weight])
    optimizer.state[weight]["key"] = value
    schema = StateSchema(TOY, history("key", initial))
    registry = load_registry(plugins=[plugin("toy", schema, *more)], entry_points=False)
    plan = plan_reset(optimizer, registry=registry)
    assert optimizer.state[weight]["key"] is value, "a plan changes nothing"
    plan.apply()
    return optimizer.state[weight].get("key", ...)


@pytest.mark.parametrize(
    ("initial", "expected"),
    [
        (Initial.ZEROS, [[0.0, 0.0], [0.0, 0.0]]),
        (Initial.ONES, [[1.0, 1.0], [1.0, 1.0]]),
        (Initial.constant(-2.5), [[-2.5, -2.5], [-2.5, -2.5]]),
        (Initial.group("lr"), [[0.5, 0.5], [0.5, 0.5]]),
        (Initial.default("start"), [[0.25, 0.25], [0.25, 0.25]]),
        (Initial.identity(), [[1.0, 0.0], [0.0, 1.0]]),
        (Initial.identity(0.5), [[0.5, 0.0], [0.0, 0.5]]),
        (Initial.identity("initial_value"), [[7.0, 0.0], [0.0, 7.0]]),
        (Initial.COPY, [[3.0, 3.0], [3.0, 3.0]]),
        (Initial.computed(lambda weight, group, _: weight * group["lr"]), [[1.5, 1.5], [1.5, 1.5]]),
        (Initial.either("flag", Initial.ONES, Initial.ZEROS), [[1.0, 1.0], [1.0, 1.0]]),
        (Initial.either("start", Initial.ZEROS, Initial.ONES), [[0.0, 0.0], [0.0, 0.0]]),
    ],
    ids=str,
)
def test_a_tensor_is_written_in_place(initial: Initial, expected: list[list[float]]) -> None:
    tensor = torch.full((2, 2), 9.0)
    address = tensor.data_ptr()
    assert reset(tensor, initial) is tensor
    assert tensor.data_ptr() == address
    assert torch.equal(tensor, torch.tensor(expected))


def test_a_flag_that_nobody_has_is_refused() -> None:
    tensor = torch.full((2, 2), 9.0)
    with pytest.raises(UnsupportedOptimizerState, match="neither its group nor its optimizer has"):
        reset(tensor, Initial.either("absent_in_group", Initial.ONES, Initial.ZEROS))
    assert tensor.eq(9.0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64, torch.int32, torch.uint8])
@pytest.mark.parametrize("value", [0, 1, 3])
def test_a_constant_has_the_tensor_s_dtype(dtype: torch.dtype, value: int) -> None:
    tensor = torch.full((2, 2), 9, dtype=dtype)
    expected = torch.full((2, 2), complex(value, value) if dtype.is_complex else value, dtype=dtype)
    assert torch.equal(reset(tensor, Initial.constant(value)), expected)


@pytest.mark.parametrize("shape", [(), (4,)])
def test_an_identity_in_fewer_dimensions_is_a_diagonal(shape: tuple[int, ...]) -> None:
    assert torch.equal(reset(torch.full(shape, 9.0), Initial.identity(2.0)), torch.full(shape, 2.0))


@pytest.mark.parametrize(
    ("value", "fresh"), [(5, 0), (5.5, 0.0), (True, False), (2 + 3j, 0j)], ids=lambda value: repr(value)
)
def test_a_number_keeps_its_type(value: Any, fresh: Any) -> None:
    got = reset(value, Initial.ZEROS)
    assert (type(got), got) == (type(fresh), fresh)


def test_numbers_of_several_types_under_one_key_keep_each_its_own() -> None:
    weights = [parameter(2), parameter(2), parameter(2)]
    optimizer = Toy(weights)
    for weight, step in zip(weights, (4, 4.0, torch.tensor(4.0)), strict=True):
        optimizer.state[weight]["step"] = step
    registry = load_registry(plugins=[plugin("toy", StateSchema(TOY, clock("step")))], entry_points=False)
    reset_optimizer_states(optimizer, registry=registry)
    steps = [optimizer.state[weight]["step"] for weight in weights]
    assert [type(step) for step in steps] == [int, float, torch.Tensor]
    assert [float(step) for step in steps] == [0.0, 0.0, 0.0]


def test_what_is_made_lazily_and_not_made_yet_stays_none() -> None:
    assert reset(None, Initial.ZEROS) is None
    assert reset(None, Initial.COPY) is None


def test_none_and_absent_give_the_tensor_up() -> None:
    assert reset(torch.ones(2), Initial.NONE) is None
    assert reset(torch.ones(2), Initial.ABSENT) is ...


def test_absent_with_its_entry_takes_the_keys_beside_it() -> None:
    weight = parameter(2)
    optimizer = Toy([weight])
    optimizer.state[weight].update(guard=torch.ones(2), other=torch.ones(2))
    schema = StateSchema(TOY, history("guard", Initial.ABSENT_ENTRY), history("other"))
    registry = load_registry(plugins=[plugin("toy", schema)], entry_points=False)
    report = reset_optimizer_states(optimizer, registry=registry)
    assert weight not in optimizer.state
    assert {line.outcome for line in report.lines} == {"removed with its entry"}


@pytest.mark.parametrize("flag", [True, False])
def test_a_flag_may_decide_whether_the_entry_goes(flag: bool) -> None:
    weights = [parameter(2), parameter(2)]
    optimizer = Toy([{"params": weights[:1], "gate": flag}, {"params": weights[1:], "gate": not flag}])
    for weight in weights:
        optimizer.state[weight].update(guard=torch.ones(2), other=torch.ones(2))
    guard = Initial.either("gate", Initial.ABSENT_ENTRY, Initial.ZEROS)
    schema = StateSchema(TOY, history("guard", guard), history("other"))
    registry = load_registry(plugins=[plugin("toy", schema)], entry_points=False)
    reset_optimizer_states(optimizer, registry=registry)
    gone, there = weights if flag else reversed(weights)
    assert gone not in optimizer.state
    assert all(not tensor.any() for tensor in optimizer.state[there].values())


def test_a_dtype_of_its_own_replaces_what_a_load_has_cast_and_no_more() -> None:
    cast, right = torch.ones((), dtype=torch.bfloat16), torch.full((), 5.0)
    for tensor in (cast, right):
        got = reset(tensor, Initial.ONES.as_dtype("float32"))
        assert got.dtype is torch.float32
        assert got.item() == 1.0
        assert (got is tensor) is (tensor is right)


def test_containers_stay_and_what_is_in_them_is_reset() -> None:
    tensors = [torch.full((2, 2), 9.0), torch.full((3,), 9.0)]
    nested = [tensors[0], {"inner": tensors[1]}]
    assert reset(nested, Initial.identity(0.5)) is nested
    assert torch.equal(tensors[0], torch.eye(2) / 2)
    assert torch.equal(tensors[1], torch.full((3,), 0.5))


@pytest.mark.parametrize("container", [[1, 2], deque([1, 2]), {"a": 1}, {1, 2}], ids=repr)
def test_an_emptied_container_stays_the_same_object(container: Any) -> None:
    assert reset(container, Initial.EMPTY) is container
    assert not container


def test_random_number_generators_are_seeded_in_place() -> None:
    for generator, fresh in (
        (random.Random(1), random.Random(42)),
        (torch.Generator().manual_seed(1), torch.Generator().manual_seed(42)),
    ):
        assert reset(generator, Initial.seeded(42)) is generator
        states = [one.getstate() if isinstance(one, random.Random) else one.get_state().tolist() for one in
                  (generator, fresh)]  # fmt: skip
        assert states[0] == states[1]


def test_a_computed_value_of_another_shape_replaces_and_says_so() -> None:
    weight = parameter(4)
    optimizer = Toy([weight])
    optimizer.state[weight]["key"] = torch.ones(4)
    half = Initial.computed(lambda weight, _group, _optimizer: weight[::2].clone())
    registry = load_registry(
        plugins=[plugin("toy", StateSchema(TOY, history("key", half)))], entry_points=False
    )
    report = reset_optimizer_states(optimizer, registry=registry)
    assert report.counts == {"replaced": 1}
    assert torch.equal(optimizer.state[weight]["key"], torch.full((2,), 3.0))


def test_a_computed_number_replaces_a_tensor_and_says_so() -> None:
    weight = parameter(2)
    optimizer = Toy([weight])
    optimizer.state[weight]["key"] = torch.ones(())
    schema = StateSchema(TOY, history("key", Initial.computed(lambda *_: 0.5)))
    report = reset_optimizer_states(
        optimizer, registry=load_registry(plugins=[plugin("toy", schema)], entry_points=False)
    )
    assert (report.counts, optimizer.state[weight]["key"]) == ({"replaced": 1}, 0.5)


@pytest.mark.parametrize("count", [2, 3])
def test_a_computed_list_is_copied_into_one_of_as_many(count: int) -> None:
    tensors = [torch.full((2, 2), 9.0), torch.full((2,), 9.0)]
    new = [torch.eye(2), torch.ones(2), torch.zeros(())][:count]
    got = reset(tensors, Initial.computed(lambda *_: new))
    assert (got is tensors) == (count == 2)
    assert all(map(torch.equal, got, new))
    if count == 2:
        assert not {id(one) for one in got} & {id(one) for one in new}


def fail(*_: object) -> None:
    raise ZeroDivisionError("no rate")


@pytest.mark.parametrize(
    ("value", "initial", "message"),
    [
        (torch.ones(2), Initial.refused("it is drawn at random"), "cannot be reset: it is drawn at random"),
        (torch.ones(2), Initial.computed(fail), "computed by fail, which failed: ZeroDivisionError"),
        (torch.ones(3), Initial.COPY, r"of shape \(2, 2\), and has shape \(3,\)"),
        (torch.ones(2, 2, 2), Initial.identity(), "has 3 dimensions"),
        (torch.ones(2), Initial.group("rate"), "starts as group's rate, which is not there"),
        (torch.ones(2), Initial.default("rate"), "starts as default rate, which is not there"),
        (torch.ones(2), Initial.EMPTY, "starts as an empty container and is Tensor"),
        (torch.ones(2), Initial.seeded(1), "starts as a seeded generator and is Tensor"),
        (SimpleNamespace(a=1), Initial.ZEROS, "SimpleNamespace, which no plugin declares"),
        ("text", Initial.ZEROS, "str, which no plugin declares"),
        (torch.ones(2, dtype=torch.int64), Initial.constant(0.5), "starts as 0.5, which is no torch.int64"),
        (torch.ones(2, dtype=torch.float16), Initial.constant(1e6), "which is no torch.float16"),
        (4, Initial.constant(0.5), "0.5 is no int"),
        ([(1, 2)], Initial.ZEROS, "is inside a tuple or a tensor"),
        (torch.ones(1).expand(2, 2), Initial.COPY, "is an expanded tensor"),
        (SimpleNamespace(a=1), Initial.ONES, "starts as 1 and is SimpleNamespace"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_cannot_be_reset_is_refused_by_name(value: Any, initial: Initial, message: str) -> None:
    with pytest.raises(UnsupportedOptimizerState, match=message) as caught:
        reset(value, initial)
    assert " at Toy " in str(caught.value)
    assert "Nothing was changed." in str(caught.value)


def test_an_object_in_the_state_is_reset_by_the_schema_of_its_class() -> None:
    projector = class_named("lib.Projector")()
    projector.basis, projector.rank, projector.count = torch.full((2, 2), 9.0), 4, 12
    schema = StateSchema(
        "lib.Projector",
        history("basis", Initial.identity(), at="attribute"),
        clock("count", at="attribute"),
        kept("rank", at="attribute"),
    )
    assert reset(projector, Initial.ZEROS, None, schema) is projector
    assert torch.equal(projector.basis, torch.eye(2))
    assert (projector.count, projector.rank) == (0, 4)
    projector.late = 1
    with pytest.raises(UndeclaredStateError, match="'late'"):
        reset(projector, Initial.ZEROS, None, schema)


def test_a_tensor_made_of_tensors_is_reset_by_the_schema_of_its_class() -> None:
    from quantized import Codes

    codes, table = torch.full((4,), 9, dtype=torch.uint8), torch.arange(4.0)
    tensor = Codes(codes, table)
    schema = StateSchema(
        f"{Codes.__module__}.{Codes.__qualname__}",
        history("codes", at="attribute"),
        kept("table", at="attribute"),
    )
    with pytest.raises(UnsupportedOptimizerState, match="Codes, which no plugin declares"):
        reset(tensor, Initial.ZEROS, parameter(4))
    with pytest.raises(UnsupportedOptimizerState, match="starts as 1 and is a Codes"):
        reset(tensor, Initial.ONES, parameter(4), schema)
    assert reset(tensor, Initial.ZEROS, parameter(4), schema) is tensor
    assert not codes.any()
    assert torch.equal(table, torch.arange(4.0))


def test_a_tensor_made_of_tensors_is_reset_where_it_is_one_rank_s_part_too() -> None:
    from quantized import Codes

    class Sharded(Codes):
        placements = ()

    codes, table = torch.full((4,), 9, dtype=torch.uint8), torch.arange(4.0)
    schema = StateSchema(
        f"{Codes.__module__}.{Codes.__qualname__}",
        history("codes", at="attribute"),
        kept("table", at="attribute"),
    )
    whole = Sharded(codes, table)
    whole._local_tensor = Codes(codes, table)
    reset(whole, Initial.ZEROS, parameter(4), schema)
    assert not codes.any()
    assert torch.equal(table, torch.arange(4.0))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_numbers_of_eight_bits_are_filled(dtype: torch.dtype) -> None:
    tensor = torch.full((2,), 3.0).to(dtype)
    assert reset(tensor, Initial.ZEROS) is tensor
    assert not tensor.float().any()
    with pytest.raises(UnsupportedOptimizerState, match=r"which is no torch\.float8"):
        reset(tensor, Initial.constant(1e6))


def test_slow_weights_in_an_attribute_keyed_by_parameter_become_copies_of_it() -> None:
    weight = parameter(2)
    optimizer = Toy([weight])
    slow = torch.full((2,), 9.0)
    optimizer.slow, optimizer.listed = {weight: slow}, [slow.clone()]
    schema = StateSchema(TOY, history("slow", Initial.COPY, at="attribute"))
    reset_optimizer_states(
        optimizer, registry=load_registry(plugins=[plugin("toy", schema)], entry_points=False)
    )
    assert optimizer.slow[weight] is slow
    assert torch.equal(slow, weight)
    lost = StateSchema(TOY, history("listed", Initial.COPY, at="attribute"))
    with pytest.raises(UnsupportedOptimizerState, match="belongs to none: use Initial"):
        reset_optimizer_states(
            optimizer, registry=load_registry(plugins=[plugin("toy", lost)], entry_points=False)
        )


def test_entries_of_the_parts_of_a_parameter_are_told_by_the_same_slots() -> None:
    whole, halved = parameter(4), parameter(6)
    optimizer = Toy([whole, halved])
    optimizer.state[whole] = {0: {"mean": torch.ones(4), "low": torch.ones(4)}}
    optimizer.state[halved] = {0: {"mean": torch.ones(3)}, 1: {"mean": torch.ones(3), "places": {0}}}
    means = [entry["mean"] for parts in optimizer.state.values() for entry in parts.values()]
    schema = StateSchema(TOY, history("mean"), history("places", Initial.ABSENT), kept("low"))
    registry = load_registry(plugins=[plugin("toy", schema)], entry_points=False)
    report = reset_optimizer_states(optimizer, registry=registry)
    assert report.counts == {"filled in place": 3, "kept": 1, "removed": 1}
    assert [mean.sum() for mean in means] == [0, 0, 0]
    assert (optimizer.state[whole][0]["low"].sum(), set(optimizer.state[halved][1])) == (4, {"mean"})
    optimizer.state[halved][1]["unknown"] = 1
    with pytest.raises(UndeclaredStateError, match="'unknown'"):
        reset_optimizer_states(optimizer, registry=registry)
