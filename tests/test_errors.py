"""What the errors say, what they carry, and that they reach another process whole."""

import copy
import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
from fakes import class_named, plugin

from miles_reset import (
    CheckpointError,
    ConflictError,
    PluginError,
    PolicyError,
    RankDisagreementError,
    ResetError,
    StateSchema,
    UndeclaredStateError,
    UnknownOptimizerError,
    UnreachableStateError,
    UnsafeCheckpointError,
    UnsupportedOptimizerState,
    UnwrapRule,
    default_registry,
    errors,
    load_registry,
    momentum,
    plan_reset,
)
from miles_reset.errors import DraftError

Chain = class_named("lib.ChainedOptimizer")


def chain_of(*optimizers: Any) -> Any:
    chain = Chain()
    chain.held = list(optimizers)
    return chain


def error_of(chain: Any, *records: StateSchema | UnwrapRule) -> ResetError:
    registry = load_registry(plugins=[plugin("chain", UnwrapRule("lib.ChainedOptimizer", "held"), *records)])
    with pytest.raises(ResetError) as caught:
        plan_reset(chain, registry=registry)
    return caught.value


def adamw(**state: torch.Tensor) -> torch.optim.AdamW:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight])
    optimizer.state[weight].update(state)
    return optimizer


def unknown() -> UnknownOptimizerError:
    lion = class_named("lionesque.lion.Lion", torch.optim.Optimizer)
    error = error_of(chain_of(adamw(), lion([torch.ones(2)], {})))
    assert isinstance(error, UnknownOptimizerError)
    return error


def undeclared() -> UndeclaredStateError:
    error = error_of(chain_of(adamw(z=torch.ones(2), a=torch.ones(2))))
    assert isinstance(error, UndeclaredStateError)
    return error


def test_an_unknown_optimizer_is_named_with_its_place_the_plugins_and_what_to_do() -> None:
    error = unknown()
    assert error.path == "ChainedOptimizer[1].Lion"
    assert error.type.__name__ == "Lion"
    loaded = sorted(["chain", *(provider.plugin for provider in default_registry().providers)])
    assert str(error) == (
        "No schema or unwrap rule for lionesque.lion.Lion at ChainedOptimizer[1].Lion. "
        f"Loaded plugins: {', '.join(loaded)}. Nothing was changed. "
        "Install a plugin that declares it, or write one: docs/writing-a-plugin.md."
    )


def test_undeclared_state_is_named_with_its_place_the_schema_the_plugin_and_what_to_do() -> None:
    error = undeclared()
    assert error.path == "ChainedOptimizer[0].AdamW"
    assert error.keys == ("a", "z")
    assert error.schema == "torch.optim.adamw.AdamW"
    message = str(error)
    assert message.startswith(
        "AdamW at ChainedOptimizer[0].AdamW holds state that its schema does not declare: 'a', 'z'. "
        "Schema torch.optim.adamw.AdamW comes from plugin 'torch' (miles-reset "
    )
    assert "declares 'exp_avg', 'exp_avg_sq', " in message
    assert message.endswith(
        "Nothing was changed. "
        "Declare it with momentum(), variance(), history(), clock(), kept() or scratch()."
    )


def test_a_conflict_names_the_class_both_plugins_with_their_versions_and_what_to_do() -> None:
    with pytest.raises(ConflictError) as caught:
        load_registry(plugins=[plugin("fastadam", StateSchema("torch.optim.adam.Adam", momentum("m")))])
    message = str(caught.value)
    assert message.startswith("torch.optim.adam.Adam is claimed by plugin ")
    assert "plugin 'torch' (miles-reset " in message
    assert "plugin 'fastadam' (not installed)" in message
    assert "Set override=True in the one that should win, or disable one with MILES_RESET_DISABLE=" in message


ONE_OF_EACH = [
    ResetError("it failed"),
    UnsupportedOptimizerState("Chain[0].AdamW", "it cannot be reset"),
    UnknownOptimizerError("Chain[0].AdamW", torch.optim.AdamW, plugins=["torch"], hint="Do this."),
    UndeclaredStateError(
        "Chain[0].AdamW", ["z"], "torch.optim.adamw.AdamW", provider="plugin 'torch'", declared="'step'"
    ),
    UnreachableStateError("Chain[0].AdamW", "it is on disk."),
    PluginError("lion", "miles-reset-lion 1.2", "failed to import."),
    ConflictError("torch.optim.adam.Adam", ["plugin 'a'", "plugin 'b'"], ["a", "b"]),
    PolicyError("optimizer", "it is 'frsh'."),
    CheckpointError("state.pt", "optimizer", "is torn."),
    UnsafeCheckpointError("state.pt", "posix.system"),
    RankDisagreementError({0: "ready", 1: "the file is not there"}),
    DraftError("lion.Lion", "TypeError('it takes matrices')"),
]


def test_there_is_one_of_each_error_above_and_all_are_reset_errors() -> None:
    public = {it for it in vars(errors).values() if isinstance(it, type) and issubclass(it, Exception)}
    assert {type(error) for error in ONE_OF_EACH} == public
    assert all(issubclass(error, ResetError) for error in public)
    assert not issubclass(ResetError, (ValueError, TypeError, RuntimeError))


def tree_drawn(docstring: str) -> dict[str, str]:
    """Read the tree in the docstring: the parent of each name, by indentation."""
    parents, above = {}, []
    for line in docstring.split("::")[1].split("\n\n")[1].splitlines():
        name = line.lstrip(" +-|")
        depth = len(line) - len(name)
        above = [(d, n) for d, n in above if d < depth]
        parents[name] = above[-1][1] if above else "Exception"
        above.append((depth, name))
    return parents


def test_the_tree_is_as_it_is_drawn() -> None:
    assert errors.__doc__ is not None
    drawn = tree_drawn(errors.__doc__)
    assert drawn == {type(error).__name__: type(error).__base__.__name__ for error in ONE_OF_EACH}


by_class = pytest.mark.parametrize("error", ONE_OF_EACH, ids=[type(error).__name__ for error in ONE_OF_EACH])


@by_class
@pytest.mark.parametrize(
    "through",
    [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy],
    ids=["pickle", "copy", "deep"],
)
def test_an_error_survives_a_copy_with_its_message_and_its_parts(error: ResetError, through: Any) -> None:
    again = through(error)
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def fail(error: ResetError) -> None:
    raise error


def test_an_error_reaches_another_process_and_comes_back() -> None:
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn) as pool, pytest.raises(UnreachableStateError) as caught:
        pool.submit(fail, UnreachableStateError("Chain[0].AdamW", "it is on disk.")).result()
    assert (caught.value.path, caught.value.reason) == ("Chain[0].AdamW", "it is on disk.")


@by_class
def test_an_error_about_state_or_a_checkpoint_says_that_nothing_was_changed(error: ResetError) -> None:
    says_so = "Nothing was changed." in str(error)
    resume = (PolicyError, CheckpointError, RankDisagreementError)
    assert says_so == (type(error).__base__ is UnsupportedOptimizerState or isinstance(error, resume))
