"""What a reset would change: checks everything, changes nothing.

Leaves of one class under one wrapper are planned together, slot by slot: a wrapper of thousands
of one-parameter optimizers costs little more than one optimizer of thousands of parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from miles_reset.aliasing import check_tensors
from miles_reset.errors import UndeclaredStateError, UnreachableStateError
from miles_reset.registry import Registry
from miles_reset.schema import Initial, Kind, Place, Role, Slot
from miles_reset.values import NUMBERS, PLAIN_TENSORS, How, Site, Write, plan_value, resolve
from miles_reset.walk import Node, Tree
from miles_reset.wrapper import UnwrapRule


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
        grown: Tensors that carry an autograd graph, in differentiable optimizers; they let go of it.
        read: For each slot, the containers, the key and the values that the plan was made from.
        registry: Where objects in the state are looked up.
    """

    registry: Registry
    strict: bool = True
    rows: list[Row] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    left_alone: list[tuple[str, str]] = field(default_factory=list)
    grown: list[torch.Tensor] = field(default_factory=list)
    read: list[tuple[Sequence[Any], Any, list[Any]]] = field(default_factory=list)

    def plan_slot(self, slot: Slot, batch: Batch, found: Found) -> None:
        """Plan all values of one slot that stand under one key."""
        if slot.initial is None:
            outcome = "kept" if slot.role is Role.KEPT else "ignored"
            self.rows.append(Row(slot, None, outcome, found.nodes))
            return
        self.read.append((found.containers, found.key, found.values))
        if batch.differentiable:
            self.grown += (v for v in found.values if isinstance(v, torch.Tensor) and v.requires_grad)
        for initial, part in batch.resolved(slot.initial, found):
            self._plan_values(slot, initial, batch, part)

    def _plan_values(self, slot: Slot, initial: Initial, batch: Batch, found: Found) -> None:
        types = set(map(type, found.values))
        write = Write(How.FILL, found.nodes, found.containers, found.key, found.values, initial.value)
        if initial.kind is Kind.CONSTANT and PLAIN_TENSORS.issuperset(types) and not initial.dtype:
            write.old = list(found.values)
        elif initial.kind is Kind.CONSTANT and len(types) == 1 and NUMBERS.issuperset(types):
            write.how, write.new = How.SET, [types.pop()(initial.value)] * len(found.values)
        elif initial.kind is Kind.ABSENT:
            write.how = How.REMOVE
        else:
            self._plan_each(slot, initial, batch, found)
            return
        self.writes.append(write)
        self.rows.append(Row(slot, initial, write.how, found.nodes))

    def _plan_each(self, slot: Slot, initial: Initial, batch: Batch, found: Found) -> None:
        merged: dict[tuple[How, Any, Any], Write] = {}
        nodes: dict[str, list[Node]] = {}
        for i, value in enumerate(found.values):
            node = found.nodes[i]
            site = Site(
                node,
                found.containers[i],
                found.key,
                *batch.parameter_and_group(found, i),
                self.registry,
            )
            outcome = "not made yet"
            for write in plan_value(initial, value, site):
                outcome = write.how
                one_for_all = not isinstance(write.new, list)
                like = merged.setdefault((write.how, write.key, write.new if one_for_all else None), write)
                if like is not write:
                    like.nodes += write.nodes
                    like.containers += write.containers
                    like.old += write.old
                    like.new = like.new if one_for_all else like.new + write.new
            nodes.setdefault(outcome, []).append(node)
        self.writes += merged.values()
        self.rows += (Row(slot, initial, outcome, owners) for outcome, owners in nodes.items())


class Found(NamedTuple):
    """Values of one key, each with its node, its container and the parameter that it is about."""

    key: Any
    nodes: list[Node]
    containers: list[Any]
    values: list[Any]
    parameters: Sequence[Any]


@dataclass
class Batch:
    """Leaves of one class under one wrapper, or one wrapper that owns something itself."""

    nodes: list[Node]
    foreign: tuple[Slot, ...] = ()

    @property
    def record(self) -> Any:
        """The schema, or the unwrap rule, of all of them."""
        return self.nodes[0].claim.record

    @cached_property
    def groups(self) -> list[tuple[Node, MutableMapping[str, Any]]]:
        """The param groups of all of them."""
        return [(node, group) for node in self.nodes for group in getattr(node.obj, "param_groups", ())]

    @cached_property
    def differentiable(self) -> bool:
        """Whether any of them steps under autograd."""
        return any(group.get("differentiable") for _, group in self.groups)

    @cached_property
    def _group_of(self) -> dict[int, MutableMapping[str, Any]]:
        return {id(parameter): group for _, group in self.groups for parameter in group["params"]}

    def parameter_and_group(self, found: Found, i: int) -> tuple[Any, Any]:
        """Return the parameter that a value is about, if any, and its group, if it is known."""
        if not found.parameters:
            is_group = isinstance(found.containers[i], Mapping) and "params" in found.containers[i]
            return None, found.containers[i] if is_group else None
        parameter = found.parameters[i]
        group = self._group_of.get(id(parameter))
        if (
            group is None and len(found.nodes[i].obj.param_groups) == 1
        ):  # groups that let go of their parameters
            group = found.nodes[i].obj.param_groups[0]
        return parameter if isinstance(parameter, torch.Tensor) else None, group

    def resolved(self, initial: Initial, found: Found) -> Iterator[tuple[Initial, Found]]:
        """Split values by the initial value that their groups and optimizers decide on."""
        if initial.kind not in (Kind.EITHER, Kind.GROUP, Kind.DEFAULT, Kind.IDENTITY):
            yield initial, found
            return
        decided: dict[tuple[int, int], Initial] = {}
        parts: dict[Initial, list[int]] = {}
        for i, node in enumerate(found.nodes):
            parameter, group = self.parameter_and_group(found, i)
            who = (id(node), id(group))
            if who not in decided:
                registry = Registry({})
                decided[who] = resolve(
                    initial, Site(node, found.containers[i], found.key, parameter, group, registry)
                )
            parts.setdefault(decided[who], []).append(i)
        for part, at in parts.items():
            yield part, found if len(parts) == 1 else select(found, at)


def select(found: Found, at: Sequence[int]) -> Found:
    """Return some of the values found."""
    nodes, containers, values, parameters = (
        [column[i] for i in at] if column else []
        for column in (found.nodes, found.containers, found.values, found.parameters)
    )
    return Found(found.key, nodes, containers, values, parameters)


def plan_tree(tree: Tree, registry: Registry, *, strict: bool = True) -> Draft:
    """Plan the reset of all that a walk found, without changing anything.

    Raises:
        UndeclaredStateError: State under a key that no record names (only if ``strict``).
        UnreachableStateError: State that cannot be written now.
        UnsupportedOptimizerState: State that cannot be brought to a fresh value.
    """
    draft = Draft(registry, strict, left_alone=list(tree.left_alone))
    batches: dict[tuple[int, int], list[Node]] = {}
    for leaf in tree.leaves:
        batches.setdefault((id(leaf.claim), id(leaf.parent)), []).append(leaf)
    with_state: list[torch.Tensor] = []
    in_groups: list[torch.Tensor] = []
    for nodes in batches.values():
        foreign = tuple(slot for above in nodes[0].wrappers() for slot in above.claim.record.at(Place.CHILD))
        batch = Batch(nodes, foreign)
        with_state += _plan_state(draft, batch)
        in_groups += (parameter for _, group in batch.groups for parameter in group["params"])
        _plan_rest(draft, batch)
    for node in reversed(tree.wrappers):
        batch = Batch([node])
        if batch.record.at(Place.STATE) or batch.record.at(Place.NAMED):
            with_state += _plan_state(draft, batch)
        _plan_rest(draft, batch)
        _plan_stale_groups(draft, batch, batches.values())
    parameters = in_groups if len(in_groups) >= len(with_state) else [*in_groups, *with_state]
    for write in check_tensors(draft.writes, parameters):
        draft.writes.append(write)
        row = next(row for row in draft.rows if row.slot.matches(write.key))
        draft.rows.append(row._replace(outcome="replaced: one tensor was shared", nodes=write.nodes))
    return draft


def _plan_state(draft: Draft, batch: Batch) -> list[torch.Tensor]:
    """Plan what lives in ``optimizer.state``; return the parameters that have state, or could have."""
    states = [_state(node) for node in batch.nodes]
    keys = [key for state in states for key in state]
    entries = [entry for state in states for entry in state.values()]
    nodes = [node for node, state in zip(batch.nodes, states, strict=True) for _ in state]
    found = Found(None, nodes, entries, [], keys)
    if not (PLAIN_TENSORS.issuperset(map(type, keys)) and set(map(type, entries)) <= {dict}):
        is_entry = list(map(_is_entry, keys, entries))
        _plan_named(draft, batch, select(found, [i for i, yes in enumerate(is_entry) if not yes]))
        found = select(found, [i for i, yes in enumerate(is_entry) if yes])
    shapes = set(map(tuple, found.containers))
    if len(shapes) == 1:
        _plan_entries(draft, batch, shapes.pop(), found)
    else:
        layouts: dict[tuple[Any, ...], list[int]] = {}
        for i, entry in enumerate(found.containers):
            layouts.setdefault(tuple(entry), []).append(i)
        for shape, at in layouts.items():
            _plan_entries(draft, batch, shape, select(found, at))
    return (
        [key for key in found.parameters if isinstance(key, torch.Tensor)]
        if found.parameters is not keys
        else keys
    )


def _plan_entries(draft: Draft, batch: Batch, shape: tuple[Any, ...], found: Found) -> None:
    """Plan entries that have the same keys."""
    slots = {key: batch_slot(batch, key) for key in shape}
    if missing := [key for key, slot in slots.items() if slot is None]:
        _undeclared(draft, batch, found.nodes[0], missing)
    guarded = [slot for slot in slots.values() if slot is not None and slot.initial == Initial.ABSENT_ENTRY]
    if guarded:
        states = [node.obj.state for node in found.nodes]
        draft.writes.append(
            Write(How.REMOVE_ENTRY, found.nodes, states, None, found.containers, found.parameters)
        )
        draft.rows += (
            Row(slot, Initial.ABSENT_ENTRY, How.REMOVE_ENTRY, found.nodes) for slot in slots.values() if slot
        )
        return
    for key, slot in slots.items():
        if slot is not None:
            values = list(map(itemgetter(key), found.containers))
            draft.plan_slot(slot, batch, found._replace(key=key, values=values))


def _plan_named(draft: Draft, batch: Batch, found: Found) -> None:
    """Plan state under keys that are not parameters."""
    for node, key, value in zip(found.nodes, found.parameters, found.containers, strict=True):
        slot = batch_slot(batch, key, Place.NAMED)
        if slot is None:
            _undeclared(draft, batch, node, [key])
        else:
            draft.plan_slot(slot, batch, Found(key, [node], [node.obj.state], [value], ()))


def _plan_rest(draft: Draft, batch: Batch) -> None:
    """Plan what lives in param groups and attributes."""
    record = batch.record
    for slot in record.at(Place.GROUP):
        held = [(node, group) for node, group in batch.groups if slot.key in group]
        _plan_held(draft, batch, slot, slot.key, held)
    for slot in record.at(Place.ATTRIBUTE):
        *owners, name = slot.key.split(".")
        held = []
        for node in batch.nodes:
            owner = node.obj
            for step in owners:
                owner = getattr(owner, step, None)
            if name in getattr(owner, "__dict__", {}):
                held.append((node, vars(owner)))
        _plan_held(draft, batch, slot, name, held)


def _plan_stale_groups(draft: Draft, batch: Batch, leaves: Iterable[list[Node]]) -> None:
    """Plan the entries of a wrapper's own groups that it would copy down to its children."""
    rule: UnwrapRule = batch.record
    if rule.stale_groups is None:
        return
    wrapper = batch.nodes[0]
    below = [nodes for nodes in leaves if wrapper in nodes[0].wrappers()]
    shared = {id(group) for node in chain.from_iterable(below) for group in node.obj.param_groups}
    slots = {slot.key: slot for nodes in below for slot in nodes[0].claim.record.at(Place.GROUP)}
    for key, slot in slots.items():
        held = [(node, group) for node, group in batch.groups if key in group and id(group) not in shared]
        initial = Initial.ABSENT if rule.stale_groups == "delete" else slot.initial
        if slot.initial is not None:
            _plan_held(draft, batch, Slot(key, slot.role, initial, Place.GROUP), key, held)


def _plan_held(
    draft: Draft,
    batch: Batch,
    slot: Slot,
    key: str,
    held: list[tuple[Node, MutableMapping[str, Any]]],
) -> None:
    if held:
        nodes, containers = map(list, zip(*held, strict=True))
        values = [container[key] for container in containers]
        draft.plan_slot(slot, batch, Found(key, nodes, containers, values, ()))


def batch_slot(batch: Batch, key: Any, place: Place = Place.STATE) -> Slot | None:
    """Return the slot that a key belongs to: of the wrappers above first, then of the leaf itself."""
    candidates = (*batch.foreign, *batch.record.at(place))
    exact = [slot for slot in candidates if slot.key == key]
    return next(iter(exact or [slot for slot in candidates if slot.matches(key)]), None)


def _undeclared(draft: Draft, batch: Batch, node: Node, keys: Sequence[Any]) -> None:
    names = sorted(map(str, keys))
    if not draft.strict:
        draft.left_alone.append((node.path, "not declared: " + ", ".join(map(repr, names))))
        return
    record = node.claim.record
    declared = ", ".join(repr(slot.key) for slot in record.slots) or "nothing"
    raise UndeclaredStateError(
        node.path, names, record.target, provider=str(node.claim.provider), declared=declared
    )


def _state(node: Node) -> Mapping[Any, Any]:
    try:
        state: Mapping[Any, Any] = node.obj.state
    except AttributeError as error:
        raise UnreachableStateError(node.path, f"it has no state: {error}.") from error
    return state


def _is_entry(key: object, value: object) -> bool:
    """Tell a parameter's entry from state under a name: DeepSpeed keys entries by numbers."""
    return isinstance(value, MutableMapping) and (isinstance(key, torch.Tensor) or type(key) is int)
