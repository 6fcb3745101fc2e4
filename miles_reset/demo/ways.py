"""Ways to reset an optimizer, right and naive, and what each does to the next updates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import is_

import torch
from torch import nn

from miles_reset.demo.training import Build, Job, parameters
from miles_reset.reset import reset_optimizer_states
from miles_reset.schema import Role
from miles_reset.testing import same_bits
from miles_reset.walk import Node


def _reset(job: Job) -> None:
    reset_optimizer_states(job.optimizer)


def _leave(job: Job) -> None:
    """Do nothing."""


def _zero_moments(job: Job) -> None:
    for leaf in job.leaves:
        moments = {
            slot.key for slot in leaf.claim.record.slots if slot.role in (Role.MOMENTUM, Role.VARIANCE)
        }
        for entry in leaf.obj.state.values():
            for key in moments & entry.keys():
                entry[key].zero_()


def _zero_tensors(job: Job) -> None:
    for leaf in job.leaves:
        for entry in leaf.obj.state.values():
            for value in entry.values():
                if isinstance(value, torch.Tensor):
                    value.zero_()


def _clear(job: Job) -> None:
    for leaf in job.leaves:
        leaf.obj.state.clear()


RIGHT = "reset_optimizer_states"
LEFT = "state left as it is"
WAYS: dict[str, Callable[[Job], None]] = {
    RIGHT: _reset,
    LEFT: _leave,
    "moments zeroed, count kept": _zero_moments,
    "all tensors zeroed": _zero_tensors,
    "state.clear()": _clear,
}


@dataclass(frozen=True)
class Outcome:
    """What one way of resetting does to the next updates of one optimizer.

    Attributes:
        optimizer: The optimizer's class.
        way: The way.
        sizes: The size of each update relative to a fresh optimizer's at the same step.
        degrees: The angle between the first update and a fresh optimizer's.
        same: Whether the first update leaves the weights that a fresh optimizer's does, bit for bit.
        in_place: Whether all tensors of the state are still the same ones after that update.
        error: What the next step raised, if it did.
    """

    optimizer: str
    way: str
    sizes: tuple[float, ...] = ()
    degrees: float | None = None
    same: bool = False
    in_place: bool = False
    error: str = ""


def compare_ways(build: Build, trained: Job, first: int, steps: int) -> Iterator[Outcome]:
    """Follow copies of a job, reset in each way, beside a freshly built optimizer.

    Args:
        build: Builds the job anew.
        trained: The job, with history; it is left as it is.
        first: The number of the next batch.
        steps: How many steps to follow.
    """
    fresh = _follow(build().take_over(trained, history=False), first, steps)
    names = [type(leaf.obj).__name__ for leaf in trained.leaves]
    for way, apply in WAYS.items():
        job = build().take_over(trained, history=True)
        held = [_tensors(leaf) for leaf in job.leaves]
        apply(job)
        try:
            paths = _follow(job, first, steps)
        except Exception as error:  # noqa: BLE001  # whatever a naive way leads to is its outcome
            yield from (Outcome(name, way, error=repr(error)) for name in names)
            continue
        now = [_tensors(leaf) for leaf in job.leaves]
        for i, name in enumerate(names):
            in_place = all(map(is_, held[i], now[i]))
            yield Outcome(name, way, *_differences(paths[i], fresh[i]), in_place)


def _tensors(leaf: Node) -> list[torch.Tensor]:
    """Return the tensors of a leaf's state."""
    return [value for entry in leaf.obj.state.values() for value in entry.values()]


def _follow(job: Job, first: int, steps: int) -> list[torch.Tensor]:
    """Step on; return for each leaf its weights before the first step and after each, a row each."""
    rows = [[_flat(parameters(leaf)) for leaf in job.leaves]]
    for i in range(first, first + steps):
        job.step(i)
        rows.append([_flat(parameters(leaf)) for leaf in job.leaves])
    return [torch.stack(path) for path in zip(*rows, strict=True)]


def _flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def _differences(mine: torch.Tensor, fresh: torch.Tensor) -> tuple[tuple[float, ...], float, bool]:
    ours, theirs = (path.double().diff(dim=0) for path in (mine, fresh))
    sizes = ours.norm(dim=1) / theirs.norm(dim=1)
    cosine = torch.dot(*(nn.functional.normalize(updates[0], dim=0) for updates in (ours, theirs)))
    degrees = math.degrees(math.acos(cosine.clamp(-1, 1).item()))
    return tuple(sizes.tolist()), degrees, same_bits(mine[1], fresh[1])


@dataclass(frozen=True)
class Proof:
    """How a reset job compares with a freshly built twin over the same weights.

    Attributes:
        steps: The number of steps that both took.
        numbers: The number of weights compared after each.
        same: Whether all were the same, bit for bit, at every step.
        max_difference: The largest difference.
    """

    steps: int
    numbers: int
    same: bool
    max_difference: float


def prove(job: Job, twin: Job, first: int, steps: int) -> Proof:
    """Step a reset job and a fresh twin on, and compare all weights after each step."""
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for i in range(first, first + steps):
        for one in (job, twin):
            one.step(i)
        pairs += zip(*([w.detach().clone() for w in one.weights()] for one in (job, twin)), strict=True)
    return Proof(
        steps,
        sum(mine.numel() for mine, _ in pairs) // steps,
        all(same_bits(mine, fresh) for mine, fresh in pairs),
        max((mine.double() - fresh.double()).abs().max().item() for mine, fresh in pairs),
    )
