"""The records in which a plugin says what an optimizer holds."""

import copy
import dataclasses
import pickle
from typing import Any

import pytest
import torch
from fakes import plugin

from miles_reset import (
    Initial,
    Role,
    Slot,
    StateSchema,
    clock,
    history,
    kept,
    load_registry,
    momentum,
    reset_optimizer_states,
    scratch,
    variance,
)
from miles_reset.registry import class_name
from miles_reset.schema import Kind, Place


def first_norm(parameter: torch.Tensor, group: dict[str, Any], optimizer: Any) -> torch.Tensor:
    return parameter.norm()


WORDS = [
    (Initial.ZEROS, "0"),
    (Initial.ONES, "1"),
    (Initial.constant(-1.0), "-1.0"),
    (Initial.group("lr"), "group's lr"),
    (Initial.default("initial_accumulator_value"), "default initial_accumulator_value"),
    (Initial.identity(), "identity"),
    (Initial.identity(1e-6), "identity x 1e-06"),
    (Initial.identity("scale"), "identity x scale"),
    (Initial.COPY, "copy of parameter"),
    (Initial.computed(first_norm), "computed by first_norm"),
    (Initial.NONE, "none"),
    (Initial.EMPTY, "empty"),
    (Initial.ABSENT, "absent"),
    (Initial.ABSENT_ENTRY, "absent with its entry"),
    (Initial.seeded(42), "seeded with 42"),
    (Initial.refused("it is random"), "refused: it is random"),
    (Initial.either("dampening", Initial.ABSENT, Initial.ZEROS), "absent if dampening else 0"),
    (Initial.ZEROS.as_dtype("float32"), "0 (float32)"),
]


@pytest.mark.parametrize(("initial", "text"), WORDS, ids=[text for _, text in WORDS])
def test_an_initial_value_says_itself_in_a_few_words(initial: Initial, text: str) -> None:
    assert str(initial) == text


def test_the_words_above_are_all_there_are() -> None:
    assert {initial.kind for initial, _ in WORDS} == set(Kind)


def test_a_dtype_is_said_of_a_copy() -> None:
    assert Initial.ONES.as_dtype("default") != Initial.ONES
    assert Initial.ONES.dtype == ""


@pytest.mark.parametrize(
    ("declare", "role"),
    [
        (momentum, Role.MOMENTUM),
        (variance, Role.VARIANCE),
        (history, Role.HISTORY),
        (clock, Role.CLOCK),
        (kept, Role.KEPT),
        (scratch, Role.SCRATCH),
    ],
)
def test_a_slot_lives_in_the_state_and_starts_at_zero_unless_it_is_never_written(
    declare: Any, role: Role
) -> None:
    initial = None if role in (Role.KEPT, Role.SCRATCH) else Initial.ZEROS
    assert declare("key") == Slot("key", role, initial, Place.STATE)
    assert declare("key", at="group") == Slot("key", role, initial, Place.GROUP)


@pytest.mark.parametrize("declare", [kept, scratch])
def test_what_is_never_written_takes_no_initial_value(declare: Any) -> None:
    with pytest.raises(TypeError):
        declare("key", Initial.ZEROS)


@pytest.mark.parametrize("role", [Role.KEPT, Role.SCRATCH])
def test_a_slot_that_is_never_written_with_an_initial_value_is_refused(role: Role) -> None:
    with pytest.raises(ValueError, match=f"slot 'key': {role} with initial value 0"):
        Slot("key", role, Initial.ZEROS)


@pytest.mark.parametrize("role", [Role.MOMENTUM, Role.VARIANCE, Role.HISTORY, Role.CLOCK])
def test_a_slot_that_is_written_without_an_initial_value_is_refused(role: Role) -> None:
    with pytest.raises(ValueError, match=f"slot 'key': {role} with initial value None"):
        Slot("key", role)


@pytest.mark.parametrize("declare", [momentum, variance, history, clock])
@pytest.mark.parametrize("value", [0, 1.0, "zeros"])
def test_a_bare_number_is_no_initial_value(declare: Any, value: object) -> None:
    with pytest.raises(TypeError, match="Initial"):
        declare("key", value)


def test_a_place_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="'nowhere' is not a valid Place"):
        momentum("key", at="nowhere")


@pytest.mark.parametrize(
    ("slot_key", "key", "yes"),
    [
        ("exp_avg", "exp_avg", True),
        ("exp_avg", "exp_avg_sq", False),
        ("exp_?vg", "exp_avg", False),  # only a star makes a pattern
        ("pre_cond_*", "pre_cond_0", True),
        ("pre_cond_*", "inv_pre_cond_0", False),
        ("*", "anything", True),
        ("*", 0, False),
    ],
)
def test_a_star_in_a_key_stands_for_any_characters(slot_key: str, key: object, yes: bool) -> None:
    assert kept(slot_key).matches(key) is yes


@pytest.mark.parametrize(
    "target", ["AdamW", "", "torch.", ".AdamW", "torch optim.AdamW", "torch.optim.AdamW()"]
)
def test_a_target_that_is_no_dotted_class_name_is_refused(target: str) -> None:
    with pytest.raises(ValueError, match="is not a dotted class name such as"):
        StateSchema(target)


def test_a_class_in_place_of_its_name_is_refused_with_its_name() -> None:
    with pytest.raises(TypeError, match=r"torch\.optim\.adamw\.AdamW"):
        StateSchema(torch.optim.AdamW)


def test_a_class_inside_a_function_can_be_named() -> None:
    assert StateSchema("library.function.<locals>.Optimizer").target == "library.function.<locals>.Optimizer"


@pytest.mark.parametrize(
    "item", [momentum, "exp_avg", [momentum("exp_avg")]], ids=["function", "str", "list"]
)
def test_an_item_that_is_no_slot_is_refused(item: Any) -> None:
    with pytest.raises(TypeError, match=r"lib\.Optimizer: .* is not a Slot; use momentum\(\)"):
        StateSchema("lib.Optimizer", item)


def test_a_key_declared_twice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"lib\.Optimizer: state key 'step' is declared twice"):
        StateSchema("lib.Optimizer", clock("step"), kept("step"))


def test_one_key_may_live_in_two_places() -> None:
    schema = StateSchema("lib.Optimizer", clock("step"), clock("step", Initial.ONES, at="group"))
    assert schema.at(Place.STATE) == (clock("step"),)
    assert schema.at(Place.GROUP) == (clock("step", Initial.ONES, at="group"),)
    assert schema.at(Place.ATTRIBUTE) == ()


SCHEMA = StateSchema("lib.Optimizer", momentum("m", Initial.computed(first_norm)), kept("table"), exact=True)


@pytest.mark.parametrize(
    ("record", "attribute"), [(SCHEMA, "target"), (SCHEMA.slots[0], "key"), (Initial.ZEROS, "value")]
)
def test_records_are_frozen(record: Any, attribute: str) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(record, attribute, "another")
    with pytest.raises(dataclasses.FrozenInstanceError):
        delattr(record, attribute)


def test_records_are_equal_and_hash_alike_where_they_say_the_same() -> None:
    again = StateSchema(
        "lib.Optimizer", momentum("m", Initial.computed(first_norm)), kept("table"), exact=True
    )
    assert again == SCHEMA
    assert len({SCHEMA, again}) == 1
    assert StateSchema("lib.Optimizer", momentum("m")) != StateSchema("lib.Optimizer", variance("m"))


def test_records_can_be_pickled_and_copied() -> None:
    SCHEMA.at(Place.STATE)  # fills what is cached
    assert pickle.loads(pickle.dumps(SCHEMA)) == SCHEMA
    assert copy.deepcopy(SCHEMA) == SCHEMA


class Blocks(torch.optim.Optimizer):
    """Holds as many blocks as it likes, each under a key of its own."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["mean_0"] = group["mean_1"] = 3.0
            for parameter in group["params"]:
                state = {f"block_{i}": torch.full((2,), 5.0) for i in range(3)}
                self.state[parameter] = {**state, "block_size": 7}


def stepped_blocks() -> Blocks:
    optimizer = Blocks([torch.nn.Parameter(torch.zeros(2))], {})
    optimizer.step()
    return optimizer


def test_a_pattern_declares_each_key_that_it_matches_and_a_key_of_its_own_comes_first() -> None:
    optimizer = stepped_blocks()
    schema = StateSchema(class_name(Blocks), history("block_*", Initial.ONES), kept("block_size"))
    registry = load_registry(plugins=[plugin("blocks", schema)], entry_points=False)
    reset_optimizer_states(optimizer, registry=registry)
    (state,) = optimizer.state.values()
    assert [state[f"block_{i}"].tolist() for i in range(3)] == [[1.0, 1.0]] * 3
    assert state["block_size"] == 7


def test_a_pattern_declares_keys_of_a_group_too() -> None:
    optimizer = stepped_blocks()
    schema = StateSchema(class_name(Blocks), history("block_*"), history("mean_*", at="group"))
    registry = load_registry(plugins=[plugin("blocks", schema)], entry_points=False)
    reset_optimizer_states(optimizer, registry=registry)
    (group,) = optimizer.param_groups
    assert (group["mean_0"], group["mean_1"]) == (0.0, 0.0)


@pytest.mark.parametrize("seed", ["7", 1.5, True, None])
def test_a_seed_is_a_whole_number(seed: Any) -> None:
    with pytest.raises(TypeError, match="a seed is a whole number"):
        Initial.seeded(seed)
