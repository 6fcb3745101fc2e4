"""One verdict of all ranks, before any of them changes anything."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from miles_reset.errors import RankDisagreementError, ResetError

T = TypeVar("T")

TIMEOUT = timedelta(minutes=5)
"""How long ranks wait for each other."""


@dataclass(frozen=True)
class RankVerdict:
    """What one rank says.

    Attributes:
        refusal: Why it refuses; None if it does not.
        facts: What must be equal on all ranks: the policy, the iteration, the world size.
    """

    refusal: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


def initialized() -> bool:
    """Say whether torch.distributed is in use."""
    return dist.is_available() and dist.is_initialized()


def rank_and_world() -> tuple[int, int]:
    """Return this process's rank, and the number of ranks."""
    return (dist.get_rank(), dist.get_world_size()) if initialized() else (0, 1)


def once_per_job(level: int) -> int:
    """Return a level to log at: DEBUG on all ranks but the first."""
    return logging.DEBUG if rank_and_world()[0] else level


def agree(
    refused: ResetError | None,
    facts: Mapping[str, Any] | None = None,
    *,
    group: Any = None,
    timeout: timedelta | float = TIMEOUT,
) -> None:
    """Exchange verdicts with all ranks of a group, and refuse together where one refuses.

    Alone, or without torch.distributed, it raises what was refused, or nothing.

    Args:
        refused: Why this rank refuses; None if it does not.
        facts: What must be equal on all ranks.
        group: The ranks; all, by default.
        timeout: How long to wait for the others.

    Raises:
        RankDisagreementError: A rank refuses, has other facts, or does not answer in time.
        ResetError: ``refused``, if this is the only rank.
    """
    if not initialized() or dist.get_world_size(group) == 1:
        if refused is not None:
            raise refused
        return
    mine = RankVerdict(str(refused) if refused is not None else None, dict(facts or {}))
    _judge(exchange(mine, group=group, timeout=timeout), refused)


def together(plan: Callable[[], T], group: Any) -> T:
    """Return what a function plans, once each rank of a group has planned; without a group, at once.

    Raises:
        RankDisagreementError: A rank of the group refuses, or does not answer.
        ResetError, ValueError: What the function raises, without a group.
    """
    if group is None:
        return plan()
    planned, refused = [], None
    try:
        planned.append(plan())
    except ResetError as error:
        refused = error
    except ValueError as error:
        refused = ResetError(str(error))
    agree(refused, group=group)
    return planned[0]


def exchange(value: Any, *, group: Any = None, timeout: timedelta | float = TIMEOUT) -> dict[int, Any]:
    """Return what all ranks of a group say, by rank.

    Args:
        value: What this rank says; it must be picklable.
        group: The ranks; all, by default.
        timeout: How long to wait for the others; a number is of seconds.

    Raises:
        RankDisagreementError: A rank does not answer in time.
    """
    if not initialized() or dist.get_world_size(group) == 1:
        return {rank_and_world()[0]: value}
    if not isinstance(timeout, timedelta):
        timeout = timedelta(seconds=timeout)
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    said: list[Any] = [None] * len(ranks)
    try:
        quick = _gloo_group(group, timeout)
        dist.monitored_barrier(quick, timeout, wait_all_ranks=True)
        dist.all_gather_object(said, value, group=quick)
    except RuntimeError as error:
        own = {dist.get_rank(): getattr(value, "refusal", None) or "ready"}
        why = f"not every rank answered within {timeout.total_seconds():.0f} s ({str(error).splitlines()[0]})"
        raise RankDisagreementError(own, why) from error
    return dict(zip(ranks, said, strict=True))


def _judge(verdicts: Mapping[int, RankVerdict], refused: ResetError | None) -> None:
    if any(verdict.refusal is not None for verdict in verdicts.values()):
        said = {rank: verdict.refusal or "ready" for rank, verdict in verdicts.items()}
        refusing = [rank for rank, verdict in verdicts.items() if verdict.refusal is not None]
        raise RankDisagreementError(said, f"ranks {refusing} refuse, so none goes on") from refused
    facts = [verdict.facts for verdict in verdicts.values()]
    for key in {key: None for fact in facts for key in fact}:
        if any(fact.get(key) != facts[0].get(key) for fact in facts):
            said = {rank: f"{key} is {verdict.facts.get(key)!r}." for rank, verdict in verdicts.items()}
            raise RankDisagreementError(said, f"they have different values of {key}")


_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _gloo_group(group: Any, timeout: timedelta) -> Any:
    """Return a group for objects in host memory: the group itself if it is one of gloo's."""
    whole = group or dist.group.WORLD
    if dist.get_backend(whole) == "gloo":
        return whole
    if whole not in _groups:
        ranks = dist.get_process_group_ranks(whole)
        _groups[whole] = dist.new_group(
            ranks, timeout=timeout, backend="gloo", use_local_synchronization=True
        )
    return _groups[whole]
