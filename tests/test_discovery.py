"""From installed plugins to a registry: the plugins are modules on disk with a dist-info beside them."""

import logging
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path
from textwrap import dedent
from typing import Any, Protocol

import pytest
from fakes import install, plugin

import miles_reset_torch
from miles_reset import (
    ConflictError,
    PluginError,
    StateSchema,
    UnwrapRule,
    default_registry,
    hookimpl,
    load_registry,
    momentum,
)

IMPORTS = "from miles_reset import StateSchema, UnwrapRule, hookimpl, momentum\n"


def hook(body: str, signature: str = "miles_reset_schemas()", marker: str = "@hookimpl") -> str:
    """Return the source of a plugin that implements one hook."""
    return f"{IMPORTS}{marker}\ndef {signature}:\n    {body}\n"


GOOD = hook("return [StateSchema('lion.Lion', momentum('exp_avg'))]")
PUMA = hook("return [StateSchema('puma.Puma')]")


class Install(Protocol):
    def __call__(self, source: str, name: str = ..., **parts: str) -> None: ...


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install plugins into a folder on sys.path; by default 'lion' of miles-reset-lion 1.2."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def put(source: str, name: str = "lion", **parts: str) -> None:
        default = {"module": f"{name}_plugin", "distribution": f"miles-reset-{name}", "version": "1.2"}
        install(tmp_path, source, name=name, **{**default, **parts})

    yield put
    for module in set(sys.modules) - before:
        del sys.modules[module]


def names(**options: Any) -> list[str]:
    return [provider.plugin for provider in load_registry(**options).providers]


def test_our_own_plugins_are_found_by_their_entry_points() -> None:
    assert set(names()) >= {"emerging", "megatron", "torch"}
    adam = load_registry().claims["torch.optim.adam.Adam"]
    assert str(adam.provider).startswith("plugin 'torch' (miles-reset ")


def test_without_entry_points_there_is_nothing_but_what_is_handed_over() -> None:
    assert names(entry_points=False) == []
    assert names(entry_points=False, plugins=[plugin("miles_reset_mine")]) == ["mine"]


def test_an_installed_plugin_is_found_with_its_distribution_and_version(installed: Install) -> None:
    installed(GOOD)
    claim = load_registry().claims["lion.Lion"]
    assert claim.record == StateSchema("lion.Lion", momentum("exp_avg"))
    assert str(claim.provider) == "plugin 'lion' (miles-reset-lion 1.2)"


def test_a_plugin_may_yield_its_records(installed: Install) -> None:
    installed(hook("yield StateSchema('lion.Lion'); yield StateSchema('lion.Cub')"))
    assert {"lion.Lion", "lion.Cub"} <= set(load_registry().claims)


def test_an_object_with_hooks_is_a_plugin_too() -> None:
    class Plugin:
        @hookimpl
        def miles_reset_unwrap_rules(self) -> tuple[UnwrapRule, ...]:
            return (UnwrapRule("lion.Pride", "lions"),)

    claim = load_registry(plugins=[Plugin()]).claims["lion.Pride"]
    assert (claim.record, claim.provider.plugin) == (UnwrapRule("lion.Pride", "lions"), "Plugin")


def test_plugins_installed_and_handed_over_in_any_order_give_the_same_registry(installed: Install) -> None:
    installed(GOOD)
    installed(PUMA, name="puma")
    one, two = plugin("one", StateSchema("one.One")), plugin("two", StateSchema("two.Two"))
    assert load_registry(plugins=[one, two]) == load_registry(plugins=[two, one])
    assert {"lion.Lion", "puma.Puma", "one.One", "two.Two"} <= set(load_registry(plugins=[one, two]).claims)


def test_a_plugin_that_is_installed_and_handed_over_counts_once(installed: Install) -> None:
    installed(GOOD)
    import lion_plugin

    assert load_registry(plugins=[lion_plugin, lion_plugin, miles_reset_torch]) == load_registry()


BROKEN = {
    "fails to import": (
        "import missing_module",
        "failed to import lion_plugin: ModuleNotFoundError(\"No module named 'missing_module'\").",
    ),
    "cannot be parsed": ("def miles_reset_schemas(:", "failed to import lion_plugin: SyntaxError("),
    "returns None": (
        hook("[StateSchema('lion.Lion')]"),
        "returned None from miles_reset_schemas(); return a list, empty perhaps.",
    ),
    "returns another type": (
        hook("return {'lion.Lion': 'exp_avg'}"),
        "returned 'lion.Lion' from miles_reset_schemas(); every item must be a StateSchema.",
    ),
    "returns records of another hook": (
        hook("return [UnwrapRule('lion.Lion', 'optimizer')]"),
        "from miles_reset_schemas(); every item must be a StateSchema.",
    ),
    "returns a bare record": (
        hook("return StateSchema('lion.Lion')"),
        "failed in miles_reset_schemas(): TypeError(\"'StateSchema' object is not iterable\").",
    ),
    "yields and raises late": (
        hook("yield StateSchema('lion.Lion')\n    raise RuntimeError('too late')"),
        "failed in miles_reset_schemas(): RuntimeError('too late').",
    ),
    "declares nonsense": (
        hook("return [StateSchema('Lion')]"),
        "failed in miles_reset_schemas(): ValueError(\"target 'Lion' is not a dotted class name",
    ),
    "implements a misspelt hook": (
        hook("return []", "miles_reset_schema()"),
        "Hooks are: miles_reset_schemas, miles_reset_unwrap_rules, miles_reset_checkpoint_readers, "
        "miles_reset_scheduler_rules, miles_reset_safe_globals.",
    ),
    "asks for an argument": (
        hook("return []", "miles_reset_schemas(registry)"),
        "Argument(s) {'registry'} are declared in the hookimpl but can not be found in the hookspec",
    ),
    "wraps a hook": (
        hook("return (yield)", marker="@hookimpl(wrapper=True)"),
        "wraps miles_reset_schemas(); a hook returns records.",
    ),
    "forgets the marker": (hook("return []", marker=""), "implements no hook"),
}


@pytest.mark.parametrize(("source", "problem"), BROKEN.values(), ids=BROKEN.keys())
def test_an_error_about_a_broken_plugin_names_it_and_says_how_to_disable_it(
    installed: Install, monkeypatch: pytest.MonkeyPatch, source: str, problem: str
) -> None:
    installed(source)
    with pytest.raises(PluginError) as caught:
        load_registry()
    message = str(caught.value)
    assert message.startswith("Plugin 'lion' (miles-reset-lion 1.2) ")
    assert problem in message
    assert message.endswith("Mend or uninstall it, or disable it with MILES_RESET_DISABLE=lion.")
    assert (caught.value.plugin, caught.value.distribution) == ("lion", "miles-reset-lion 1.2")
    monkeypatch.setenv("MILES_RESET_DISABLE", "lion")
    assert "lion" not in names()


def test_the_cause_of_a_failure_stays_in_the_traceback(installed: Install) -> None:
    installed("1 / 0")
    with pytest.raises(PluginError) as caught:
        load_registry()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_misspelt_hook_is_named_in_the_error(installed: Install) -> None:
    installed(hook("return []", "miles_reset_schema()"))
    with pytest.raises(PluginError, match="unknown hook 'miles_reset_schema'"):
        load_registry()


def test_two_installed_plugins_that_claim_one_class_are_both_named(installed: Install) -> None:
    installed(GOOD)
    installed(GOOD, name="puma", version="0.3")
    with pytest.raises(ConflictError) as caught:
        load_registry()
    assert caught.value.claimants == (
        "plugin 'lion' (miles-reset-lion 1.2)",
        "plugin 'puma' (miles-reset-puma 0.3)",
    )
    assert "lion" in names(disabled=["puma"])


def test_two_installed_plugins_of_one_name_are_both_named(installed: Install) -> None:
    installed(GOOD)
    installed(GOOD, module="other", distribution="other-lion", version="0.3")
    with pytest.raises(ConflictError) as caught:
        load_registry()
    message = str(caught.value)
    assert "plugin 'lion' (miles-reset-lion 1.2)" in message
    assert "plugin 'lion' (other-lion 0.3)" in message
    assert "override=True" not in message  # settles claims on a class, not on a name
    assert names(disabled=["lion"])


@pytest.mark.parametrize(
    ("value", "off"),
    [("lion", {"lion"}), ("lion,puma", {"lion", "puma"}), (" puma , lion,", {"lion", "puma"}), ("", set())],
)
def test_the_environment_variable_disables_one_or_several(
    installed: Install, monkeypatch: pytest.MonkeyPatch, value: str, off: set[str]
) -> None:
    installed(GOOD)
    installed(PUMA, name="puma")
    monkeypatch.setenv("MILES_RESET_DISABLE", value)
    assert {"lion", "puma"} - set(names()) == off


def test_what_is_disabled_is_not_imported(installed: Install) -> None:
    installed("raise SystemExit('imported')")
    assert "lion" not in names(disabled=["lion"])


def test_the_argument_disables_besides_the_environment_variable(
    installed: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(GOOD)
    monkeypatch.setenv("MILES_RESET_DISABLE", "torch")
    assert {"lion", "torch", "mine"}.isdisjoint(names(disabled=["lion", "mine"], plugins=[plugin("mine")]))


def test_a_plugin_of_our_own_can_be_disabled() -> None:
    assert "torch.optim.adam.Adam" not in load_registry(disabled=["torch"]).claims


def test_a_name_that_no_plugin_has_is_warned_about(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MILES_RESET_DISABLE", "torch,lyon")
    with caplog.at_level(logging.WARNING, "miles_reset"):
        load_registry(disabled=["emerging"])
    (record,) = caplog.records
    assert "'lyon'" in record.getMessage()
    assert "MILES_RESET_DISABLE" in record.getMessage()


def test_the_default_registry_is_built_once() -> None:
    assert default_registry() is default_registry()
    assert load_registry() is not load_registry()


IMPORTED = """
import sys
{first}
before = set(sys.modules)
{code}
print(*sorted({{name.partition(".")[0] for name in set(sys.modules) - before}} - sys.stdlib_module_names))
"""


def imported_by(code: str, *, first: str = "import torch", folder: str = "") -> set[str]:
    """Return the top-level modules, but for Python's own, that some code imports in a new process."""
    script = IMPORTED.format(code=code, first=f"sys.path.insert(0, {folder!r})\n{first}" if folder else first)
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    return set(done.stdout.split())


OUR_PLUGINS = distribution("miles-reset").entry_points.select(group="miles_reset")
OURS = {"miles_reset", *(point.value for point in OUR_PLUGINS)}


@pytest.mark.parametrize(
    ("code", "modules"),
    [
        ("import miles_reset", {"miles_reset", "pluggy"}),
        ("import miles_reset; miles_reset.load_registry()", {*OURS, "pluggy"}),
    ],
)
def test_no_optimizer_library_is_imported(code: str, modules: set[str]) -> None:
    seen = {name for name in imported_by(code) if not name.startswith("__editable__")}
    assert seen == modules


def test_a_class_is_claimed_and_reset_without_an_import(installed: Install, tmp_path: Path) -> None:
    installed(GOOD)
    (tmp_path / "lion.py").write_text(
        "import torch\n"
        "class Lion(torch.optim.SGD): pass\n"
    )  # fmt: skip
    code = """
        import miles_reset, torch
        registry = miles_reset.load_registry()
        assert "lion.Lion" in registry.claims
        assert "lion_plugin" in sys.modules
        assert "lion" not in sys.modules
        import lion
        optimizer = lion.Lion([weight := torch.nn.Parameter(torch.ones(2))])
        optimizer.state[weight]["exp_avg"] = torch.ones(2)
        assert registry.find(lion.Lion).provider.plugin == "lion"
        miles_reset.reset_optimizer_states(optimizer)
        assert optimizer.state[weight]["exp_avg"].tolist() == [0.0, 0.0]
        """
    assert "lion" in imported_by(dedent(code), folder=str(tmp_path))


def test_handing_over_a_module_needs_no_name() -> None:
    anonymous = plugin("package.miles_reset_deep", StateSchema("deep.Deep"))
    assert "deep" in names(plugins=[anonymous])
