"""A plan or a report as lines and as a table."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from miles_reset.draft import Row
from miles_reset.schema import Slot

FOLD = 4
"""More leaves than this that are alike share one line of a table."""


class Line(NamedTuple):
    """What becomes of one slot of one leaf, or of one wrapper.

    Attributes:
        path: Where it stands.
        key: The slot's key.
        at: Where the slot lives: state, named, group, attribute or child.
        role: What it is for.
        fresh: What a fresh optimizer holds there; empty for what is kept.
        outcome: What is done, or why nothing is.
        values: The number of tensors, numbers or other objects under the key.
        plugin: Whose record says so.
    """

    path: str
    key: str
    at: str
    role: str
    fresh: str
    outcome: str
    values: int
    plugin: str


def lines(rows: Iterable[Row]) -> tuple[Line, ...]:
    """Spread rows out, one line for each leaf, in the order of the leaves."""
    found: dict[int, list[Line]] = {}
    for row in rows:
        slot, counts = row.slot, Counter(map(id, row.nodes))
        for node in {id(node): node for node in row.nodes}.values():
            fresh = "" if row.initial is None else str(row.initial)
            found.setdefault(id(node), []).append(
                Line(
                    node.path, slot.key, str(slot.at), str(slot.role), fresh, str(row.outcome),
                    counts[id(node)], node.claim.provider.plugin,
                )
            )  # fmt: skip
    return tuple(line for of_one in found.values() for line in of_one)


def fold(of_leaves: Sequence[Line]) -> Iterator[Line]:
    """Merge the lines of many leaves that are alike; their path then reads ``[*]``."""
    alike: dict[tuple[str, ...], list[Line]] = {}
    for line in of_leaves:
        pattern = re.sub(r"\[[^\]]*\]", "[*]", line.path)
        alike.setdefault((pattern, *line[1:6], line.plugin), []).append(line)
    for (pattern, *_), same in alike.items():
        if len(same) <= FOLD:
            yield from same
        else:
            path = f"{pattern} ({len(same):,} alike)"
            yield same[0]._replace(path=path, values=sum(line.values for line in same))


def table(of_leaves: Sequence[Line]) -> Iterator[str]:
    """Yield a table, leaf by leaf, as text."""
    folded = list(fold(of_leaves))
    if not folded:
        return
    cells = [("slot", "role", "fresh value", "outcome", "values")]
    cells += [(place(line), line.role, line.fresh, line.outcome, f"{line.values:,}") for line in folded]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    aligned = ["  ".join(map(str.ljust, cell, widths)).rstrip() for cell in cells]
    yield f"  {aligned[0]}"
    pairs = zip(folded, aligned[1:], strict=True)
    for path, of_path in groupby(pairs, key=lambda pair: pair[0].path):
        yield path
        for _, row in of_path:
            yield f"  {row}"


def place(line: Line | Slot) -> str:
    """Return a slot's key, and where it lives unless that is the state."""
    return line.key if line.at == "state" else f"{line.key} ({line.at})"
