"""Leaves that are alike, planned together, and the values found in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from operator import contains, methodcaller
from typing import Any, NamedTuple, cast

import torch

from miles_reset.registry import Registry
from miles_reset.schema import Initial, Kind, Place, Slot
from miles_reset.values import Site, resolve
from miles_reset.walk import Node

_DECIDED_LATER = frozenset({Kind.EITHER, Kind.GROUP, Kind.DEFAULT, Kind.IDENTITY})


class Found(NamedTuple):
    """Values of one key, side by side.

    Attributes:
        key: The key.
        nodes: The leaf, or wrapper, of each value.
        containers: The mapping that holds each value.
        values: The values.
        parameters: The parameter that each value is about; empty where there is none.
    """

    key: Any
    nodes: list[Node]
    containers: list[Any]
    values: list[Any]
    parameters: Sequence[Any]

    def select(self, at: Sequence[int]) -> Found:
        """Return those at some positions."""
        nodes, containers, values, parameters = (
            [column[i] for i in at] if column else []
            for column in (self.nodes, self.containers, self.values, self.parameters)
        )
        return Found(self.key, nodes, containers, values, parameters)


@dataclass
class Batch:
    """Leaves of one class under one wrapper, or one wrapper that owns something itself.

    Attributes:
        nodes: All of them.
        registry: Where classes of objects in the state are looked up.
        foreign: What wrappers above keep in the state of these leaves.
    """

    nodes: list[Node]
    registry: Registry
    foreign: tuple[Slot, ...] = ()

    @property
    def record(self) -> Any:
        """The schema, or the unwrap rule, of all of them."""
        return self.nodes[0].claim.record

    @cached_property
    def groups(self) -> list[MutableMapping[str, Any]]:
        """The param groups of all of them."""
        return [group for node in self.nodes for group in getattr(node.obj, "param_groups", ())]

    def groups_with(self, key: str) -> list[tuple[Node, MutableMapping[str, Any]]]:
        """Return the groups that have a key, each with its node."""
        if not any(map(contains, self.groups, repeat(key))):
            return []
        nodes = (node for node in self.nodes for _ in getattr(node.obj, "param_groups", ()))
        return [(node, group) for node, group in zip(nodes, self.groups, strict=True) if key in group]

    @cached_property
    def differentiable(self) -> bool:
        """Whether any of them steps under autograd."""
        return any(map(methodcaller("get", "differentiable"), self.groups))

    @cached_property
    def _group_of(self) -> dict[tuple[int, int], MutableMapping[str, Any]]:
        groups = self.groups_with("params")
        return {(id(node), id(one)): group for node, group in groups for one in group["params"]}

    def slot(self, key: Any, place: Place) -> Slot | None:
        """Return the slot of a key: a wrapper's above first, and a whole key before a pattern."""
        candidates = (*self.foreign, *self.record.at(place))
        exact = [slot for slot in candidates if slot.key == key]
        return next(iter(exact or [slot for slot in candidates if slot.matches(key)]), None)

    def site(self, found: Found, i: int) -> Site:
        """Say where one value lives."""
        node, container = found.nodes[i], found.containers[i]
        parameter = group = None
        if found.parameters:
            parameter = found.parameters[i]
            group = self._group_of.get((id(node), id(parameter)))
            groups = node.obj.param_groups
            if group is None and len(groups) == 1:  # it has let go of its parameters between steps
                group = groups[0]
        elif isinstance(container, Mapping) and "params" in container:
            group = cast("MutableMapping[str, Any]", container)
        parameter = parameter if isinstance(parameter, torch.Tensor) else None
        return Site(node, container, found.key, parameter, group, self.registry)

    def resolved(self, initial: Initial, found: Found) -> Iterator[tuple[Initial, Found]]:
        """Split values by the initial value that their groups and optimizers decide on."""
        if initial.kind not in _DECIDED_LATER:
            yield initial, found
            return
        decided: dict[tuple[int, int], Initial] = {}
        parts: dict[Initial, list[int]] = {}
        for i, node in enumerate(found.nodes):
            site = self.site(found, i)
            who = (id(node), id(site.group))
            if who not in decided:
                decided[who] = resolve(initial, site)
            parts.setdefault(decided[who], []).append(i)
        for part, at in parts.items():
            yield part, found if len(parts) == 1 else found.select(at)
