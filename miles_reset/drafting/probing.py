"""Build an optimizer, step it, and note what it holds where, from its first value on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from miles_reset.drafting.recording import RecordingEntry, RecordingState, copy_of, inside, same
from miles_reset.schema import Place
from miles_reset.testing import Factory, Parameters, build_trial

STEPS = 13
"""So many steps show what changes, and what is first made late."""

_NO_STATE = {"state", "param_groups", "defaults", "step", "zero_grad", "_zero_grad_profile_name"}


class Spot(NamedTuple):
    """One key in one place."""

    place: Place
    key: str

    def __str__(self) -> str:
        """Name the key as it is written in a schema."""
        return self.key


@dataclass
class Seen:
    """What was seen of one key, of one parameter or of none.

    Attributes:
        first: The first value, as it was then.
        weight: The parameter as it was then.
        group: The numbers in the parameter's group as they were then.
        built: Whether it was there before the first step.
        last: The value in the end.
        changed: Whether it changed at any step.
        trail: The value after each step, where it is a number.
    """

    first: Any
    weight: torch.Tensor | None = None
    group: Mapping[str, Any] = field(default_factory=dict)
    built: bool = False
    last: Any = None
    changed: bool = False
    trail: list[float] = field(default_factory=list)


@dataclass
class Run:
    """One optimizer's first steps.

    Attributes:
        seen: What was seen at each place, by parameter.
        group: The first group as it was built.
        defaults: What the constructor was given.
        cls: The optimizer's class.
    """

    seen: dict[Spot, dict[Any, Seen]]
    group: dict[str, Any]
    defaults: dict[str, Any]
    cls: type


def run(
    factory: Factory,
    parameters: Parameters,
    *,
    data: int = 0,
    steps: int = STEPS,
    change: Callable[[dict[str, Any]], None] | None = None,
) -> Run:
    """Build an optimizer and step it.

    Args:
        factory: Builds it.
        parameters: Over copies of these.
        data: Other numbers, other gradients.
        steps: How often.
        change: Changes each param group before the first step.
    """
    trial = build_trial(factory, parameters)
    optimizer = trial.optimizer
    for group in optimizer.param_groups if change else ():
        change(group)  # type: ignore[misc]  # there is one, or no group
    found = Run(
        {}, plain(optimizer.param_groups[0]), plain(getattr(optimizer, "defaults", {})), type(optimizer)
    )
    live = _Live(optimizer, found)
    live.install()
    for i in range(steps):
        trial.step(100 * data + i)
        live.look()
    return found


def plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a param group holds besides parameters."""
    return {key: copy_of(value) for key, value in group.items() if key not in ("params", "param_names")}


class _Live:
    """An optimizer under observation."""

    def __init__(self, optimizer: Any, found: Run) -> None:
        self.optimizer, self.found = optimizer, found
        self.numbers: dict[int, int] = {}
        self.groups: dict[int, Any] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self.numbers[id(parameter)] = len(self.numbers)
                self.groups[id(parameter)] = group
        self.started = False

    def install(self) -> None:
        """Note what is there before the first step, and have the rest recorded."""
        for spot, owner, value in self._held():
            self._note(spot, owner, value)
        self.started = True
        groups = self.optimizer.param_groups
        for i, group in enumerate(groups):
            groups[i] = RecordingEntry(partial(self._note_group, f"group {i}"), group)
            for parameter in group["params"]:
                self.groups[id(parameter)] = groups[i]
        if "state" in vars(self.optimizer):
            self.optimizer.state = RecordingState(self._note_state, self.optimizer.state)

    def _note_group(self, owner: str, key: Any, value: Any) -> None:
        self._note(Spot(Place.GROUP, key), owner, value)

    def _note_state(self, parameter: Any, key: Any, value: Any) -> None:
        place = Place.NAMED if parameter is None else Place.STATE
        self._note(Spot(place, key), parameter, value)

    def _note(self, spot: Spot, owner: Any, value: Any) -> None:
        of = self.found.seen.setdefault(spot, {})
        number = self.numbers.get(id(owner), -1) if isinstance(owner, torch.Tensor) else owner
        if number in of:
            return
        weight = owner.detach().clone() if isinstance(owner, torch.Tensor) else None
        group = plain(self.groups.get(id(owner), {})) if weight is not None else {}
        of[number] = Seen(copy_of(value), weight, group, built=not self.started)

    def look(self) -> None:
        """Note what there is after a step."""
        there = set()
        for spot, owner, value in self._held():
            self._note(spot, owner, value)
            number = self.numbers.get(id(owner), -1) if isinstance(owner, torch.Tensor) else owner
            there.add((spot, number))
            seen = self.found.seen[spot][number]
            if (number_ := _number(value)) is not None:
                seen.trail.append(number_)
            seen.changed |= not same(seen.first, value)
            seen.last = copy_of(value)
        for spot, of in self.found.seen.items():
            for number, seen in of.items():
                seen.changed |= (spot, number) not in there

    def _held(self) -> Iterator[tuple[Spot, Any, Any]]:
        optimizer = self.optimizer
        for owner, entry in dict(optimizer.state).items():
            if isinstance(owner, torch.Tensor) and isinstance(entry, Mapping):
                yield from ((Spot(Place.STATE, key), owner, value) for key, value in dict(entry).items())
            else:
                yield Spot(Place.NAMED, owner), None, entry
        for i, group in enumerate(optimizer.param_groups):
            for key, value in dict(group).items():
                if key not in ("params", "param_names"):
                    yield Spot(Place.GROUP, key), f"group {i}", value
        yield from self._attributes(optimizer, "")

    def _attributes(self, obj: Any, prefix: str) -> Iterator[tuple[Spot, Any, Any]]:
        for name, value in dict(vars(obj)).items():
            if (not prefix and (name in _NO_STATE or name.endswith("_hooks"))) or callable(value):
                continue
            if self._is_shared(value) or isinstance(value, (torch.nn.Module, torch.optim.Optimizer)):
                continue
            yield Spot(Place.ATTRIBUTE, prefix + name), None, value
            is_object = hasattr(value, "__dict__") and not isinstance(value, (torch.Tensor, Mapping, type))
            if is_object and prefix.count(".") < 2:
                yield from self._attributes(value, f"{prefix}{name}.")

    def _is_shared(self, value: Any) -> bool:
        """Say whether something is made of parameters or groups."""
        if value is self.optimizer.param_groups or value is self.optimizer.state:
            return True
        if isinstance(value, (list, tuple, Mapping)):
            items = value.values() if isinstance(value, Mapping) else value
            if any(item is group for item in items for group in self.optimizer.param_groups):
                return True
        return any(id(item) in self.numbers for item in inside(value))


def _number(value: Any) -> float | None:
    if isinstance(value, (bool, int, float)):
        return float(value)
    if type(value) is torch.Tensor and value.numel() == 1 and not value.is_complex():
        return float(value)
    return None
