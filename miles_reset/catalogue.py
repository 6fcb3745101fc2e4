"""What plugins declare, for a terminal and as plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from miles_reset.checkpoint.reader import CheckpointReader, SafeGlobal
from miles_reset.libraries import Resolved, Status
from miles_reset.registry import Claim, Provider, Record, Registry
from miles_reset.scheduler import SchedulerRule
from miles_reset.wrapper import UnwrapRule

Resolutions = Mapping[str, Resolved]


def claims_of(registry: Registry, provider: Provider) -> dict[str, Claim]:
    """Return what one plugin claims, by class."""
    return {target: claim for target, claim in registry.claims.items() if claim.provider == provider}


def others_of(registry: Registry, provider: Provider) -> list[str]:
    """Say what one plugin declares that is about no optimizer: formats, scheduler rules, safe globals."""
    said = []
    for kind, what in (
        (CheckpointReader, "reads"),
        (SchedulerRule, "scheduler rules"),
        (SafeGlobal, "safe globals"),
    ):
        claims = registry.table(kind).items()
        if targets := [target for target, claim in claims if claim.provider == provider]:
            shown = ", ".join(targets) if kind is CheckpointReader else str(len(targets))
            said.append(f"{what} {shown}" if kind is CheckpointReader else f"{shown} {what}")
    return said


def _kind(record: Record) -> str:
    return "unwrap rule" if isinstance(record, UnwrapRule) else "schema"


def plugins_table(
    claims: Mapping[Provider, Mapping[str, Claim]], resolved: Resolutions, registry: Registry
) -> RenderableType:
    """Draw a table of plugins: a line each, with counts of what they claim."""
    table = Table("plugin", "distribution", "version", "schemas", "rules", "classes claimed, and more")
    for provider, claimed in claims.items():
        kinds = Counter(_kind(claim.record) for claim in claimed.values())
        found = [f"{len(targets)} {detail}" for detail, targets in _by_detail(claimed, resolved)]
        found += others_of(registry, provider)
        counts = (str(kinds[kind]) for kind in ("schema", "unwrap rule"))
        table.add_row(provider.plugin, provider.distribution, provider.version, *counts, "\n".join(found))
    return table


def plugin_list(
    provider: Provider, claims: Mapping[str, Claim], resolved: Resolutions, registry: Registry
) -> RenderableType:
    """List what one plugin claims, a line each: print it with ``soft_wrap``, for names are long."""
    lines = [Text(str(provider), style="bold")]
    for detail, targets in _by_detail(claims, resolved):
        lines.append(Text(f"  {detail}", style="green" if detail == Status.OK else "yellow"))
        for target in targets:
            kind = _kind(claims[target].record)
            lines.append(Text(f"    {target}" if kind == "schema" else f"    {target} ({kind})"))
    lines += (Text(f"  {said}", style="green") for said in others_of(registry, provider))
    return Group(*lines)


def _by_detail(targets: Iterable[str], resolved: Resolutions) -> Iterator[tuple[str, list[str]]]:
    """Yield each answer, first that a class is there, with the names that got it."""
    found: dict[str, list[str]] = {Status.OK: []}
    for target in targets:
        found.setdefault(resolved[target].detail, []).append(target)
    return (item for item in found.items() if item[1])


def plugin_dict(
    provider: Provider, claims: Mapping[str, Claim], resolved: Resolutions, registry: Registry
) -> dict[str, Any]:
    """Return a plugin, and what it claims, as plain data."""
    return {
        "name": provider.plugin,
        "distribution": provider.distribution,
        "version": provider.version,
        "claims": [
            {
                "target": target,
                "kind": _kind(claim.record),
                "status": resolved[target].status,
                "detail": resolved[target].detail,
            }
            for target, claim in claims.items()
        ],
        "others": others_of(registry, provider),
    }


def render_claim(claim: Claim) -> RenderableType:
    """Draw a schema, or an unwrap rule, as a table."""
    record = claim.record
    table = Table()
    for name in ("slot", "role", "lives in", "fresh value"):
        table.add_column(name)
    for slot in record.slots:
        fresh = "" if slot.initial is None else str(slot.initial)
        table.add_row(*map(Text, (slot.key, slot.role, slot.at, fresh)))
    return Group(
        Text(record.target, style="bold cyan"),
        Text(f"{_kind(record)} of {claim.provider}"),
        table if record.slots else Text("no slots of its own", style="dim"),
        *map(Text, _remarks(record)),
    )


def _remarks(record: Record) -> Iterator[str]:
    """Say what a record says beside its slots."""
    if isinstance(record, UnwrapRule):
        where = f"in its {record.children!r}" if isinstance(record.children, str) else "by a function"
        yield f"What it holds is found {where}."
        if record.stale_groups:
            how = {"delete": "deleted", "set": "set to fresh"}[record.stale_groups]
            yield f"In its own groups, what a leaf below declares is {how}."
        if record.refresh_masters:
            yield "Its master weights can be refreshed from the weights."
    if record.ready:
        yield "It is asked first whether its state can be written now."
    if record.override:
        yield "It wins over other claims on this class."
    yield (
        "Subclasses are left out."
        if record.exact
        else "It holds for subclasses that have no claim of their own."
    )


def claim_dict(claim: Claim) -> dict[str, Any]:
    """Return a schema, or an unwrap rule, as plain data."""
    record, provider = claim.record, claim.provider
    data: dict[str, Any] = {
        "target": record.target,
        "kind": _kind(record),
        "plugin": provider.plugin,
        "distribution": provider.distribution,
        "version": provider.version,
        "slots": [
            {
                "key": slot.key,
                "role": slot.role,
                "at": slot.at,
                "fresh": None if slot.initial is None else str(slot.initial),
            }
            for slot in record.slots
        ],
        "has_ready": record.ready is not None,
        "exact": record.exact,
        "override": record.override,
    }
    if isinstance(record, UnwrapRule):
        data |= {
            "children": record.children if isinstance(record.children, str) else None,
            "stale_groups": record.stale_groups,
            "refreshes_masters": record.refresh_masters is not None,
        }
    return data
