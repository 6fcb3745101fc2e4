"""What each way to reset leads to, as a table and as a chart."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from miles_reset.demo.resuming import SAVED_AT, UNINTERRUPTED, Resumed
from miles_reset.demo.ways import LEFT, RIGHT, WAYS, Outcome

# One a way; the colour-blind can tell them apart, and lines that cover each other show.
_LOOKS: dict[str, dict[str, Any]] = dict(
    zip(
        WAYS,
        (
            {"color": "#8FD6BE", "linewidth": 8, "solid_capstyle": "round"},
            {"color": "#555555", "linewidth": 1.8, "linestyle": (0, (1, 1.2))},
            {"color": "#E8833A", "linewidth": 4.5},
            {"color": "#0B5FA5", "linewidth": 1.6, "marker": "s", "markersize": 3.5},
            {"color": "#B0407E", "linewidth": 1.4, "linestyle": (0, (4, 3))},
        ),
        strict=True,
    )
)


def table(outcomes: Sequence[Outcome]) -> Table:
    """Draw the next update of each optimizer after each way to reset."""
    drawn = Table(box=box.SIMPLE, header_style="bold", show_edge=False)
    drawn.add_column("way to reset", no_wrap=True)
    for name in _optimizers(outcomes):
        drawn.add_column(name, justify="right")
    for way in WAYS:
        cells = [_cell(outcome) for outcome in outcomes if outcome.way == way]
        drawn.add_row(Text(way, style="bold" if way == RIGHT else ""), *cells)
    return drawn


def _cell(outcome: Outcome) -> Text:
    if outcome.degrees is None:
        return Text(outcome.error, style="red")
    if outcome.same:
        return Text("1, same bits" if outcome.in_place else "1, new tensors", style="green")
    turned = f", {outcome.degrees:.0f}° off" if outcome.degrees >= 1 else ""
    return Text(f"{outcome.sizes[0]:.2f}{turned}", style="red")


def draw(outcomes: Sequence[Outcome], path: Path) -> bool:
    """Draw the size of the next updates into a PNG file; say whether matplotlib is there to do it."""
    log = logging.getLogger("matplotlib.font_manager")  # says that it builds a cache, the first time
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    finally:
        log.setLevel(level)
    figure = Figure(figsize=(10, 6.8), dpi=140, layout="constrained")
    names = _optimizers(outcomes)
    panels = figure.subplots(-(-len(names) // 2), 2, sharex=True, sharey=True, squeeze=False)
    for panel, name in zip(panels.flat, names, strict=False):
        _panel(panel, name, [outcome for outcome in outcomes if outcome.optimizer == name])
    for panel in panels[-1]:
        panel.set_xlabel("step after the reset")
    figure.suptitle("Size of the next updates, beside those of a freshly built optimizer", fontsize=13)
    figure.legend(
        *panels.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False
    )
    figure.savefig(path, format="png")
    return True


def rates_table(resumed: Resumed) -> Table:
    """Draw the learning rates of some steps after a resume, by way to resume."""
    drawn = Table(box=box.SIMPLE, header_style="bold", show_edge=False)
    drawn.add_column("rate at step", no_wrap=True)
    at = (0, 1, 10, 25, 40)
    for step in at:
        drawn.add_column(str(SAVED_AT + step), justify="right")
    right = resumed.rates[UNINTERRUPTED]
    for way, rates in resumed.rates.items():
        style = "" if way == UNINTERRUPTED else "green" if rates == right else "red"
        drawn.add_row(way, *(Text(f"{rates[step]:.4f}", style) for step in at))
    return drawn


def draw_rates(resumed: Resumed, path: Path) -> bool:
    """Draw the learning rate after a resume into a PNG file; say whether matplotlib is there to do it."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(8, 4.2), dpi=140, layout="constrained")
    panel = figure.subplots()
    for (way, rates), look in zip(resumed.rates.items(), _LOOKS.values(), strict=False):
        panel.plot(range(SAVED_AT, SAVED_AT + len(rates)), rates, label=way, **look)
    panel.set_xlabel("step")
    panel.set_title("Learning rate after a resume without the optimizer", loc="left", fontsize=11)
    panel.grid(axis="y", color="#E4E4E4", linewidth=0.8)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False)
    figure.savefig(path, format="png")
    return True


def _panel(panel: Any, name: str, outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        steps = range(1, len(outcome.sizes) + 1)
        panel.plot(steps, outcome.sizes, label=outcome.way, **_LOOKS[outcome.way])
        if outcome.way == LEFT and outcome.degrees is not None:
            turned = f"left as it is, the first points {outcome.degrees:.0f}° off"
            panel.set_title(turned, loc="right", fontsize=9, color="#555555")
            panel.set_xticks([1, *steps[4::5]])
    panel.set_title(name, loc="left", fontsize=11, fontweight="bold")
    panel.set_yscale("log", subs=())
    panel.set_yticks(ticks := [0.1, 0.3, 1, 3, 10, 30], [f"{tick:g}x" for tick in ticks])
    panel.grid(axis="y", color="#E4E4E4", linewidth=0.8)
    panel.spines[["top", "right"]].set_visible(False)


def _optimizers(outcomes: Sequence[Outcome]) -> list[str]:
    return list(dict.fromkeys(outcome.optimizer for outcome in outcomes))
