"""From a class to the record that a plugin holds about it."""

import gc
import itertools
import re
import weakref
from typing import Any

import pytest
import torch
from fakes import class_named, plugin

from miles_reset import (
    ConflictError,
    Initial,
    PluginError,
    Registry,
    StateSchema,
    UnknownOptimizerError,
    UnwrapRule,
    clock,
    load_registry,
    momentum,
    plan_reset,
    variance,
)
from miles_reset.registry import Provider, class_name

ADAM = StateSchema("torch.optim.adam.Adam", momentum("exp_avg"), variance("exp_avg_sq"), clock("step"))
FAST = StateSchema("torch.optim.adam.Adam", momentum("fast"))
FAST_WINS = StateSchema("torch.optim.adam.Adam", momentum("fast"), override=True)
WRAPPER = UnwrapRule("lib.Wrapper", "optimizer")


def build(*provided: tuple[str, list[StateSchema | UnwrapRule]]) -> Registry:
    return Registry.build(
        (Provider(name, f"miles-reset-{name}", "2.1"), records) for name, records in provided
    )


PLUGINS = [
    ("alpha", [ADAM, StateSchema("lib.One", momentum("m"))]),
    ("beta", [FAST_WINS, WRAPPER]),
    ("gamma", [StateSchema("lib.Two", clock("step", Initial.ONES))]),
    ("delta", []),
]


@pytest.mark.parametrize(
    "order", list(itertools.permutations(PLUGINS)), ids=lambda order: "-".join(name for name, _ in order)
)
def test_plugins_in_any_order_give_the_same_registry(order: tuple[tuple[str, list[Any]], ...]) -> None:
    shuffled, expected = build(*order), build(*PLUGINS)
    assert shuffled == expected
    assert list(shuffled.claims) == list(expected.claims) == sorted(expected.claims)
    assert [p.plugin for p in shuffled.providers] == ["alpha", "beta", "delta", "gamma"]
    assert build(*((name, records[::-1]) for name, records in order)) == expected


def test_registries_with_other_records_or_of_other_plugins_are_not_equal() -> None:
    assert build(("alpha", [ADAM])) != build(("alpha", [FAST]))
    assert build(("alpha", [ADAM])) != build(("beta", [ADAM]))


@pytest.mark.parametrize("records", [(ADAM, FAST), (ADAM, ADAM)], ids=["different", "equal"])
@pytest.mark.parametrize("swap", [False, True])
def test_a_second_claim_on_a_class_names_both_plugins_and_says_how_to_resolve_it(
    records: tuple[StateSchema, StateSchema], swap: bool
) -> None:
    claims = [("alpha", [records[0]]), ("beta", [records[1]])]
    with pytest.raises(ConflictError) as caught:
        build(*(claims[::-1] if swap else claims))
    assert str(caught.value) == (
        "torch.optim.adam.Adam is claimed by plugin 'alpha' (miles-reset-alpha 2.1) and plugin 'beta' "
        "(miles-reset-beta 2.1). Set override=True in the one that should win, or disable one with "
        "MILES_RESET_DISABLE=beta."
    )
    assert isinstance(caught.value, PluginError)
    assert caught.value.target == "torch.optim.adam.Adam"
    assert caught.value.claimants == (
        "plugin 'alpha' (miles-reset-alpha 2.1)",
        "plugin 'beta' (miles-reset-beta 2.1)",
    )


def test_a_conflict_with_a_plugin_of_our_own_proposes_to_disable_the_other_one() -> None:
    with pytest.raises(ConflictError, match=re.escape("or disable one with MILES_RESET_DISABLE=fastadam.")):
        load_registry(plugins=[plugin("fastadam", FAST)])  # sorts before 'torch', which says more than Adam


def test_three_claims_on_a_class_are_all_named() -> None:
    with pytest.raises(ConflictError) as caught:
        build(("alpha", [ADAM]), ("beta", [FAST]), ("gamma", [ADAM]))
    assert len(caught.value.claimants) == 3


def test_a_schema_and_an_unwrap_rule_for_one_class_conflict() -> None:
    with pytest.raises(
        ConflictError, match=r"lib\.Wrapper is claimed by plugin 'alpha' .* and plugin 'beta'"
    ):
        build(("alpha", [WRAPPER]), ("beta", [StateSchema("lib.Wrapper")]))


def test_one_plugin_that_claims_a_class_twice_is_a_conflict() -> None:
    with pytest.raises(ConflictError, match=r"claimed by plugin 'alpha' .* and plugin 'alpha'"):
        build(("alpha", [ADAM, FAST]))


@pytest.mark.parametrize("overriding", ["alpha", "zeta"])
def test_the_claim_that_overrides_wins_whatever_its_plugin_is_called(overriding: str) -> None:
    claim = build(("mu", [ADAM]), (overriding, [FAST_WINS])).claims["torch.optim.adam.Adam"]
    assert claim.record == FAST_WINS
    assert claim.provider.plugin == overriding


def test_a_claim_that_overrides_nothing_is_a_claim() -> None:
    assert build(("alpha", [FAST_WINS])).claims["torch.optim.adam.Adam"].record == FAST_WINS


def test_two_claims_that_override_are_a_conflict_that_says_so() -> None:
    with pytest.raises(ConflictError) as caught:
        build(("alpha", [FAST_WINS]), ("beta", [FAST_WINS]), ("gamma", [ADAM]))
    assert str(caught.value).endswith(
        "Both set override=True. Leave it out in one, or disable one with MILES_RESET_DISABLE=beta."
    )
    assert len(caught.value.claimants) == 2


def record_of(registry: Registry, cls: type) -> object:
    claim = registry.find(cls)
    return None if claim is None else claim.record


def test_a_class_is_found_by_its_own_dotted_name() -> None:
    registry = build(("alpha", [ADAM]))
    assert record_of(registry, torch.optim.Adam) == ADAM
    assert record_of(registry, class_named("lib.Adam")) is None


def test_a_subclass_that_no_record_names_is_taken_for_the_nearest_base_that_one_does() -> None:
    base = class_named("lib.Base")
    middle = class_named("lib.Middle", base)
    leaf = class_named("lib.Leaf", class_named("elsewhere.Leaf", middle))
    schemas = {name: StateSchema(name, momentum(name)) for name in ("lib.Base", "lib.Middle", "lib.Leaf")}
    assert record_of(build(("a", [schemas["lib.Base"]])), leaf) == schemas["lib.Base"]
    assert (
        record_of(build(("a", [schemas["lib.Base"], schemas["lib.Middle"]])), leaf) == schemas["lib.Middle"]
    )
    assert record_of(build(("a", list(schemas.values()))), leaf) == schemas["lib.Leaf"]
    assert record_of(build(("a", [schemas["lib.Middle"], schemas["lib.Leaf"]])), base) is None


def test_an_exact_record_leaves_subclasses_out() -> None:
    exact = StateSchema("lib.Base", momentum("m"), exact=True)
    registry = build(("a", [exact]))
    base = class_named("lib.Base")
    assert record_of(registry, base) == exact
    assert record_of(registry, class_named("lib.Derived", base)) is None


def test_an_exact_record_does_not_let_a_subclass_fall_through_to_a_base_behind_it() -> None:
    base = class_named("lib.Base")
    middle = class_named("lib.Middle", base)
    registry = build(("a", [StateSchema("lib.Base"), StateSchema("lib.Middle", momentum("m"), exact=True)]))
    assert record_of(registry, class_named("lib.Leaf", middle)) is None


def made_on_the_fly(first: type, second: type) -> type:
    """Return a class such as Lightning's: an AdamW by inheritance, and a wrapper of one."""
    return type("LightningAdamW", (first, second), {})


@pytest.mark.parametrize("swap", [False, True])
def test_a_rule_beats_a_schema_for_a_class_that_inherits_both(swap: bool) -> None:
    optimizer, wrapper = class_named("lib.AdamW"), class_named("lib.LightningOptimizer")
    cls = made_on_the_fly(wrapper, optimizer) if swap else made_on_the_fly(optimizer, wrapper)
    rule = UnwrapRule("lib.LightningOptimizer", "_optimizer")
    registry = build(("a", [StateSchema("lib.AdamW", momentum("exp_avg")), rule]))
    assert record_of(registry, cls) == rule


def test_a_schema_for_the_class_itself_beats_a_rule_for_a_base() -> None:
    schema = StateSchema("lib.Fused", momentum("m"))
    fused = class_named("lib.Fused", class_named("lib.Wrapper"))
    assert record_of(build(("a", [schema, WRAPPER])), fused) == schema


def test_a_class_is_looked_up_once_and_not_kept_alive() -> None:
    registry = build(("a", [StateSchema("lib.Base")]))
    cls = class_named("lib.Derived", class_named("lib.Base"))
    assert registry.find(cls) is registry.find(cls) is registry.claims["lib.Base"]
    dead = weakref.ref(cls)
    del cls
    gc.collect()
    assert dead() is None


def test_the_table_of_claims_cannot_be_written() -> None:
    registry = build(("a", [ADAM]))
    with pytest.raises(TypeError):
        registry.claims["lib.Other"] = registry.claims["torch.optim.adam.Adam"]


def an_adamw() -> torch.optim.AdamW:
    return torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])


def test_a_class_claimed_under_the_name_of_its_import_is_refused_with_its_own_name() -> None:
    claimed = plugin("alias", StateSchema("torch.optim.AdamW", momentum("exp_avg")))
    registry = load_registry(plugins=[claimed], entry_points=False)
    assert list(registry.aliases(torch.optim.AdamW)) == ["torch.optim.AdamW"]
    with pytest.raises(UnknownOptimizerError) as caught:
        plan_reset(an_adamw(), registry=registry)
    assert str(caught.value).endswith(
        "plugin 'alias' (not installed) claims it as torch.optim.AdamW: "
        "it should claim torch.optim.adamw.AdamW."
    )


def test_a_class_claimed_under_the_name_of_its_import_is_not_taken_for_its_base() -> None:
    claimed = plugin("alias", ADAM, StateSchema("torch.optim.AdamW", momentum("exp_avg")))
    with pytest.raises(UnknownOptimizerError, match=r"it should claim torch\.optim\.adamw\.AdamW"):
        plan_reset(an_adamw(), registry=load_registry(plugins=[claimed], entry_points=False))


def test_a_nested_class_has_its_whole_qualified_name() -> None:
    class Local:
        pass

    assert class_name(Local) == (
        f"{__name__}.test_a_nested_class_has_its_whole_qualified_name.<locals>.Local"
    )
    assert record_of(build(("a", [schema := StateSchema(class_name(Local))])), Local) == schema
