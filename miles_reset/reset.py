"""The only module that writes optimizer state."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from operator import is_
from typing import Any

import torch

from miles_reset.agree import once_per_job, together
from miles_reset.aliasing import in_memory_order
from miles_reset.discovery import default_registry
from miles_reset.draft import Draft
from miles_reset.errors import UnreachableStateError
from miles_reset.plan import plan_tree
from miles_reset.registry import Registry
from miles_reset.report import Account, ResetReport
from miles_reset.values import PLAIN_TENSORS, How, Write
from miles_reset.walk import Node, walk

logger = logging.getLogger("miles_reset")


@dataclass(frozen=True)
class ResetPlan(Account):
    """What a reset would change. ``str()`` is a table.

    A plan holds the live tensors that it found, so apply it before the next optimizer step or
    load: some wrappers rebuild their state then, and the plan would be refused.
    """

    _draft: Draft = field(repr=False, compare=False)
    _plan_again: Callable[[], Draft] = field(repr=False, compare=False)

    def apply(self) -> ResetReport:
        """Carry the plan out.

        Raises:
            UnreachableStateError: The state is no longer the one that the plan was made for.
                Nothing was changed.
        """
        now = self._plan_again()
        if moved := _moved(self._draft, now):
            node, key = moved
            reason = f"{key!r} has changed since the reset was planned. Plan it anew."
            raise UnreachableStateError(node.path, reason)
        return self._execute()

    def _execute(self, level: int = logging.INFO) -> ResetReport:
        write_all(self._draft)
        report = ResetReport(self.rows, self.leaves, self.left_alone)
        level = level if self.leaves else logging.WARNING
        logger.log(once_per_job(level), "%s", report.summary("reset"))
        return report

    def __str__(self) -> str:
        """Return the plan as a table."""
        return self.as_table("to reset")


def plan_reset(optimizer: object, *, strict: bool = True, registry: Registry | None = None) -> ResetPlan:
    """Work out what a reset would change, without changing it.

    Args:
        optimizer: A torch optimizer, any wrapper that a plugin declares, a list, tuple or dict of
            them, or None.
        strict: Whether a class or a state key that no plugin declares is an error. Otherwise it is
            left alone and listed.
        registry: Where classes are looked up; the installed plugins by default.

    Raises:
        UnknownOptimizerError: No plugin declares an optimizer found on the way.
        UndeclaredStateError: A leaf holds a state key that its schema does not name.
        UnreachableStateError: State is offloaded, released, or on disk.
        UnsupportedOptimizerState: State cannot be brought to a fresh value.
    """
    where = registry or default_registry()

    def draft_plan() -> tuple[int, Draft]:
        with torch.inference_mode(False), torch.no_grad():  # what is made here goes into the state
            tree = walk(optimizer, where, strict=strict)
            return len(tree.leaves), plan_tree(tree, where, strict=strict)

    leaves, draft = draft_plan()
    return ResetPlan(draft.rows, leaves, tuple(draft.left_alone), draft, lambda: draft_plan()[1])


def reset_optimizer_states(
    optimizer: object, *, strict: bool = True, registry: Registry | None = None, group: Any = None
) -> ResetReport:
    """Bring every optimizer below, in place, to what a freshly built one would do next.

    The next steps are bit-identical to those of a new optimizer over the same weights, master
    weights included, and the same hyper-parameters. Weights are not touched. All is checked
    before anything is written: an error means that nothing was changed.

    Args:
        optimizer: See :func:`plan_reset`.
        strict: See :func:`plan_reset`.
        registry: See :func:`plan_reset`.
        group: A process group of torch.distributed, such as ``torch.distributed.group.WORLD``: its
            ranks reset together, or none of them. By default each rank is on its own, and one that
            refuses leaves the others in their next collective.

    Returns:
        What was reset and what was left alone. One line of it is logged, on rank 0.

    Raises:
        UnsupportedOptimizerState: See :func:`plan_reset`.
        RankDisagreementError: A rank of ``group`` refuses, or does not answer.
    """
    return together(lambda: plan_reset(optimizer, strict=strict, registry=registry), group)._execute()


def _moved(planned: Draft, now: Draft) -> tuple[Node, Any] | None:
    """Return where a value is that is not the one planned for, or is in another place, if any."""
    for was, found in zip_longest(planned.found, now.found):
        if was is None or found is None:
            return (found or was).nodes[0], (found or was).key
        same = was.key == found.key and len(was.values) == len(found.values)
        if not (same and all(map(is_, was.containers + was.values, found.containers + found.values))):
            return was.nodes[0], was.key
    made = {write.key for write in planned.writes if write.how is How.REPLACE}  # tensors of the plan's own
    for write, new in zip_longest(planned.writes, now.writes):
        if write is None or new is None:
            return (write or new).nodes[0], (write or new).key
        numbers = [None if isinstance(one.new, list) else one.new for one in (write, new)]
        same = (write.how, write.key, numbers[0]) == (new.how, new.key, numbers[1])
        if not same or not (write.key in made or all(map(is_, write.old, new.old))):
            return write.nodes[0], write.key
    return None


_AT_ONCE = 1540
"""So many tensors are filled at once: few enough to stay in a cache meanwhile, and a multiple of the
110 and of the 770 that torch's CUDA kernels take in a launch."""


def write_all(draft: Draft) -> None:
    """Write what was planned."""
    for tensor in draft.grown:
        tensor.detach_()
    _write(draft.writes)


@torch.no_grad()
def _write(writes: Iterable[Write]) -> None:
    fills: dict[str, list[Write]] = {}
    for write in writes:
        if write.how is How.FILL:
            fills.setdefault(str(write.new), []).append(write)  # by its digits: -0.0 equals 0
    for same in fills.values():
        for tensors in in_memory_order(write.old for write in same):
            _fill_all(tensors, same[0].new)
    for write in writes:
        _write_others(write)


def _alike(tensors: list[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    """Split tensors by device and dtype, where that saves kernels."""
    on_cpu = tensors[0].is_cpu and tensors[-1].is_cpu
    if on_cpu and not torch.accelerator.is_available():  # else others may stand between these two
        return [tensors]
    parts: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        parts.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return parts.values()


def _fill_all(tensors: Iterator[torch.Tensor], value: float) -> None:
    """Fill tensors in portions; where there are many on the CPU, a second thread takes its share."""
    on_cpu = []
    while some := list(islice(tensors, _AT_ONCE)):
        for portion in _alike(some):
            if portion[0].is_cpu:
                on_cpu.append(portion)
            else:  # on the caller's stream, which another thread would not know
                _fill(portion, value)
    left = iter(on_cpu)

    def fill_what_is_left() -> None:
        for portion in left:
            _fill(portion, value)

    if len(on_cpu) > 1:
        with ThreadPoolExecutor(1) as other:
            helped = other.submit(fill_what_is_left)
            fill_what_is_left()
            helped.result()
    else:
        fill_what_is_left()


@torch.no_grad()
def _fill(tensors: list[torch.Tensor], value: float) -> None:
    if not PLAIN_TENSORS.issuperset(map(type, tensors)):
        for tensor in tensors:
            tensor.fill_(value)
        return
    plain = [torch.view_as_real(t) if t.is_complex() else t for t in tensors] if value else tensors
    with torch.inference_mode():  # as no_grad, and a fifth faster on small tensors
        torch._foreach_zero_(plain)
        if math.copysign(1, value) < 0 and not value:
            torch._foreach_neg_(plain)
    if value:
        for tensor in plain:
            tensor.fill_(value)


def _write_others(write: Write) -> None:
    match write.how:
        case How.DIAGONAL:
            for tensor in write.old:
                tensor.zero_().fill_diagonal_(write.new)
        case How.COPY:
            for tensor, source in zip(write.old, write.new, strict=True):
                tensor.copy_(source)
        case How.MERGE:
            for tensor, (mask, fresh) in zip(write.old, write.new, strict=True):
                if isinstance(fresh, torch.Tensor):
                    tensor.copy_(torch.where(mask(), fresh, tensor))
                else:
                    tensor.masked_fill_(mask(), fresh)
        case How.CLEAR:
            for container in write.old:
                container.clear()
        case How.SEED:
            for generator in write.old:
                seed = generator.manual_seed if isinstance(generator, torch.Generator) else generator.seed
                seed(write.new)
        case How.SET | How.REPLACE:
            for container, value in zip(write.containers, write.new, strict=True):
                container[write.key] = value
        case How.REMOVE:
            for container in write.containers:
                container.pop(write.key, None)  # gone already where two leaves share their state
        case How.REMOVE_ENTRY:
            for state, parameter in zip(write.containers, write.new, strict=True):
                state.pop(parameter, None)
