"""Whether the tensors that a reset would write are there, its own, and each other's aliases.

One look at the address of every tensor answers three questions. A tensor whose storage was
released (an offloaded bucket) would crash the process when written. A tensor at a parameter's
address would take the weights with it. And one tensor in two states (DistributedOptimizer of
megatron-core leaves a single step tensor in all states after a load) would count once for each.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from miles_reset.errors import NOTHING_CHANGED, UnreachableStateError, UnsupportedOptimizerState
from miles_reset.values import PLAIN_TENSORS, How, Write, local

# No allocator hands out addresses below this one, but for the heap of a program that was linked at a
# fixed address; a released storage's address is its view's offset. Whatever is below is looked at.
_SUSPECT = 1 << 40
_IN_PLACE = (How.FILL, How.DIAGONAL, How.COPY)


def check_tensors(writes: list[Write], weights: list[torch.Tensor]) -> list[Write]:
    """Refuse tensors that cannot be written, and give aliases a tensor of their own.

    Args:
        writes: What is to be written.
        weights: Parameters, and whatever else is kept.

    Returns:
        The writes that put a new tensor in place of all but the first of several aliases.

    Raises:
        UnreachableStateError: A tensor's storage is not there.
        UnsupportedOptimizerState: A tensor is a weight, or begins within one.
    """
    in_place = [write for write in writes if write.how in _IN_PLACE]
    addresses = array("Q")
    for write in in_place:
        addresses.extend(_addresses(write.old))
    if not addresses:
        return []
    in_order = np.sort(np.frombuffer(addresses, np.uint64))  # torch would wake its threads for it
    if in_order[0] < _SUSPECT:
        for write in in_place:
            _check_storages(write)
    if weights:
        if not PLAIN_TENSORS.issuperset(map(type, weights)):
            weights = list(map(local, weights))
        begin = np.fromiter(_addresses(weights), np.uint64, len(weights))
        end = begin + np.fromiter(map(attrgetter("nbytes"), weights), np.uint64, len(weights))
        within = np.searchsorted(in_order, end) > np.searchsorted(in_order, begin)
        if (within & (begin > 0)).any():
            _refuse_weights(in_place, begin[within].tolist(), end[within].tolist())
    if not (in_order[1:] == in_order[:-1]).any():
        return []
    return list(_unshare(in_place))


def _addresses(tensors: Iterable[torch.Tensor]) -> Sequence[int]:
    try:
        return array("Q", map(torch.Tensor.data_ptr, tensors))
    except RuntimeError:
        return [_address(tensor) for tensor in tensors]


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # sparse: it has no storage of its own, and cannot be released or shared alone
        return 0


def _check_storages(write: Write) -> None:
    for i, (tensor, address) in enumerate(zip(write.old, _addresses(write.old), strict=True)):
        if address >= _SUSPECT or tensor.layout is not torch.strided or not tensor.numel():
            continue
        if tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size():
            raise UnreachableStateError(
                write.nodes[i].path,
                f"the storage of {write.key!r} was released (offloaded, or on disk). Bring it back first.",
            )


def _refuse_weights(writes: list[Write], begin: list[int], end: list[int]) -> None:
    for write in writes:
        for i, address in enumerate(_addresses(write.old)):
            if address and any(first <= address < last for first, last in zip(begin, end, strict=True)):
                path = write.nodes[i].path
                raise UnsupportedOptimizerState(
                    path,
                    f"{write.key!r} at {path} is a weight, or lies within one: to reset it would "
                    f"change the weights. {NOTHING_CHANGED} Declare it with kept().",
                )


def _unshare(writes: list[Write]) -> Iterator[Write]:
    met: dict[int, tuple[int, Any]] = {}
    for write in writes:
        aliases = []
        for i, address in enumerate(_addresses(write.old)):
            place = (id(write.containers[i]) if write.containers else i, write.key)
            if address and met.setdefault(address, place) != place:
                aliases.append(i)
        if not aliases:
            continue
        if not write.containers or write.how is not How.FILL:
            path = write.nodes[aliases[0]].path
            raise UnsupportedOptimizerState(
                path,
                f"{write.key!r} at {path} shares its tensor with other state. {NOTHING_CHANGED}",
            )
        fresh = [torch.empty_like(write.old[i]) for i in aliases]  # filled with the others of this write
        yield Write(
            How.REPLACE,
            [write.nodes[i] for i in aliases],
            [write.containers[i] for i in aliases],
            write.key,
            [write.old[i] for i in aliases],
            fresh,
        )
        for i, tensor in zip(aliases, fresh, strict=True):
            write.old[i] = tensor
