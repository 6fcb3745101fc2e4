"""What a reset would change: checks everything, changes nothing.

Leaves of one class under one wrapper are planned together, slot by slot: a wrapper of thousands
of one-parameter optimizers costs little more than one optimizer of thousands of parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from itertools import chain, repeat
from operator import is_, itemgetter, methodcaller
from typing import Any

import torch

from miles_reset.aliasing import check_tensors
from miles_reset.batch import Batch, Found
from miles_reset.draft import Draft
from miles_reset.errors import ResetError, UndeclaredStateError, UnreachableStateError
from miles_reset.registry import Registry
from miles_reset.schema import Initial, Place, Slot
from miles_reset.values import PLAIN_TENSORS, Site
from miles_reset.walk import Node, Tree
from miles_reset.wrapper import UnwrapRule


def plan_tree(tree: Tree, registry: Registry, *, strict: bool = True, draft: Draft | None = None) -> Draft:
    """Plan the reset of all that a walk found, without changing anything.

    Args:
        tree: What the walk found.
        registry: Where classes are looked up.
        strict: Whether an undeclared key is an error; otherwise it is left alone and listed.
        draft: What the plan is written into; an empty one that takes all, by default.

    Raises:
        UndeclaredStateError: State under a key that no record names (only if ``strict``).
        UnreachableStateError: State that cannot be written now.
        UnsupportedOptimizerState: State that cannot be brought to a fresh value.
    """
    draft = Draft() if draft is None else draft
    draft.left_alone += tree.left_alone
    batches = _alike(tree.leaves)
    for nodes in batches:
        _plan_leaves(draft, nodes, registry, strict)
    for node in reversed(tree.wrappers):
        batch = Batch([node], registry)
        with _readable(node):
            if batch.record.at(Place.STATE) or batch.record.at(Place.NAMED):
                _plan_state(draft, batch, strict)
            _plan_rest(draft, batch)
            _plan_stale_groups(draft, batch, batches)
    for write in check_tensors(draft.writes, draft.weights):
        draft.writes.append(write)
        of_node = [row for row in draft.rows if write.nodes[0] in row.nodes]
        row = next((row for row in of_node if row.slot.matches(write.key)), of_node[0])
        draft.rows.append(row._replace(outcome="replaced: one tensor was shared", nodes=write.nodes))
    return draft


def _plan_leaves(draft: Draft, nodes: list[Node], registry: Registry, strict: bool) -> None:
    foreign = tuple(slot for above in nodes[0].wrappers() for slot in above.claim.record.at(Place.CHILD))
    batch = Batch(nodes, registry, foreign)
    try:
        with _readable(nodes[0]):
            _plan_state(draft, batch, strict)
            _plan_rest(draft, batch)
    except UnreachableStateError:
        if len(nodes) > 1:
            for node in nodes:  # one by one, to say which it is
                _plan_leaves(Draft(), [node], registry, strict)
        raise


@contextmanager
def _readable(node: Node) -> Iterator[None]:
    """Say whose state it was that could not be read, whatever went wrong with it."""
    try:
        yield
    except ResetError:
        raise
    except Exception as error:
        raise UnreachableStateError(node.path, f"what it holds cannot be read: {error!r}.") from error


def _alike(leaves: list[Node]) -> list[list[Node]]:
    """Split leaves by their record and the wrapper that holds them."""
    batches: dict[tuple[int, int], list[Node]] = {}
    claim = parent = nodes = None
    for leaf in leaves:
        if nodes is None or leaf.claim is not claim or leaf.parent is not parent:
            claim, parent = leaf.claim, leaf.parent
            nodes = batches.setdefault((id(claim), id(parent)), [])
        nodes.append(leaf)
    return list(batches.values())


def _plan_state(draft: Draft, batch: Batch, strict: bool) -> None:
    """Plan what lives in ``optimizer.state``."""
    try:
        states: list[Mapping[Any, Any]] = [node.obj.state for node in batch.nodes]
    except Exception as error:
        path = batch.nodes[0].path
        raise UnreachableStateError(path, f"it does not give its state: {error!r}.") from error
    for kind in set(map(type, states)):
        if not issubclass(kind, Mapping):
            node = batch.nodes[list(map(type, states)).index(kind)]
            raise UnreachableStateError(node.path, f"its state is a {kind.__name__}.")
    keys = list(chain.from_iterable(states))
    entries = list(chain.from_iterable(map(methodcaller("values"), states)))
    nodes = batch.nodes
    if {*map(len, states)} != {1}:
        nodes = list(chain.from_iterable(map(repeat, nodes, map(len, states))))
    found = Found(None, nodes, entries, [], keys)
    if not (PLAIN_TENSORS.issuperset(map(type, keys)) and set(map(type, entries)) <= {dict}):
        is_entry = list(map(_is_entry, keys, entries))
        named = found.select([i for i, yes in enumerate(is_entry) if not yes])
        for node, key, value in zip(named.nodes, named.parameters, named.containers, strict=True):
            slots = _slots(draft, batch, [key], node, Place.NAMED, strict)
            for slot in slots.values():
                draft.plan_slot(slot, batch, Found(key, [node], [node.obj.state], [value], ()))
        found = found.select([i for i, yes in enumerate(is_entry) if yes])
        keys = [key for key in found.parameters if isinstance(key, torch.Tensor)]
    in_groups = list(chain.from_iterable(map(methodcaller("get", "params", ()), batch.groups)))
    draft.weights += in_groups
    if len(keys) != len(in_groups) or not all(map(is_, keys, in_groups)):
        draft.weights += keys
    for alike, columns in _layouts(found):
        _plan_entries(draft, batch, alike, columns, strict)


def _layouts(found: Found) -> Iterator[tuple[Found, Mapping[Any, list[Any]]]]:
    """Split entries by the keys that they have, and give the values of each key."""
    if not found.containers:
        return
    columns = _columns(found.containers)
    if columns is not None:
        yield found, columns
        return
    layouts: dict[tuple[Any, ...], list[int]] = {}
    for i, entry in enumerate(found.containers):
        layouts.setdefault(tuple(entry), []).append(i)
    for shape, at in layouts.items():
        part = found.select(at)
        yield part, {key: [entry[key] for entry in part.containers] for key in shape}


def _columns(entries: list[Mapping[Any, Any]]) -> dict[Any, list[Any]] | None:
    """Gather the values of each key, if all entries have the same keys."""
    if set(map(type, entries)) != {dict} or len(set(map(len, entries))) > 1:
        return None
    try:
        return {key: list(map(itemgetter(key), entries)) for key in entries[0]}
    except KeyError:
        return None


def _plan_entries(
    draft: Draft, batch: Batch, found: Found, columns: Mapping[Any, list[Any]], strict: bool
) -> None:
    """Plan entries that have the same keys; under a number, an entry of a part of the parameter."""
    for key in [
        key for key, values in columns.items() if type(key) is int and {*map(type, values)} == {dict}
    ]:
        for alike, inside in _layouts(found._replace(containers=columns[key])):
            _plan_entries(draft, batch, alike, inside, strict)
        columns = {other: values for other, values in columns.items() if other != key}
    slots = _slots(draft, batch, list(columns), found.nodes[0], Place.STATE, strict)
    guard = next((slot for slot in slots.values() if slot.initial and slot.initial.may_drop_entry), None)
    if guard is None or guard.initial is None:
        for key, slot in slots.items():
            draft.plan_slot(slot, batch, found._replace(key=key, values=columns[key]))
        return
    for initial, part in batch.resolved(guard.initial, found):
        if initial != Initial.ABSENT_ENTRY:
            for key, slot in slots.items():
                values = [entry[key] for entry in part.containers]
                draft.plan_slot(slot, batch, part._replace(key=key, values=values))
            continue
        _slots(draft, batch, list(columns), part.nodes[0], Place.STATE, strict=True)
        draft.plan_entries(slots, part)


def _plan_rest(draft: Draft, batch: Batch) -> None:
    """Plan what lives in param groups and attributes."""
    record = batch.record
    for slot in record.at(Place.GROUP):
        for key in _keys(slot, record, batch.groups):
            _plan_held(draft, batch, slot, key, batch.groups_with(key))
    for slot in record.at(Place.ATTRIBUTE):
        *owners, name = slot.key.split(".")
        held = []
        for node in batch.nodes:
            owner = node.obj
            for step in owners:
                owner = getattr(owner, step, None)
            if name in getattr(owner, "__dict__", {}):
                held.append((node, vars(owner)))
            elif owner is not None and hasattr(owner, name):
                site = Site(node, None, slot.key, None, None, batch.registry)
                raise site.refusal("is a property or belongs to the class, and cannot be set by its name")
        _plan_held(draft, batch, slot, name, held)


def _keys(slot: Slot, record: Any, holders: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the keys that a slot names: its own, or what its pattern matches and no other slot names."""
    if "*" not in slot.key:
        return [slot.key]
    taken = {"params", *(other.key for other in record.at(slot.at))}
    return [
        key for key in dict.fromkeys(chain.from_iterable(holders)) if slot.matches(key) and key not in taken
    ]


def _plan_stale_groups(draft: Draft, batch: Batch, leaves: Iterable[list[Node]]) -> None:
    """Plan the entries of a wrapper's own groups that it would copy down to its children."""
    rule: UnwrapRule = batch.record
    if rule.stale_groups is None:
        return
    wrapper = batch.nodes[0]
    below = [nodes for nodes in leaves if any(above is wrapper for above in nodes[0].wrappers())]
    slots = {slot.key: slot for nodes in below for slot in nodes[0].claim.record.at(Place.GROUP)}
    stale = {key: slot for key, slot in slots.items() if batch.groups_with(key)}
    shared = {
        id(group) for node in chain.from_iterable(below if stale else ()) for group in node.obj.param_groups
    }
    for key, slot in stale.items():
        held = [(node, group) for node, group in batch.groups_with(key) if id(group) not in shared]
        initial = Initial.ABSENT if rule.stale_groups == "delete" else slot.initial
        if slot.initial is not None:
            _plan_held(draft, batch, Slot(key, slot.role, initial, Place.GROUP), key, held)


def _plan_held(
    draft: Draft, batch: Batch, slot: Slot, key: str, held: list[tuple[Node, MutableMapping[str, Any]]]
) -> None:
    if held:
        nodes, containers = map(list, zip(*held, strict=True))
        values = [container[key] for container in containers]
        draft.plan_slot(slot, batch, Found(key, nodes, containers, values, ()))


def _slots(
    draft: Draft, batch: Batch, keys: Sequence[Any], node: Node, place: Place, strict: bool
) -> dict[Any, Slot]:
    """Return the slots of keys; refuse, or list, those that have none."""
    slots = {key: batch.slot(key, place) for key in keys}
    if missing := sorted(str(key) for key, slot in slots.items() if slot is None):
        record = node.claim.record
        if strict:
            declared = ", ".join(repr(slot.key) for slot in record.slots) or "nothing"
            provider = str(node.claim.provider)
            raise UndeclaredStateError(
                node.path, missing, record.target, provider=provider, declared=declared
            )
        draft.left_alone.append((node.path, "not declared: " + ", ".join(map(repr, missing))))
    return {key: slot for key, slot in slots.items() if slot is not None}


def _is_entry(key: object, value: object) -> bool:
    """Tell a parameter's entry from state under a name: DeepSpeed keys entries by numbers."""
    return isinstance(value, MutableMapping) and (isinstance(key, torch.Tensor) or type(key) is int)
