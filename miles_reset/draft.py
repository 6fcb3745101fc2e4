"""A plan while it is made: what becomes of each slot, and what is written where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from miles_reset.batch import Batch, Found
from miles_reset.schema import Initial, Kind, Role, Slot
from miles_reset.values import NUMBERS, PLAIN_TENSORS, How, Write, check_number, named_dtype, plan_value
from miles_reset.walk import Node


class Row(NamedTuple):
    """What becomes of one slot in the leaves of one batch.

    Attributes:
        slot: The slot.
        initial: Its value in a fresh optimizer, as decided for these leaves.
        outcome: What is done, or why nothing is.
        nodes: The leaf, or wrapper, of each value.
    """

    slot: Slot
    initial: Initial | None
    outcome: str
    nodes: Sequence[Node]


@dataclass
class Draft:
    """The rows and writes of a plan.

    Attributes:
        rows: What becomes of each slot.
        writes: What is written where.
        left_alone: Path and reason for each thing that is not reset.
        weights: Parameters, and whatever else is kept: no write may reach into them.
        grown: Tensors that carry an autograd graph, in differentiable optimizers; they let go of it.
        found: The values, slot by slot, that the plan was made from.
    """

    rows: list[Row] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    left_alone: list[tuple[str, str]] = field(default_factory=list)
    weights: list[torch.Tensor] = field(default_factory=list)
    grown: list[torch.Tensor] = field(default_factory=list)
    found: list[Found] = field(default_factory=list)

    def plan_slot(self, slot: Slot, batch: Batch, found: Found) -> None:
        """Plan all values of one slot that stand under one key."""
        if slot.initial is None:
            outcome = "kept" if slot.role is Role.KEPT else "ignored"
            self.rows.append(Row(slot, None, outcome, found.nodes))
            if slot.role is Role.KEPT:
                self.weights += (v for v in found.values if isinstance(v, torch.Tensor))
            return
        self.found.append(found)
        if batch.differentiable:
            for i, value in enumerate(found.values):
                if isinstance(value, torch.Tensor) and value.requires_grad:
                    if value._is_view():
                        raise batch.site(found, i).refusal("is a view within an autograd graph")
                    self.grown.append(value)
        for initial, part in batch.resolved(slot.initial, found):
            write = _write_all_alike(initial, part)
            if write is not None and write.how is How.FILL and initial.value:
                for dtype in set(map(attrgetter("dtype"), part.values)):
                    check_number(initial.value, dtype, batch.site(part, 0))
            if write is None:
                self._plan_each(slot, initial, batch, part)
            else:
                self.writes.append(write)
                self.rows.append(Row(slot, initial, write.how, part.nodes))

    def plan_entries(self, slots: Mapping[Any, Slot], part: Found) -> None:
        """Plan the removal of whole entries, which hold these slots."""
        states = [node.obj.state for node in part.nodes]
        self.writes.append(
            Write(How.REMOVE_ENTRY, part.nodes, states, None, part.containers, part.parameters)
        )
        rows = (Row(slot, Initial.ABSENT_ENTRY, How.REMOVE_ENTRY, part.nodes) for slot in slots.values())
        self.rows += rows

    def _plan_each(self, slot: Slot, initial: Initial, batch: Batch, found: Found) -> None:
        merged: dict[tuple[How, Any, Any], Write] = {}
        nodes: dict[str, list[Node]] = {}
        for i, value in enumerate(found.values):
            outcome = "not made yet"
            for write in plan_value(initial, value, batch.site(found, i)):
                outcome = write.how
                one_for_all = not isinstance(write.new, list)
                like = merged.setdefault((write.how, write.key, write.new if one_for_all else None), write)
                if like is not write:
                    like.nodes += write.nodes
                    like.containers += write.containers
                    like.old += write.old
                    like.new = like.new if one_for_all else like.new + write.new
            nodes.setdefault(outcome, []).append(found.nodes[i])
        self.writes += merged.values()
        self.rows += (Row(slot, initial, outcome, owners) for outcome, owners in nodes.items())


def _write_all_alike(initial: Initial, found: Found) -> Write | None:
    """Return one write for all values where they are of one kind, as they mostly are."""
    types = set(map(type, found.values))
    values = found.values
    if initial.kind is Kind.ABSENT:
        return Write(How.REMOVE, found.nodes, found.containers, found.key, values)
    if initial.kind is not Kind.CONSTANT:
        return None
    if PLAIN_TENSORS.issuperset(types):
        if initial.dtype and {named_dtype(initial.dtype)} != set(map(attrgetter("dtype"), values)):
            return None
        return Write(How.FILL, found.nodes, found.containers, found.key, values, initial.value)
    if len(types) == 1 and NUMBERS.issuperset(types) and initial.value == 0:
        fresh = [types.pop()(initial.value)] * len(values)
        return Write(How.SET, found.nodes, found.containers, found.key, values, fresh)
    return None
