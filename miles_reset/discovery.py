"""From installed plugins to a frozen registry."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable
from importlib import metadata
from typing import Any

import pluggy

from miles_reset import hookspecs
from miles_reset.checkpoint.reader import CheckpointReader, SafeGlobal
from miles_reset.errors import ConflictError, PluginError
from miles_reset.registry import Provider, Registry
from miles_reset.scheduler import SchedulerRule
from miles_reset.schema import StateSchema
from miles_reset.wrapper import UnwrapRule

ENTRY_POINTS = "miles_reset"
DISABLE = "MILES_RESET_DISABLE"
HOOKS: dict[str, type] = {
    "miles_reset_schemas": StateSchema,
    "miles_reset_unwrap_rules": UnwrapRule,
    "miles_reset_checkpoint_readers": CheckpointReader,
    "miles_reset_scheduler_rules": SchedulerRule,
    "miles_reset_safe_globals": SafeGlobal,
}

logger = logging.getLogger("miles_reset")
_lock = threading.Lock()
_default: list[Registry] = []


def load_registry(
    *, plugins: Iterable[object] = (), disabled: Iterable[str] = (), entry_points: bool = True
) -> Registry:
    """Build a registry from the installed plugins and from those handed over.

    Args:
        plugins: Further plugins: modules, or objects with hook implementations.
        disabled: Names of plugins to leave out, besides those in the environment variable
            ``MILES_RESET_DISABLE`` (separated by commas).
        entry_points: Whether to load the installed plugins, those with an entry point in the
            group ``miles_reset``.

    Returns:
        A new, frozen registry. The order of the plugins makes no difference.

    Raises:
        PluginError: A plugin fails to import or to answer, or implements a hook that is none.
        ConflictError: Two plugins claim one class, or bear one name.
    """
    disabled = [disabled] if isinstance(disabled, str) else disabled
    off = {name.strip() for name in os.environ.get(DISABLE, "").split(",") if name.strip()} | set(disabled)
    found: dict[Provider, object] = {}
    seen: dict[str, Provider] = {}
    installed = _installed(off) if entry_points else []
    there = {id(plugin) for _, plugin in installed}
    handed = [(Provider(_name(plugin)), plugin) for plugin in plugins if id(plugin) not in there]
    for provider, plugin in [*installed, *handed]:
        if provider.plugin in off:
            continue
        if provider.plugin in seen and found[seen[provider.plugin]] is not plugin:
            both = [seen[provider.plugin], provider]
            raise ConflictError(
                f"The plugin name {provider.plugin!r}",
                [str(p) for p in both],
                [provider.plugin],
                f"Uninstall one, or disable both with MILES_RESET_DISABLE={provider.plugin}.",
            )
        found[seen.setdefault(provider.plugin, provider)] = plugin
    known = {provider.plugin for provider, _ in installed} | set(seen)
    for name in sorted(off - known - ({point.name for point in _points()} if off else set())):
        logger.warning("%s or disabled= names %r, and no such plugin is installed.", DISABLE, name)
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    return Registry.build(
        (provider, _records(manager, provider, plugin)) for provider, plugin in found.items()
    )


def default_registry() -> Registry:
    """Return the registry of the installed plugins, built at the first call and then shared."""
    with _lock:
        if not _default:
            _default.append(load_registry())
        return _default[0]


def _points() -> list[metadata.EntryPoint]:
    return sorted(metadata.entry_points(group=ENTRY_POINTS), key=lambda point: point.name)


def _installed(off: set[str]) -> list[tuple[Provider, object]]:
    loaded = []
    names: dict[int, tuple[str, str]] = {}  # of each distribution, whose metadata are dear to read
    for point in _points():
        if point.name in off:
            continue
        dist = point.dist
        if id(dist) not in names:
            names[id(dist)] = (dist.name, dist.version) if dist else ("unknown", "")
        provider = Provider(point.name, *names[id(dist)])
        try:
            loaded.append((provider, point.load()))
        except Exception as error:
            raise PluginError(
                provider.plugin, provider.source, f"failed to import {point.value}: {error!r}."
            ) from error
    return loaded


def _name(plugin: object) -> str:
    name = getattr(plugin, "__name__", None) or type(plugin).__name__
    return str(name).rpartition(".")[2].removeprefix("miles_reset_")


def _records(manager: pluggy.PluginManager, provider: Provider, plugin: object) -> tuple[Any, ...]:
    try:
        manager.register(plugin, provider.plugin)
        manager.check_pending()
    except (pluggy.PluginValidationError, ValueError) as error:
        hooks = ", ".join(HOOKS)
        raise PluginError(
            provider.plugin, provider.source, f"is refused by pluggy: {error}. Hooks are: {hooks}."
        ) from error
    if not manager.get_hookcallers(plugin):
        hooks = ", ".join(HOOKS)
        raise PluginError(
            provider.plugin,
            provider.source,
            f"implements no hook. Mark one with @hookimpl. Hooks are: {hooks}.",
        )
    return tuple(
        record
        for hook, expected in HOOKS.items()
        for implementation in getattr(manager.hook, hook).get_hookimpls()
        if implementation.plugin is plugin
        for record in _call(provider, hook, implementation, expected)
    )


def _call(provider: Provider, hook: str, implementation: pluggy.HookImpl, expected: type) -> list[Any]:
    if implementation.hookwrapper or implementation.wrapper:
        raise PluginError(provider.plugin, provider.source, f"wraps {hook}(); a hook returns records.")
    try:
        result: Any = implementation.function()
        records = None if result is None else list(result)
    except Exception as error:
        raise PluginError(provider.plugin, provider.source, f"failed in {hook}(): {error!r}.") from error
    if records is None:
        raise PluginError(
            provider.plugin,
            provider.source,
            f"returned None from {hook}(); return a list, empty perhaps.",
        )
    for record in records:
        if not isinstance(record, expected):
            raise PluginError(
                provider.plugin,
                provider.source,
                f"returned {record!r} from {hook}(); every item must be a {expected.__name__}.",
            )
    return records
