"""Which optimizers of an environment are known to plugins, which are not, and which claims are stale."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from itertools import takewhile
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from miles_reset.finding import Library, find_all, is_installed
from miles_reset.libraries import Status
from miles_reset.registry import Claim, Registry
from miles_reset.wrapper import UnwrapRule

TIMEOUT = 60.0
"""How many seconds one library may take to be imported."""


@dataclass(frozen=True)
class Known:
    """An optimizer class that an installed library defines.

    Attributes:
        name: Its dotted name.
        plugin: The plugin that knows it; empty if none does.
        claim: The name that the plugin claims: its own, or a base's.
    """

    name: str
    plugin: str = ""
    claim: str = ""

    @property
    def how(self) -> str:
        """How it is known: ``exact``, ``by its base``, or ``unknown``."""
        return "unknown" if not self.plugin else "exact" if self.claim == self.name else "by its base"


@dataclass(frozen=True)
class Finding:
    """What was found of one library.

    Attributes:
        library: Its top-level package.
        distribution: Where it comes from, with the version.
        optimizers: The optimizers that it defines.
        stale: The names that plugins claim in it and that are not there: plugin, and what is wrong, by name.
        elsewhere: Those of miles-reset's own plugins, which claim the names of several versions: no such
            class is there under another name that nobody claims.
        problems: What could not be imported.
    """

    library: str
    distribution: str
    optimizers: tuple[Known, ...]
    stale: Mapping[str, tuple[str, str]]
    problems: tuple[str, ...]
    elsewhere: tuple[str, ...] = ()

    @property
    def unknown(self) -> list[str]:
        """The optimizers that no plugin knows."""
        return [one.name for one in self.optimizers if not one.plugin]

    def to_dict(self) -> dict[str, Any]:
        """Return the finding as plain data."""
        return {
            "library": self.library,
            "distribution": self.distribution,
            "optimizers": [
                {"name": one.name, "known": one.how, "plugin": one.plugin or None, "claim": one.claim or None}
                for one in self.optimizers
            ],
            "stale": [
                {"target": target, "plugin": plugin, "detail": detail}
                for target, (plugin, detail) in self.stale.items()
            ],
            "other_versions": list(self.elsewhere),
            "problems": list(self.problems),
        }


def examine(registry: Registry, packages: Sequence[str] = (), timeout: float = TIMEOUT) -> list[Finding]:
    """Compare what plugins claim with what installed libraries define.

    Looked at are the libraries in which plugins claim classes, those that require torch, and those named.

    Args:
        registry: The plugins.
        packages: Further top-level packages.
        timeout: How many seconds one library may take to be imported.
    """
    claimed: dict[str, list[str]] = {}
    for target in registry.claims:
        claimed.setdefault(target.partition(".")[0], []).append(target)
    sources = metadata.packages_distributions()
    names = [*claimed, *_that_require_torch(sources), *packages]
    there = [name for name in dict.fromkeys(names) if name in packages or is_installed(name)]
    found = find_all({name: claimed.get(name, []) for name in there}, timeout)
    shown = (one for one in found if one.optimizers or one.resolved or one.problems)
    return [_finding(one, registry, sources) for one in shown]


def _that_require_torch(sources: Mapping[str, Sequence[str]]) -> Iterable[str]:
    """Yield the top-level packages of the installed distributions that depend on torch."""
    for package, distributions in sorted(sources.items()):
        requires = [one for name in set(distributions) for one in metadata.requires(name) or ()]
        if not package.startswith("miles_reset") and any(
            re.match(r"torch\b(?![-_.])", one) for one in requires
        ):
            yield package


def _finding(found: Library, registry: Registry, sources: Mapping[str, Sequence[str]]) -> Finding:
    names = sorted(set(sources.get(found.name, ())))
    known = [_known(name, bases, registry) for name, bases in sorted(found.optimizers.items())]
    bases_of_known = {base for one in known if one.plugin for base in found.optimizers[one.name]}
    known = [one for one in known if one.plugin or not _is_internal(one.name, bases_of_known)]
    moved = {one.name.rpartition(".")[2] for one in known if not one.plugin}
    stale: dict[str, tuple[str, str]] = {}
    elsewhere: list[str] = []
    for target, resolved in found.resolved.items():
        provider = registry.claims[target].provider
        own = provider.distribution == "miles-reset" and target.rpartition(".")[2] not in moved
        if resolved.status is Status.STALE and own:
            elsewhere.append(target)
        elif resolved.status in (Status.STALE, Status.ALIAS):
            stale[target] = (provider.plugin, resolved.detail)
    distribution = ", ".join(f"{name} {metadata.version(name)}" for name in names)
    return Finding(
        found.name, distribution, tuple(known), stale, tuple(found.problems), tuple(sorted(elsewhere))
    )


def _is_internal(name: str, bases_of_known: Container[str]) -> bool:
    """Say whether nobody builds such an optimizer: it is private, or only there to be subclassed."""
    return name.rpartition(".")[2].startswith("_") or name in bases_of_known


def _known(name: str, bases: Sequence[str], registry: Registry) -> Known:
    """Find the claim on a class by the names of its bases, as the registry does by the bases themselves."""
    if own := registry.claims.get(name):
        return Known(name, own.provider.plugin, name)
    above = (registry.claims.get(base) for base in bases)
    near: list[Claim] = list(takewhile(lambda claim: not claim.record.exact, (one for one in above if one)))
    rules = [claim for claim in near if isinstance(claim.record, UnwrapRule)]
    for claim in rules or near:
        return Known(name, claim.provider.plugin, claim.record.target)
    return Known(name)


def render(findings: Sequence[Finding]) -> RenderableType:
    """Draw what was found: a line for each library, then the names that need something."""
    table = Table("library", "distribution", "optimizers", "known", "unknown", "stale claims")
    for one in findings:
        known = len(one.optimizers) - len(one.unknown)
        counts = (len(one.optimizers), known, len(one.unknown), len(one.stale))
        table.add_row(one.library, one.distribution, *map(str, counts))
    lines: list[Text] = []
    for one in findings:
        lines += (Text(f"unknown  {name}", style="yellow") for name in one.unknown)
    for one in findings:
        lines += (
            Text(f"stale    {target} of plugin {plugin!r}: {detail}", style="red")
            for target, (plugin, detail) in one.stale.items()
        )
    for one in findings:
        lines += (Text(f"problem  {one.library}: {problem}", style="dim") for problem in one.problems)
    if any(one.unknown for one in findings):
        lines.append(Text("miles-reset draft NAME drafts a plugin for an unknown one."))
    return Group(table, *lines)
