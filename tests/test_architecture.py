"""The arrows between the modules run one way, and only one module writes optimizer state."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import miles_reset
from miles_reset import plan_reset, reset_optimizer_states

PACKAGE = Path(miles_reset.__file__).parent
PLUGINS = Path(__file__).parent.parent / "plugins"

# Each module may import those before it. What is not listed comes after all of them.
ORDER = [
    "errors",
    "schema",
    "wrapper",
    "checkpoint.saved",
    "checkpoint.files",
    "checkpoint.reader",
    "scheduler",
    "hookspecs",
    "registry",
    "discovery",
    "agree",
    "checkpoint.opening",
    "walk",
    "values",
    "aliasing",
    "batch",
    "draft",
    "plan",
    "lines",
    "render",
    "report",
    "reset",
    "choice",
    "moments",
    "partial",
    "policy_file",
    "policy",
    "fit",
    "rng",
    "receipt",
    "judging",
    "carrying",
    "resume",
    "cadence",
]

# Besides Python's own modules. Others may import what the package requires.
OUTSIDE = {
    "errors": set(),
    "schema": set(),
    "wrapper": set(),
    "hookspecs": {"pluggy"},
    "registry": set(),
    "discovery": {"pluggy"},
    "walk": set(),
}
"""Modules that know no optimizers, no tensors and (but for two) no plugin machinery."""

WRITES_STATE = "reset"
WRITES_GROUPS = "scheduler"
MODULES = sorted(
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    for path in [*PACKAGE.glob("*.py"), *PACKAGE.glob("checkpoint/*.py")]
    if path.stem != "__init__"
)
FOR_PLUGINS = {"checkpoint", "scheduler"}
"""Modules that plugins import from, besides the package."""


FOR_ADAPTERS = {"agree", "cadence", "policy", "receipt", "resume"}
"""Modules that the adapters of trainers import from, too."""
RECORDS = {"__init__", "_schedulers", "_checkpoints", "_computed", "_moments", "_starts", "_wrappers"}
"""The modules of a plugin that give its records, and are no adapters."""


def source_of(module: str) -> str:
    return PACKAGE.joinpath(*module.split(".")).with_suffix(".py").read_text()


def imports(source: str) -> set[str]:
    """Return the modules that some source imports, at any depth of functions and conditions."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "an import that says from where, whatever the file is called"
            assert node.module
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found


def own_imports(module: str) -> set[str]:
    names = {
        name.removeprefix("miles_reset.")
        for name in imports(source_of(module))
        if name.startswith("miles_reset.")
    }
    parts = {part for name in names for part in MODULES if name == part or name.startswith(f"{part}.")}
    assert parts or not names, "a module imports from modules, not from the package that imports it"
    return parts


def foreign_imports(source: str) -> set[str]:
    return {name.split(".")[0] for name in imports(source)} - sys.stdlib_module_names


def test_the_order_names_modules_that_there_are() -> None:
    assert set(ORDER) <= set(MODULES)


@pytest.mark.parametrize("module", ORDER)
def test_a_module_imports_only_those_below_it(module: str) -> None:
    assert own_imports(module) <= set(ORDER[: ORDER.index(module)])


@pytest.mark.parametrize("module", OUTSIDE)
def test_a_module_that_needs_little_imports_little(module: str) -> None:
    assert foreign_imports(source_of(module)) - {"miles_reset"} == OUTSIDE[module]


PLUGIN_FILES = sorted(PLUGINS.glob("miles_reset_*/**/*.py"))
RECORD_FILES = [path for path in PLUGIN_FILES if path.stem in RECORDS]


@pytest.mark.parametrize("path", RECORD_FILES, ids=lambda path: str(path.relative_to(PLUGINS)))
def test_a_plugin_imports_nothing_but_miles_reset(path: Path) -> None:
    foreign = foreign_imports(path.read_text())
    assert foreign <= {"miles_reset", path.relative_to(PLUGINS).parts[0]}


@pytest.mark.parametrize("path", PLUGIN_FILES, ids=lambda path: str(path.relative_to(PLUGINS)))
def test_a_plugin_imports_only_public_names(path: Path) -> None:
    names = {name for name in imports(path.read_text()) if name.startswith("miles_reset.")}
    allowed = FOR_PLUGINS if path.stem in RECORDS else FOR_PLUGINS | FOR_ADAPTERS
    short = {name.removeprefix("miles_reset.") for name in names}
    assert {name for name in short if name.split(".")[0] not in allowed} <= set(miles_reset.__all__)


def tensor_writes(source: str) -> Iterator[str]:
    """Yield the calls of what writes into tensors: torch ends the names of such methods in one ``_``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = node.func.attr
            if name.endswith("_") and not name.endswith("__"):
                yield f"line {node.lineno}: {name}()"


def test_writes_are_seen() -> None:
    assert list(tensor_writes(source_of(WRITES_STATE)))
    assert list(tensor_writes("torch._foreach_zero_(a); b.fill_(1); c.__len__()")) == [
        "line 1: _foreach_zero_()",
        "line 1: fill_()",
    ]


@pytest.mark.parametrize(
    "module", [module for module in ORDER if module not in (WRITES_STATE, WRITES_GROUPS)]
)
def test_only_one_module_calls_what_writes_into_tensors(module: str) -> None:
    assert list(tensor_writes(source_of(module))) == []


class Writes(TorchDispatchMode):
    """Notes each operation that writes into a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            self.seen.append(str(func))
        return func(*args, **kwargs or {})


def stepped() -> list[torch.optim.Optimizer]:
    """Return optimizers that are reset in every way: filled, copied, removed, replaced, set."""
    built: list[torch.optim.Optimizer] = []
    for cls, options in [
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
        (torch.optim.NAdam, {}),
        (torch.optim.ASGD, {}),
        (torch.optim.Rprop, {}),
    ]:
        weight = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        weight.grad = torch.ones_like(weight)
        optimizer = cls([weight], **options)
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        built.append(optimizer)
    return built


def snapshot(optimizers: list[torch.optim.Optimizer]) -> list[Any]:
    return [
        (key, value, value.clone() if isinstance(value, torch.Tensor) else value)
        for optimizer in optimizers
        for holder in (*optimizer.state.values(), *optimizer.param_groups)
        for key, value in holder.items()
    ]


def test_a_plan_writes_nothing_and_its_application_does() -> None:
    optimizers = stepped()
    before = snapshot(optimizers)
    with Writes() as planned:
        plan = plan_reset(optimizers)
        str(plan)
        plan.to_dict()
    assert planned.seen == []
    after = snapshot(optimizers)
    assert len(before) == len(after)
    for (key, value, copy), (key_now, value_now, copy_now) in zip(before, after, strict=True):
        assert (key, id(value)) == (key_now, id(value_now))
        assert torch.equal(copy, copy_now) if isinstance(copy, torch.Tensor) else copy == copy_now
    with Writes() as applied:
        plan.apply()
    assert applied.seen


def test_to_ask_for_a_reset_is_to_plan_and_to_write() -> None:
    with Writes() as written:
        reset_optimizer_states(stepped())
    assert written.seen
