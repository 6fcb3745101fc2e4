"""Plans and reports as trees for a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from miles_reset.lines import FOLD, Line, fold, place

_COLUMNS = ("slot", "role", "fresh value", "outcome", "values")
_UNTOUCHED = frozenset({"kept", "ignored", "not made yet"})
_LABEL = re.compile(r"\[[^\]]*\]")
_STEP = re.compile(r"([^.\[\]]+)(?:\[([^\]]*)\])?")


@dataclass
class _Place:
    """One node of the tree: its slots, its remarks, and what is below it."""

    slots: list[Line] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    below: dict[str, _Place] = field(default_factory=dict)

    def at(self, path: str) -> _Place:
        """Return the place at a path, made where it is not there yet."""
        at, label = self, ""
        for name, label_below in _STEP.findall(path):
            at = at.below.setdefault(f"[{label}] {name}" if label else name, _Place())
            label = label_below
        return at


class Account(Protocol):
    """What a plan and a report have in common; ``str()`` of one begins with its summary."""

    @property
    def lines(self) -> Sequence[Line]:
        """One line for each leaf, slot and outcome."""

    @property
    def left_alone(self) -> Sequence[tuple[str, str]]:
        """Path and reason for each thing that is not reset."""


def render(account: Account) -> RenderableType:
    """Draw a plan or a report as a tree: wrappers and leaves, and with each its slots.

    Many leaves that are alike share one node; its label then reads ``[*]``.
    """
    root = _Place()
    folded = list(fold(account.lines))
    for line in folded:
        root.at(line.path).slots.append(line)
    for path, reason in _fold_remarks(account.left_alone):
        root.at(path).remarks.append(reason)
    cells = [_COLUMNS, *map(_cells, folded)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    tree = Tree(Text(str(account).partition("\n")[0], style="bold"), guide_style="dim")
    _grow(tree, root, widths, headed=False)
    return tree


def _fold_remarks(left_alone: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    alike: dict[tuple[str, str], list[str]] = {}
    for path, reason in left_alone:
        alike.setdefault((_LABEL.sub("[*]", path), reason), []).append(path)
    for (pattern, reason), paths in alike.items():
        if len(paths) <= FOLD:
            yield from ((path, reason) for path in paths)
        else:
            yield f"{pattern} ({len(paths):,} alike)", reason


def _cells(line: Line) -> tuple[str, ...]:
    return place(line), line.role, line.fresh, line.outcome, f"{line.values:,}"


def _grow(tree: Tree, above: _Place, widths: Sequence[int], headed: bool) -> bool:
    """Add what is below a place to a tree; say whether the columns have been named by now."""
    for step, below in above.below.items():
        label: list[RenderableType] = [Text(step, style="cyan")]
        if below.slots:
            label.append(_slots(below.slots, widths, not headed))
            headed = True
        label += (Text(f"left alone: {remark}", style="yellow") for remark in below.remarks)
        headed = _grow(tree.add(Group(*label)), below, widths, headed)
    return headed


def _slots(lines: Iterable[Line], widths: Sequence[int], header: bool) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=header, header_style="dim")
    for name, width in zip(_COLUMNS, widths, strict=True):
        table.add_column(name, min_width=width, justify="right" if name == "values" else "left")
    for line in lines:
        table.add_row(*map(Text, _cells(line)), style="dim" if line.outcome in _UNTOUCHED else "")
    return table
