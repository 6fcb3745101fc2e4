"""Whether the tensors that a reset would write are there, its own, and each other's aliases.

One look at the address of every tensor answers three questions. A tensor whose storage was
released (an offloaded bucket) would crash the process when written. A tensor at a parameter's
address would take the weights with it. And one tensor in two states (DistributedOptimizer of
megatron-core leaves a single step tensor in all states after a load) would count once for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import torch

from miles_reset.errors import NOTHING_CHANGED, UnreachableStateError, UnsupportedOptimizerState
from miles_reset.values import PLAIN_TENSORS, How, Write, local

# No allocator hands out addresses below this one, but for the heap of a program that was linked at a
# fixed address; a released storage's address is its view's offset. Whatever is below is looked at.
_SUSPECT = 1 << 40
_IN_PLACE = (How.FILL, How.DIAGONAL, How.COPY)


def check_tensors(writes: list[Write], parameters: Sequence[torch.Tensor]) -> list[Write]:
    """Refuse tensors that cannot be written, and give aliases a tensor of their own.

    Returns:
        The writes that put a new tensor in place of all but the first of several aliases.

    Raises:
        UnreachableStateError: A tensor's storage is not there.
        UnsupportedOptimizerState: A tensor is a parameter, or shares its first element with one.
    """
    in_place = [write for write in writes if write.how in _IN_PLACE]
    addresses = [_addresses(write.old) for write in in_place]
    if not any(addresses):
        return []
    distinct = set(chain.from_iterable(addresses))
    if min(distinct) < _SUSPECT:
        for write, found in zip(in_place, addresses, strict=True):
            _check_storages(write, found)
    weights = _addresses(parameters)
    if not distinct.isdisjoint(weights):
        _refuse_weights(in_place, addresses, set(weights) - {0})
    if len(distinct) == sum(map(len, addresses)):
        return []
    return list(_unshare(in_place, addresses))


def _addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    if not PLAIN_TENSORS.issuperset(map(type, tensors)):
        tensors = [local(tensor) for tensor in tensors]
    try:
        return list(map(torch.Tensor.data_ptr, tensors))
    except RuntimeError:  # sparse and other tensors without a storage of their own
        return [tensor.data_ptr() if tensor.layout is torch.strided else 0 for tensor in tensors]


def _check_storages(write: Write, addresses: list[int]) -> None:
    for i, address in enumerate(addresses):
        tensor = write.old[i]
        if address >= _SUSPECT or tensor.layout is not torch.strided or not tensor.numel():
            continue
        if tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size():
            raise UnreachableStateError(
                write.nodes[i].path,
                f"the storage of {write.key!r} was released (offloaded, or on disk). Bring it back first.",
            )


def _refuse_weights(writes: list[Write], addresses: list[list[int]], weights: set[int]) -> None:
    for write, found in zip(writes, addresses, strict=True):
        for i, address in enumerate(found):
            if address in weights:
                path = write.nodes[i].path
                raise UnsupportedOptimizerState(
                    path,
                    f"{write.key!r} at {path} is a parameter, or starts where one does: to reset it would "
                    f"change the weights. {NOTHING_CHANGED} Declare it with kept().",
                )


def _unshare(writes: list[Write], addresses: list[list[int]]) -> Iterator[Write]:
    met: set[int] = {0}
    for write, found in zip(writes, addresses, strict=True):
        aliases = set()
        for i, address in enumerate(found):
            if address in met and address:
                aliases.add(i)
            met.add(address)
        if not aliases:
            continue
        if not write.containers or write.how is not How.FILL:
            path = write.nodes[min(aliases)].path
            raise UnsupportedOptimizerState(
                path,
                f"{write.key!r} at {path} shares its tensor with other state. {NOTHING_CHANGED}",
            )
        order = sorted(aliases)
        fresh = [torch.empty_like(write.old[i]) for i in order]  # filled with the others of this write
        yield Write(
            How.REPLACE,
            [write.nodes[i] for i in order],
            [write.containers[i] for i in order],
            write.key,
            [write.old[i] for i in order],
            fresh,
        )
        for i, tensor in zip(order, fresh, strict=True):
            write.old[i] = tensor
