"""What a reset would change, or did: rows counted, folded into lines, and told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from miles_reset.draft import Row
from miles_reset.lines import Line, lines, table
from miles_reset.values import How

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class Account:
    """What a plan and a report have in common.

    Attributes:
        rows: What becomes of each slot; :attr:`lines` has it leaf by leaf.
        leaves: The number of optimizers that own state, or could.
        left_alone: Path and reason for each thing that is not reset.
    """

    rows: Sequence[Row] = field(repr=False)
    leaves: int
    left_alone: tuple[tuple[str, str], ...]

    @property
    def lines(self) -> tuple[Line, ...]:
        """One line for each leaf, slot and outcome."""
        return lines(self.rows)

    @property
    def counts(self) -> dict[str, int]:
        """The number of values by outcome."""
        total: Counter[str] = Counter()
        for row in self.rows:
            total[str(row.outcome)] += len(row.nodes)
        return dict(sorted(total.items()))

    @property
    def changed(self) -> int:
        """The number of values that are reset."""
        written = {str(how) for how in How}
        return sum(n for outcome, n in self.counts.items() if outcome in written)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data, one line for each leaf and slot."""
        return {
            "leaves": self.leaves,
            "values": self.counts,
            "lines": [line._asdict() for line in self.lines],
            "left_alone": [{"path": path, "reason": reason} for path, reason in self.left_alone],
        }

    def __rich__(self) -> RenderableType:
        """Return it as a tree, for ``rich.print``."""
        from miles_reset.render import render

        return render(self)

    def summary(self, verb: str) -> str:
        """Return one sentence: what is, or was, reset."""
        if not self.leaves:
            return f"No optimizer was reached: nothing {verb}."
        leaves = f"{self.leaves:,} optimizer{'s' * (self.leaves != 1)}"
        if not self.changed:
            return f"No state was found in {leaves}: nothing {verb}."
        return f"{self.changed:,} value{'s' * (self.changed != 1)} in {leaves} {verb}."

    def as_table(self, verb: str) -> str:
        """Return the sentence, a table of all lines, and what is left alone."""
        alone = [f"left alone: {path}: {reason}" for path, reason in self.left_alone]
        return "\n".join([self.summary(verb), *table(self.lines), *alone])


@dataclass(frozen=True)
class ResetReport(Account):
    """What a reset did. ``str()`` is a table."""

    def __str__(self) -> str:
        """Return the report as a table."""
        return self.as_table("reset")
