"""Policies, checkpoints and previews, as the command line shows them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.filesize import decimal
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from miles_reset.checkpoint.saved import Checkpoint, Presence, Saved, tensors_of
from miles_reset.policy import PARTS, PRESETS, ResumePolicy, decide
from miles_reset.receipt import PartLine

_COLOURS = {"restore": "green", "reset": "yellow", "fresh": "cyan", "set": "green", "refuse": "red"}


def preview(policy: ResumePolicy, checkpoint: Checkpoint) -> list[PartLine]:
    """Return what a policy does with each part, where all live parts are there."""
    lines = []
    for name in dict.fromkeys([*PARTS, *policy.extras]):
        saved, action = checkpoint.part(name), policy.action(name)
        verdict = decide(action, saved.presence, live=True, chosen=True)
        what = saved.where if saved.there else str(saved.presence)
        if verdict.outcome == "fresh" and name not in ("optimizer", "scheduler", "iteration", "rng"):
            verdict = verdict._replace(reason=f"{verdict.reason}; nothing, where there is no live one")
        lines.append(PartLine(name, what, str(action), policy.chosen_by(name), *verdict))
    return lines


def preview_table(lines: Sequence[PartLine], path: str, checkpoint: Checkpoint) -> Table:
    """Return a preview as a table, under the path and the iteration that was saved."""
    saved = checkpoint.part("iteration")
    count = f", saved at {checkpoint.iteration_unit or 'iteration'} {saved.read()}" if saved.there else ""
    table = Table("part", "action", "outcome", "why", title=f"{path}{count}", title_justify="left")
    for line in lines:
        part, action, outcome, why = line.cells()
        table.add_row(part, action, Text(outcome, _COLOURS.get(outcome, "")), Text(why))
    return table


def policy_table(policy: ResumePolicy) -> Table:
    """Return a policy's choices, and who made each."""
    table = Table("key", "value", "chosen by")
    for key, value in policy.model_dump().items():
        table.add_row(key, Text(_toml(value)), policy.chosen_by(key))
    return table


def presets_table() -> Table:
    """Return the named policies."""
    table = Table("preset", "what it is for", "choices")
    for name, (what, chosen) in PRESETS.items():
        table.add_row(
            name, what, Text(", ".join(f"{part} = {action}" for part, action in chosen.items()) or "none")
        )
    return table


def as_toml(policy: ResumePolicy, what: str) -> str:
    """Return the choices of a policy as a file to start from."""
    chosen = policy.model_dump(exclude_unset=True)
    return "".join(
        [f"# {what}\n", "version = 1\n", *(f"{key} = {_toml(value)}\n" for key, value in chosen.items())]
    )


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return (
            "{" + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items() if item is not None) + "}"
        )
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return "not set" if value is None else json.dumps(value)


def checkpoint_tree(checkpoint: Checkpoint) -> Tree:
    """Return what a checkpoint holds as a tree: parts, sizes, counts, and what is absent and how."""
    world = f", saved by {checkpoint.world_size} ranks" if checkpoint.world_size else ""
    tree = Tree(Text(f"{checkpoint.path}: {checkpoint.format}{world}", "bold"))
    for name, value in {**checkpoint.layout, **checkpoint.facts}.items():
        tree.add(Text(f"{name}: {value}", "dim"))
    unit = f" ({checkpoint.iteration_unit})" if checkpoint.iteration_unit else ""
    table = Table("part", "where", "size", "content")
    for name, saved in checkpoint.parts.items():
        what = _content(saved) + (unit if name == "iteration" and saved.there else "")
        style = "" if saved.there else "red" if saved.presence is Presence.TORN else "dim"
        cells = (name, saved.where, decimal(saved.nbytes) if saved.nbytes else "", what)
        table.add_row(*map(Text, cells), style=style)
    tree.add(table)
    return tree


def _content(saved: Saved) -> str:
    if not saved.there:
        return saved.detail or str(saved.presence)
    content = saved.read()
    if isinstance(content, (bool, int, float, str)):
        return str(content)[:60]
    steps = sorted({int(step) for step in _steps(content)})
    span = dict.fromkeys([steps[0], steps[-1]] if steps else [])
    counted = f", step {' to '.join(map(str, span))}" if span else ""
    if tensors := sum(1 for _ in tensors_of(content)):
        return f"{tensors:,} tensors{counted}"
    if isinstance(content, Mapping):
        return _schedule(content) or ", ".join(map(str, content))[:60]
    return type(content).__name__


def _schedule(content: Mapping[Any, Any]) -> str:
    """Say how far a saved scheduler was, and at what rate."""
    said = [f"{key} {content[key]}" for key in ("last_epoch", "num_steps") if key in content]
    rates = content.get("_last_lr")
    if said and isinstance(rates, list):
        said.append(f"rate {', '.join(f'{float(rate):.6g}' for rate in dict.fromkeys(rates))}")
    return ", ".join(said)


def _steps(content: Any) -> list[Any]:
    """Return the step counts in a saved optimizer: scalars, so that little is read."""
    state = content.get("state") if isinstance(content, Mapping) else None
    entries = state.values() if isinstance(state, Mapping) else ()
    found = (entry.get("step") for entry in entries if isinstance(entry, Mapping))
    return [step for step in found if step is not None]
