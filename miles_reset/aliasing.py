"""Whether the tensors that a reset would write are there, its own, and each other's aliases.

One look at the address of every tensor answers three questions. A tensor whose storage was
released (an offloaded bucket) would crash the process when written. A tensor at a parameter's
address would take the weights with it. And one tensor in two states (DistributedOptimizer of
megatron-core leaves a single step tensor in all states after a load) would count once for each.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from miles_reset.errors import NOTHING_CHANGED, UnreachableStateError, UnsupportedOptimizerState
from miles_reset.values import PLAIN_TENSORS, How, Write, local

if TYPE_CHECKING:
    import numpy.typing as npt

    _Addresses = npt.NDArray[np.uint64]

# No allocator hands out addresses below this one, but for the heap of a program that was linked at a
# fixed address; a released storage's address is its view's offset. Whatever is below is looked at.
_SUSPECT = 1 << 40
_NEVER = np.uint64(2**64 - 1)
_IN_PLACE = (How.FILL, How.DIAGONAL, How.COPY, How.MERGE)


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
    for tensors in in_memory_order(write.old for write in in_place):
        addresses.extend(_addresses(list(tensors)))
    if not addresses:
        return []
    in_order = np.sort(np.frombuffer(addresses, np.uint64))  # torch would wake its threads for it
    if in_order[0] < _SUSPECT:
        for write in in_place:
            _check_storages(write)
    if weights:
        if not PLAIN_TENSORS.issuperset(map(type, weights)):
            weights = list(map(local, weights))
        if within := _weights_with_state(np.fromiter(_addresses(weights), np.uint64), in_order, weights):
            _refuse_weights(in_place, within)
    if not (in_order[1:] == in_order[:-1]).any():
        return []
    return list(_unshare(in_place))


def in_memory_order(columns: Iterable[list[torch.Tensor]]) -> Iterator[Iterator[torch.Tensor]]:
    """Yield tensors parameter by parameter rather than slot by slot, where the slots have as many.

    So they were made, and so they lie in memory.
    """
    alike: dict[int, list[list[torch.Tensor]]] = {}
    for column in columns:
        alike.setdefault(len(column), []).append(column)
    for same in alike.values():
        yield chain.from_iterable(zip(*same, strict=True))


def _weights_with_state(begin: _Addresses, state: _Addresses, weights: list[torch.Tensor]) -> list[range]:
    """Return the extents, in addresses, of the weights within which state begins; ``state`` is sorted.

    Only a weight that is followed by state, before another weight begins, is asked for its size.
    """
    followers = np.append(state, _NEVER)[np.searchsorted(state, begin)]
    in_order = np.sort(begin)
    next_weights = np.append(in_order, _NEVER)[np.searchsorted(in_order, begin, side="right")]
    near = np.flatnonzero((begin > 0) & (followers < next_weights))
    sizes = np.fromiter((weights[i].nbytes for i in near.tolist()), np.uint64, len(near))
    begin, followers = begin[near], followers[near]
    within = followers < begin + sizes
    return list(map(range, begin[within].tolist(), (begin + sizes)[within].tolist()))


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


def _refuse_weights(writes: list[Write], extents: list[range]) -> None:
    for write in writes:
        for i, address in enumerate(_addresses(write.old)):
            if address and any(address in extent for extent in extents):
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
        write.old = write.old.copy()  # the plan still compares what it found
        for i, tensor in zip(aliases, fresh, strict=True):
            write.old[i] = tensor
