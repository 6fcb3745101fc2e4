"""From an optimizer to its leaves: the wrappers bear Megatron's names and do what those do."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fakes import class_named, plugin

from miles_reset import (
    Registry,
    StateSchema,
    UnknownOptimizerError,
    UnreachableStateError,
    UnwrapRule,
    clock,
    load_registry,
    plan_reset,
)
from miles_reset.walk import Tree, walk

CORE = "megatron.core.optimizer"


class Holder:
    """Holds an optimizer, as MegatronOptimizer does."""

    def __init__(self, optimizer: Any = None) -> None:
        self.optimizer = optimizer


class Chain:
    """Holds several; its property asserts that they are one, as ChainedOptimizer's does."""

    def __init__(self, *children: Any) -> None:
        self.chained_optimizers = list(children)

    @property
    def optimizer(self) -> Any:
        raise AssertionError("there is more than one")


MegatronOptimizer = class_named(f"{CORE}.optimizer.MegatronOptimizer", Holder)
DistributedOptimizer = class_named(f"{CORE}.distrib_optimizer.DistributedOptimizer", MegatronOptimizer)
FP32Optimizer = class_named(f"{CORE}.optimizer.FP32Optimizer", MegatronOptimizer)
ChainedOptimizer = class_named(f"{CORE}.optimizer.ChainedOptimizer", Chain)
Stranger = class_named("elsewhere.Stranger", Holder)
StrangeChain = class_named("elsewhere.StrangeChain", Chain)


def adamw() -> torch.optim.AdamW:
    return torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])


@pytest.fixture
def registry() -> Registry:
    return load_registry()


def paths(tree: Tree) -> list[str]:
    return [leaf.path for leaf in tree.leaves]


def test_an_optimizer_is_a_leaf(registry: Registry) -> None:
    tree = walk(optimizer := adamw(), registry)
    assert paths(tree) == ["AdamW"]
    assert tree.leaves[0].obj is optimizer
    assert tree.leaves[0].claim.provider.plugin == "torch"
    assert (tree.wrappers, tree.left_alone) == ([], [])


def test_a_path_names_each_class_on_the_way_and_its_place_among_several(registry: Registry) -> None:
    chain = ChainedOptimizer(DistributedOptimizer(adamw()), ChainedOptimizer(FP32Optimizer(adamw())), adamw())
    tree = walk(chain, registry)
    assert paths(tree) == [
        "ChainedOptimizer[0].DistributedOptimizer.AdamW",
        "ChainedOptimizer[1].ChainedOptimizer[0].FP32Optimizer.AdamW",
        "ChainedOptimizer[2].AdamW",
    ]
    assert [node.path for node in tree.wrappers] == [
        "ChainedOptimizer",
        "ChainedOptimizer[0].DistributedOptimizer",
        "ChainedOptimizer[1].ChainedOptimizer",
        "ChainedOptimizer[1].ChainedOptimizer[0].FP32Optimizer",
    ]


def test_a_leaf_knows_the_wrappers_above_it_the_nearest_first(registry: Registry) -> None:
    chain = ChainedOptimizer(DistributedOptimizer(adamw()))
    (leaf,) = walk(chain, registry).leaves
    assert [node.obj for node in leaf.wrappers()] == [chain.chained_optimizers[0], chain]


@pytest.mark.parametrize(
    ("collect", "path"),
    [
        (lambda a, b: [a, b], ["list[0].AdamW", "list[1].AdamW"]),
        (lambda a, b: (a, b), ["tuple[0].AdamW", "tuple[1].AdamW"]),
        (lambda a, b: {"dense": a, "sparse": b}, ["dict[dense].AdamW", "dict[sparse].AdamW"]),
        (lambda a, b: [("dense", a), ("sparse", b)], ["list[dense].AdamW", "list[sparse].AdamW"]),
        (lambda a, b: {"a": [a], "b": [b]}, ["dict[a].list[0].AdamW", "dict[b].list[0].AdamW"]),
    ],
    ids=["list", "tuple", "dict", "pairs", "nested"],
)
def test_collections_of_optimizers_are_walked(collect: Any, path: list[str], registry: Registry) -> None:
    assert paths(walk(collect(adamw(), adamw()), registry)) == path


@pytest.mark.parametrize("empty", [[], (), {}, ChainedOptimizer()], ids=["list", "tuple", "dict", "chain"])
def test_an_empty_collection_is_listed(empty: Any, registry: Registry) -> None:
    tree = walk(empty, registry)
    assert tree.leaves == []
    assert tree.left_alone == [(type(empty).__name__, "holds no optimizers")]


def test_none_and_a_stub_that_holds_none_are_listed(registry: Registry) -> None:
    assert walk(None, registry).left_alone == [("None", "stub: holds no optimizer")]
    tree = walk(ChainedOptimizer(FP32Optimizer(None), adamw()), registry)
    assert paths(tree) == ["ChainedOptimizer[1].AdamW"]
    assert tree.left_alone == [("ChainedOptimizer[0].FP32Optimizer.None", "stub: holds no optimizer")]


def test_two_ways_to_one_leaf_give_one_leaf_and_the_second_is_listed(registry: Registry) -> None:
    shared = adamw()
    tree = walk([FP32Optimizer(shared), shared], registry)
    assert paths(tree) == ["list[0].FP32Optimizer.AdamW"]
    assert tree.left_alone == [("list[1].AdamW", "met before, as list[0].FP32Optimizer.AdamW")]


def test_two_leaves_that_are_equal_are_two(registry: Registry) -> None:
    always_equal = class_named("torch.optim.sgd.SGD", __eq__=lambda a, b: True, __hash__=lambda a: 0)
    assert len(walk([always_equal(), always_equal()], registry).leaves) == 2


def test_a_cycle_ends(registry: Registry) -> None:
    chain = ChainedOptimizer(FP32Optimizer(adamw()))
    chain.chained_optimizers.append(chain)
    itself = FP32Optimizer()
    itself.optimizer = itself
    chain.chained_optimizers.append(itself)
    tree = walk(chain, registry)
    assert paths(tree) == ["ChainedOptimizer[0].FP32Optimizer.AdamW"]
    assert tree.left_alone == [
        ("ChainedOptimizer[1].ChainedOptimizer", "met before, as ChainedOptimizer"),
        (
            "ChainedOptimizer[2].FP32Optimizer.FP32Optimizer",
            "met before, as ChainedOptimizer[2].FP32Optimizer",
        ),
    ]


DEPTH = 2_000


def test_any_depth_can_be_walked_planned_and_named(registry: Registry) -> None:
    tower: Any = adamw()
    for _ in range(DEPTH):
        tower = FP32Optimizer(tower)
    (leaf,) = walk(tower, registry).leaves
    assert leaf.path == "FP32Optimizer." * DEPTH + "AdamW"
    assert len(leaf.wrappers()) == DEPTH
    assert plan_reset(tower, registry=registry).leaves == 1


def test_an_unknown_class_at_any_depth_is_named_with_its_path(registry: Registry) -> None:
    tower: Any = class_named("elsewhere.Lion")()
    for _ in range(DEPTH):
        tower = FP32Optimizer(tower)
    with pytest.raises(UnknownOptimizerError) as caught:
        walk(tower, registry)
    assert caught.value.path == "FP32Optimizer." * DEPTH + "Lion"


def test_a_property_that_asserts_is_not_asked(registry: Registry) -> None:
    assert len(walk(ChainedOptimizer(adamw(), adamw()), registry).leaves) == 2
    with pytest.raises(UnknownOptimizerError, match="StrangeChain"):
        walk(StrangeChain(adamw(), adamw()), registry)
    tree = walk(StrangeChain(adamw()), registry, strict=False)
    assert tree.left_alone == [("StrangeChain", "no plugin declares elsewhere.StrangeChain")]


def rules(*records: StateSchema | UnwrapRule) -> Registry:
    return load_registry(plugins=[plugin("mine", *records)])


def test_a_children_function_is_asked_and_an_attribute_called_optimizer_is_not() -> None:
    inner = [("first", adamw()), ("second", None)]
    tree = walk(Stranger(adamw()), rules(UnwrapRule("elsewhere.Stranger", lambda stranger: inner)))
    assert paths(tree) == ["Stranger[first].AdamW"]
    assert tree.left_alone == [("Stranger[second].None", "stub: holds no optimizer")]


def raises(wrapper: Any) -> Any:
    raise AssertionError("torn down")


def yields_and_raises(wrapper: Any) -> Iterator[tuple[str, Any]]:
    yield "0", adamw()
    raise AssertionError("torn down")


@pytest.mark.parametrize("children", [raises, yields_and_raises, "no_such_attribute"])
def test_children_that_cannot_be_listed_are_an_error_that_names_the_rule(children: Any) -> None:
    registry = rules(UnwrapRule("elsewhere.Stranger", children))
    with pytest.raises(UnreachableStateError) as caught:
        walk([adamw(), Stranger()], registry)
    assert caught.value.path == "list[1].Stranger"
    assert "the rule of plugin 'mine' (not installed) cannot list what it holds: " in str(caught.value)
    assert str(caught.value).endswith("Nothing was changed.")


@pytest.mark.parametrize("record", [UnwrapRule, StateSchema])
def test_a_class_that_is_not_ready_is_refused_with_the_reason(record: Any) -> None:
    children = ("optimizer",) if record is UnwrapRule else ()

    def ready(it: Any) -> str | None:
        return None if it.optimizer else "it is on disk. Call its reload() first."

    registry = rules(record("elsewhere.Stranger", *children, ready=ready))
    assert walk(Stranger(adamw()), registry)
    with pytest.raises(UnreachableStateError) as caught:
        walk([adamw(), Stranger()], registry)
    assert (caught.value.path, caught.value.reason) == (
        "list[1].Stranger",
        "it is on disk. Call its reload() first.",
    )
    assert str(caught.value) == (
        "State at list[1].Stranger cannot be reset now: it is on disk. Call its reload() first. "
        "Nothing was changed."
    )


def test_a_class_that_is_not_ready_is_refused_though_it_holds_nothing() -> None:
    registry = rules(UnwrapRule("elsewhere.Stranger", "optimizer", ready=lambda it: "it is on disk."))
    with pytest.raises(UnreachableStateError, match="it is on disk"):
        walk(Stranger(None), registry)


def test_a_question_about_readiness_that_fails_is_an_error_that_names_the_record() -> None:
    registry = rules(UnwrapRule("elsewhere.Stranger", "optimizer", ready=raises))
    with pytest.raises(UnreachableStateError, match=re.escape("plugin 'mine' (not installed)")) as caught:
        walk([Stranger()], registry)
    assert caught.value.path == "list[0].Stranger"
    assert isinstance(caught.value.__cause__, AssertionError)


def test_an_unknown_class_is_an_error_with_its_path_and_class(registry: Registry) -> None:
    lion = class_named("lion_unheard_of.Lion", torch.optim.Optimizer)
    with pytest.raises(UnknownOptimizerError) as caught:
        walk(ChainedOptimizer(adamw(), lion([torch.ones(2)], {})), registry)
    assert (caught.value.path, caught.value.type) == ("ChainedOptimizer[1].Lion", lion)


def test_a_strange_wrapper_is_refused_with_the_rule_that_may_do(registry: Registry) -> None:
    with pytest.raises(
        UnknownOptimizerError, match=re.escape('UnwrapRule("elsewhere.Stranger", "optimizer")')
    ):
        walk(Stranger(adamw()), registry)


def test_what_is_strange_is_passed_over_and_listed_where_that_is_asked_for(registry: Registry) -> None:
    lion = class_named("elsewhere.Lion")()
    tree = walk(ChainedOptimizer(lion, Stranger(adamw())), registry, strict=False)
    assert paths(tree) == ["ChainedOptimizer[1].Stranger.AdamW"]
    assert tree.left_alone == [
        ("ChainedOptimizer[0].Lion", "no plugin declares elsewhere.Lion"),
        ("ChainedOptimizer[1].Stranger", "no plugin declares elsewhere.Stranger; its own state, if any"),
    ]


def test_a_cycle_through_strange_wrappers_ends(registry: Registry) -> None:
    itself = Stranger()
    itself.optimizer = itself
    assert walk(itself, registry, strict=False).leaves == []


@pytest.mark.parametrize("not_one", [3, "AdamW", torch.ones(2), object(), torch.optim.AdamW])
def test_what_is_no_optimizer_is_refused(not_one: Any, registry: Registry) -> None:
    with pytest.raises(UnknownOptimizerError):
        walk(not_one, registry)


def test_a_walk_changes_nothing(registry: Registry) -> None:
    leaf = adamw()
    chain = ChainedOptimizer(wrapper := DistributedOptimizer(leaf), stub := FP32Optimizer(None))
    before = [(it, dict(vars(it))) for it in (chain, wrapper, stub, leaf)]
    walk(chain, registry)
    for it, held in before:
        assert list(vars(it)) == list(held)
        assert all(vars(it)[key] is value for key, value in held.items())
    assert chain.chained_optimizers == [wrapper, stub]


def test_a_subclass_of_a_known_optimizer_is_a_leaf_by_its_base_s_schema() -> None:
    mine = class_named("elsewhere.MyAdamW", torch.optim.AdamW)
    (leaf,) = walk(mine([torch.nn.Parameter(torch.ones(2))]), load_registry()).leaves
    assert (leaf.path, leaf.claim.record.target) == ("MyAdamW", "torch.optim.adamw.AdamW")
    exact = rules(StateSchema("torch.optim.adamw.AdamW", clock("step"), exact=True, override=True))
    with pytest.raises(UnknownOptimizerError, match="MyAdamW"):
        walk(mine([torch.nn.Parameter(torch.ones(2))]), exact)


def test_a_wrapper_that_makes_another_wrapper_whenever_it_is_asked_is_refused() -> None:
    registry = rules(UnwrapRule("elsewhere.Stranger", lambda stranger: [("0", Stranger())]))
    with pytest.raises(UnreachableStateError, match="without end"):
        walk(Stranger(), registry)


@pytest.mark.parametrize(
    ("build", "hint"),
    [
        (
            lambda: torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.ones(2)]), 3),
            "It is a scheduler: give its",
        ),
        (lambda: torch.nn.Linear(2, 2), "It is a module: give the optimizer."),
    ],
)
def test_what_is_no_optimizer_is_told_from_one_that_nobody_declared(build: Any, hint: str) -> None:
    with pytest.raises(UnknownOptimizerError, match=hint):
        walk(build(), load_registry())
