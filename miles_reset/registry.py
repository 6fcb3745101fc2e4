"""From a class to the record that a plugin holds about it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

from miles_reset.errors import ConflictError
from miles_reset.schema import StateSchema
from miles_reset.wrapper import UnwrapRule

Record = StateSchema | UnwrapRule


@dataclass(frozen=True, order=True)
class Provider:
    """A plugin and the installed distribution that it comes from."""

    plugin: str
    distribution: str = "not installed"
    version: str = ""

    def __str__(self) -> str:
        """Name the plugin for an error: ``plugin 'lion' (miles-reset-lion 1.0)``."""
        return f"plugin {self.plugin!r} ({self.source})"

    @property
    def source(self) -> str:
        """The distribution and its version."""
        return f"{self.distribution} {self.version}".strip()


@dataclass(frozen=True)
class Claim:
    """A record, and who provides it."""

    record: Any
    provider: Provider


@dataclass(frozen=True)
class Registry:
    """What all plugins together declare: a frozen table from dotted names to claims.

    Build one with :func:`miles_reset.load_registry`.

    Attributes:
        claims: The claims by dotted class name, sorted by name.
        providers: The plugins, sorted by name.
        tables: The claims of each other kind of record, by its target.
    """

    claims: Mapping[str, Claim]
    providers: tuple[Provider, ...] = ()
    tables: Mapping[type, Mapping[str, Claim]] = field(default_factory=dict)
    _found: WeakKeyDictionary[type, Claim | None] = field(
        default_factory=WeakKeyDictionary, compare=False, repr=False
    )

    @classmethod
    def build(cls, provided: Iterable[tuple[Provider, Iterable[Any]]]) -> Registry:
        """Put records into one table, in an order of no consequence.

        Raises:
            ConflictError: Two records claim one class, and not exactly one says ``override=True``.
        """
        pairs = [(provider, tuple(records)) for provider, records in provided]
        claimed: dict[Any, dict[str, list[Claim]]] = {}
        for provider, records in sorted(pairs, key=lambda pair: pair[0]):
            for record in records:
                kind = Record if isinstance(record, Record) else type(record)
                claimed.setdefault(kind, {}).setdefault(record.target, []).append(Claim(record, provider))
        tables = {
            kind: MappingProxyType({target: _winner(target, claims[target]) for target in sorted(claims)})
            for kind, claims in claimed.items()
        }
        claims = tables.pop(Record, MappingProxyType({}))
        return cls(claims, tuple(sorted(provider for provider, _ in pairs)), MappingProxyType(tables))

    def table(self, kind: type) -> Mapping[str, Claim]:
        """Return the claims of a kind of record that is about no optimizer, by target."""
        return self.tables.get(kind, {})

    def find(self, cls: type) -> Claim | None:
        """Return the claim on a class, or on the nearest base that one is made on.

        A claim on the class itself beats all others; then a wrapper's rule beats a schema.
        """
        try:
            return self._found[cls]
        except KeyError:
            found = self._found[cls] = self._search(cls)
            return found

    def _search(self, cls: type) -> Claim | None:
        own = self.claims.get(class_name(cls))
        if own is not None:
            return own
        if any(self.aliases(cls)):
            return None  # claimed, but under another name: what a base holds is not what was meant
        bases = (self.claims.get(class_name(base)) for base in cls.__mro__[1:])
        near = list(takewhile(lambda claim: not claim.record.exact, (claim for claim in bases if claim)))
        rules = [claim for claim in near if isinstance(claim.record, UnwrapRule)]
        return next(iter(rules or near), None)

    def aliases(self, cls: type) -> Iterator[str]:
        """Yield the claimed names under which a class can be imported, other than its own.

        Only modules that are imported already are looked at.
        """
        for target in self.claims:
            module, _, name = target.rpartition(".")
            if name == cls.__name__ and getattr(sys.modules.get(module), name, None) is cls:
                yield target


def class_name(cls: type[Any]) -> str:
    """Return the dotted name under which a class is claimed."""
    return f"{cls.__module__}.{cls.__qualname__}"


def _winner(target: str, claims: list[Claim]) -> Claim:
    if not isinstance(claims[0].record, Record) and all(one.record == claims[0].record for one in claims):
        return claims[0]
    overriding = [claim for claim in claims if claim.record.override]
    winners = sorted(overriding or claims, key=lambda claim: claim.provider.distribution != "miles-reset")
    if len(winners) == 1:
        return winners[0]
    last = winners[-1].provider.plugin
    raise ConflictError(
        target,
        [str(claim.provider) for claim in winners],
        [claim.provider.plugin for claim in winners],
        f"Both set override=True. Leave it out in one, or disable one with MILES_RESET_DISABLE={last}."
        if overriding
        else "",
    )
