"""What a benchmark found: a ratio, held against a bound, as a row of a table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Ratio:
    """One measured case.

    Attributes:
        case: What was measured.
        against: What it is compared with.
        yardstick: How long that takes, in seconds.
        ours: How long the case takes, in seconds.
        bound: What the ratio may be at most.
        aim: What the ratio should be, where that is less.
    """

    case: str
    against: str
    yardstick: float
    ours: float
    bound: float
    aim: float | None = None

    @property
    def value(self) -> float:
        """Ours, measured with the yardstick."""
        return self.ours / self.yardstick

    @property
    def holds(self) -> bool:
        """Whether the ratio is within its bound."""
        return self.value <= self.bound

    @property
    def verdict(self) -> str:
        """Say in a word or two how the ratio stands to its bound, and to its aim."""
        if not self.holds:
            return "OVER"
        if self.aim is None:
            return "ok"
        return f"ok, aim {self.aim:.2f} {'met' if self.value <= self.aim else 'missed'}"


HEAD = ("case", "against", "its ms", "ours ms", "ratio", "bound", "verdict")
ALIGN = ("<", "<", ">", ">", ">", ">", "<")


def table(ratios: Iterable[Ratio]) -> Iterator[str]:
    """Yield the lines of a table, which reads as text and as Markdown."""
    body = [
        (
            ratio.case,
            ratio.against,
            f"{ratio.yardstick * 1e3:.2f}",
            f"{ratio.ours * 1e3:.2f}",
            f"{ratio.value:.2f}",
            f"{ratio.bound:.2f}",
            ratio.verdict,
        )
        for ratio in ratios
    ]
    widths = [max(map(len, column)) for column in zip(HEAD, *body, strict=True)]
    rule = ["-" * (width - 1) + {"<": "-", ">": ":"}[side] for width, side in zip(widths, ALIGN, strict=True)]
    for row in (HEAD, rule, *body):
        cells = [f"{cell:{side}{width}}" for cell, side, width in zip(row, ALIGN, widths, strict=True)]
        yield f"| {' | '.join(cells)} |"
