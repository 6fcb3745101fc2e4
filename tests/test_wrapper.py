"""The rules by which wrappers are unwrapped, and a plugin for a wrapper."""

import copy
import dataclasses
import pickle
from collections import defaultdict
from typing import Any

import pytest
import torch
from fakes import class_named, plugin

from miles_reset import (
    Initial,
    Registry,
    StateSchema,
    UnwrapRule,
    clock,
    history,
    kept,
    load_registry,
    momentum,
    reset_optimizer_states,
)
from miles_reset.registry import class_name
from miles_reset.testing import assert_reset_is_fresh


def an_optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)


A, B = an_optimizer(), an_optimizer()


@pytest.mark.parametrize(
    ("held", "children"),
    [
        (A, [("", A)]),
        (None, [("", None)]),
        ([], []),
        ({}, []),
        ([A, B], [(0, A), (1, B)]),
        ((A, None), [(0, A), (1, None)]),
        ({"dense": A, 7: B}, [("dense", A), ("7", B)]),
        ([("dense", A), ("sparse", B)], [("dense", A), ("sparse", B)]),
    ],
    ids=["one", "None", "empty list", "empty dict", "list", "tuple", "dict", "pairs"],
)
def test_an_attribute_holds_one_optimizer_or_a_collection_of_them(held: Any, children: list[Any]) -> None:
    wrapper = class_named("lib.Wrapper", held=held)()
    assert list(UnwrapRule("lib.Wrapper", "held").children_of(wrapper)) == children
    assert list(UnwrapRule("lib.Wrapper", lambda it: it.held).children_of(wrapper)) == children


def test_a_function_may_yield_its_children_with_labels_of_any_type() -> None:
    rule = UnwrapRule("lib.Wrapper", lambda wrapper: enumerate(wrapper.held))
    assert list(rule.children_of(class_named("lib.Wrapper", held=[A, B])())) == [(0, A), (1, B)]


@pytest.mark.parametrize("children", [None, 0, ["optimizer"]])
def test_children_that_are_neither_a_name_nor_a_function_are_refused(children: Any) -> None:
    with pytest.raises(
        TypeError, match=r"lib\.Wrapper: children is .*, not an attribute's name or a function"
    ):
        UnwrapRule("lib.Wrapper", children)


def test_a_choice_for_stale_groups_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="'delete'"):
        UnwrapRule("lib.Wrapper", "optimizer", stale_groups="keep")


def test_a_rule_checks_its_target_and_its_slots_like_a_schema() -> None:
    with pytest.raises(ValueError, match="is not a dotted class name"):
        UnwrapRule("Wrapper", "optimizer")
    with pytest.raises(ValueError, match="group key 'count' is declared twice"):
        UnwrapRule("lib.Wrapper", "optimizer", clock("count", at="group"), kept("count", at="group"))
    with pytest.raises(TypeError, match="is not a Slot"):
        UnwrapRule("lib.Wrapper", "optimizer", "count")


def test_rules_are_frozen_comparable_and_picklable() -> None:
    rule = UnwrapRule("lib.Wrapper", "optimizer", clock("count", at="group"), stale_groups="set", exact=True)
    again = UnwrapRule("lib.Wrapper", "optimizer", clock("count", at="group"), stale_groups="set", exact=True)
    assert {rule} == {again}
    assert rule != UnwrapRule("lib.Wrapper", "optimizer", clock("count", at="group"))
    assert pickle.loads(pickle.dumps(rule)) == copy.deepcopy(rule) == rule
    with pytest.raises(dataclasses.FrozenInstanceError):
        rule.children = "another"


class Lookahead:
    """Goes, every third step, half of the way back to slow weights of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.state = {p: {"slow": p.detach().clone()} for g in self.param_groups for p in g["params"]}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @torch.no_grad()
    def step(self) -> None:
        self.optimizer.step()
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for parameter in group["params"] if group["count"] % 3 == 0 else ():
                slow = self.state[parameter]["slow"]
                parameter.copy_(slow.lerp_(parameter, 0.5))

    def state_dict(self) -> dict[str, Any]:
        return {"fast": self.optimizer.state_dict(), "slow": [s["slow"] for s in self.state.values()]}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(saved["fast"])
        for state, slow in zip(self.state.values(), saved["slow"], strict=True):
            state["slow"].copy_(slow)


def lookahead(parameters: list[torch.nn.Parameter]) -> Lookahead:
    return Lookahead(torch.optim.SGD(parameters, lr=0.1, momentum=0.9))


def with_rule(*slots: Any) -> Registry:
    return load_registry(plugins=[plugin("look", UnwrapRule(class_name(Lookahead), "optimizer", *slots))])


SLOW = history("slow", Initial.COPY)
COUNT = clock("count", at="group")


def test_a_plugin_for_a_wrapper_makes_it_and_what_it_wraps_fresh() -> None:
    assert_reset_is_fresh(lookahead, registry=with_rule(SLOW, COUNT))


@pytest.mark.parametrize(
    "slots", [(kept("slow"), COUNT), (SLOW,), (history("slow"), COUNT)], ids=["slow kept", "no count", "zero"]
)
def test_a_rule_that_forgets_what_the_wrapper_owns_fails_the_law(slots: tuple[Any, ...]) -> None:
    with pytest.raises(AssertionError, match=r"step \d+ of 12 leaves"):
        assert_reset_is_fresh(lookahead, registry=with_rule(*slots))


def test_slow_weights_become_the_current_weights_in_place() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    wrapper = lookahead([weight])
    weight.grad = torch.ones(2)
    wrapper.step()
    slow = wrapper.state[weight]["slow"]
    address = slow.data_ptr()
    reset_optimizer_states(wrapper, registry=with_rule(SLOW, COUNT))
    assert wrapper.state[weight]["slow"] is slow
    assert slow.data_ptr() == address != weight.data_ptr()
    assert torch.equal(slow, weight)
    assert wrapper.param_groups[0]["count"] == 0


class Hoarder:
    """Owns something at each place that a wrapper can."""

    def __init__(self) -> None:
        self.parameter = torch.nn.Parameter(torch.full((2,), 4.0))
        self.optimizer = torch.optim.SGD([self.parameter], lr=0.1)
        self.optimizer.state[self.parameter]["from_above"] = torch.full((2,), 3.0)
        self.state: Any = defaultdict(dict)
        self.state[self.parameter]["slow"] = torch.full((2,), 3.0)
        self.state["average"] = torch.full((2,), 3.0)
        self.param_groups = [{"params": [self.parameter], "count": 3}]
        self.steps = 3
        self.averager = class_named("lib.Averager")()
        self.averager.step = 3


def test_a_wrapper_owns_state_at_five_places() -> None:
    hoarder = Hoarder()
    rule = UnwrapRule(
        class_name(Hoarder),
        "optimizer",
        history("slow", Initial.COPY),
        history("average", at="named"),
        clock("count", Initial.constant(1), at="group"),
        clock("steps", at="attribute"),
        clock("averager.step", at="attribute"),
        history("from_above", Initial.ABSENT, at="child"),
    )
    report = reset_optimizer_states(hoarder, registry=load_registry(plugins=[plugin("hoarder", rule)]))
    assert hoarder.state[hoarder.parameter]["slow"].tolist() == [4.0, 4.0]
    assert hoarder.state["average"].tolist() == [0.0, 0.0]
    assert hoarder.param_groups[0]["count"] == 1
    assert (hoarder.steps, hoarder.averager.step) == (0, 0)
    assert hoarder.optimizer.state[hoarder.parameter] == {}
    assert report.changed == 6
    assert {(line.path, line.key, line.at) for line in report.lines} == {
        ("Hoarder", "slow", "state"),
        ("Hoarder", "average", "named"),
        ("Hoarder", "count", "group"),
        ("Hoarder", "steps", "attribute"),
        ("Hoarder", "averager.step", "attribute"),
        ("Hoarder.SGD", "from_above", "child"),
    }


class GroupClock(torch.optim.Optimizer):
    """Counts its steps in its groups, as fused optimizers do."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1


class CopiesDown:
    """Copies its own groups down to its child at each step, as HybridDeviceOptimizer does."""

    def __init__(self) -> None:
        self.parameter = torch.nn.Parameter(torch.ones(2))
        self.child = GroupClock([self.parameter])
        self.param_groups: list[dict[str, Any]] = [{"params": [self.parameter]}]

    def step(self) -> int:
        self.child.param_groups[0].update(self.param_groups[0])
        self.child.step()
        count: int = self.child.param_groups[0]["step"]
        return count


@pytest.mark.parametrize(
    ("stale_groups", "own", "counts"),
    [("delete", {}, [1, 2, 3]), ("set", {"step": 0}, [1, 1, 1]), (None, {"step": 7}, [8, 8, 8])],
)
def test_a_count_in_groups_that_are_copied_down_is_deleted_or_set(
    stale_groups: Any, own: dict[str, int], counts: list[int]
) -> None:
    wrapper = CopiesDown()
    wrapper.param_groups[0]["step"] = 7  # as a load leaves it
    wrapper.step()
    registry = load_registry(
        plugins=[
            plugin(
                "copies_down",
                StateSchema(class_name(GroupClock), momentum("m"), clock("step", at="group")),
                UnwrapRule(class_name(CopiesDown), "child", stale_groups=stale_groups),
            )
        ]
    )
    reset_optimizer_states(wrapper, registry=registry)
    assert wrapper.child.param_groups[0]["step"] == 0
    assert {key: value for key, value in wrapper.param_groups[0].items() if key != "params"} == own
    assert [wrapper.step() for _ in range(3)] == counts
