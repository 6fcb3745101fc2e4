"""What a resume would do, or did, part by part, and told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from miles_reset.report import ResetReport


class PartLine(NamedTuple):
    """What becomes of one part.

    Attributes:
        part: Its name.
        saved: What was saved of it.
        action: What the policy says.
        chosen_by: Who says so: the policy, the default, or what was inferred.
        outcome: What is done: restore, fresh, reset, set, skip.
        reason: Why.
    """

    part: str
    saved: str
    action: str
    chosen_by: str
    outcome: str
    reason: str

    def cells(self) -> tuple[str, str, str, str]:
        """Return what a table shows of it."""
        why = f"from {self.saved}" if self.outcome in ("restore", "reset") else self.reason
        return self.part, f"{self.action} ({self.chosen_by})", self.outcome, why


@dataclass(frozen=True)
class Told:
    """What a plan and a report have in common.

    Attributes:
        parts: What becomes of each part.
        iteration: Where the run goes on; None if the policy does not say and nothing was saved.
        unit: What the iteration counts.
        rates: The learning rate of each param group after the resume.
        notes: What is worth knowing besides.
    """

    parts: tuple[PartLine, ...]
    iteration: int | None
    unit: str | None
    rates: tuple[float, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "parts": [line._asdict() for line in self.parts],
            "iteration": self.iteration,
            "unit": self.unit,
            "rates": list(self.rates),
            "notes": list(self.notes),
        }

    def as_table(self, done: str) -> str:
        """Return a sentence, a table of the parts, and the notes."""
        cells = [("part", "action", "outcome", "why"), *(line.cells() for line in self.parts)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        rows = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
        rates = ", ".join(f"{rate:.6g}" for rate in dict.fromkeys(self.rates)) or "not known"
        where = f"{self.unit or 'iteration'} {self.iteration if self.iteration is not None else 'not known'}"
        return "\n".join(
            [f"{done} {where}, learning rate {rates}.", *rows, *(f"note: {n}" for n in self.notes)]
        )


@dataclass(frozen=True)
class ResumeReport(Told):
    """What a resume did: a receipt. ``str()`` is a table.

    Attributes:
        reset: What was reset of the optimizer, if it was.
    """

    reset: ResetReport | None = None

    def __str__(self) -> str:
        """Return the receipt as a table."""
        return self.as_table("resumed at")

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {**super().to_dict(), "reset": self.reset.to_dict() if self.reset else None}
