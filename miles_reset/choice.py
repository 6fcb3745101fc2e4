"""What a partial reset resets: which slots, of which parameters, and what of each tensor."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from miles_reset.errors import NOTHING_CHANGED
from miles_reset.schema import Slot


class Choice:
    """What is to be reset, checked."""

    def __init__(
        self,
        slots: Collection[str] | None,
        parameters: Collection[torch.Tensor] | None,
        rows: Mapping[torch.Tensor, Sequence[int]] | None,
        keep: float | None,
        seed: int | None,
    ) -> None:
        if rows is not None and (keep is not None or parameters is not None):
            raise ValueError(
                "rows names its parameters itself, and cannot be combined with keep. " + NOTHING_CHANGED
            )
        if keep is not None and not 0 <= keep <= 1:
            raise ValueError(f"keep is {keep!r}; it is a ratio from 0 to 1. {NOTHING_CHANGED}")
        if seed is not None and keep is None:
            raise ValueError(f"a seed is for keep=..., which is not given. {NOTHING_CHANGED}")
        if isinstance(slots, str):
            raise ValueError(f"slots is {slots!r}, not a list of names. {NOTHING_CHANGED}")
        self.slots = None if slots is None else frozenset(slots)
        self.keep = keep
        self.generator = None if seed is None else torch.Generator().manual_seed(seed)
        self.rows = {id(parameter): _rows_of(parameter, index) for parameter, index in (rows or {}).items()}
        named = rows if rows is not None else parameters
        self.parameters = None if named is None else {id(parameter): parameter for parameter in named}

    @property
    def within(self) -> bool:
        """Whether a part of a tensor is reset."""
        return bool(self.rows) or self.keep is not None

    def names(self, slot: Slot, key: Any) -> bool:
        """Say whether a slot is among those that are reset."""
        return self.slots is None or not self.slots.isdisjoint((str(slot.role), slot.key, str(key)))

    def has(self, parameter: Any) -> bool:
        """Say whether a parameter's state is reset."""
        return self.parameters is None or id(parameter) in self.parameters

    def mask(self, parameter: Any, value: torch.Tensor) -> torch.Tensor:
        """Return what of a tensor is reset, as booleans that broadcast to it."""
        if self.keep is None:
            mask = torch.zeros(value.shape[0], dtype=torch.bool)
            mask[self.rows[id(parameter)]] = True
            return mask.reshape(-1, *[1] * (value.ndim - 1)).to(value.device)
        number = self._survivors(value)
        if self.generator is not None:
            chosen = torch.randperm(value.numel(), generator=self.generator)[:number].to(value.device)
        else:
            chosen = _largest(value, number)
        mask = torch.ones(value.numel(), dtype=torch.bool, device=value.device)
        mask[chosen] = False
        return mask.view(value.shape)

    def count(self, parameter: Any, value: torch.Tensor) -> int:
        """Return how many numbers of a tensor are reset."""
        if self.keep is None:
            return len(self.rows[id(parameter)]) * (value.numel() // max(1, value.shape[0]))
        return value.numel() - self._survivors(value)

    def _survivors(self, value: torch.Tensor) -> int:
        assert self.keep is not None
        return round(self.keep * value.numel())


def _rows_of(parameter: torch.Tensor, index: Sequence[int]) -> list[int]:
    found = sorted({int(i) for i in index})
    size = parameter.shape[0] if parameter.ndim else 0
    if not found or found[0] < 0 or found[-1] >= size:
        raise ValueError(
            f"rows {list(index)} are not all rows of a parameter of shape {tuple(parameter.shape)}. "
            f"{NOTHING_CHANGED}"
        )
    return found


def _largest(value: torch.Tensor, number: int) -> torch.Tensor:
    """Return where the largest numbers of a tensor are; of equal ones, the first."""
    size = value.detach().abs().flatten().nan_to_num(nan=-1.0, posinf=math.inf)
    if number == 0:
        return torch.empty(0, dtype=torch.long, device=value.device)
    least = size.kthvalue(size.numel() - number + 1).values
    above = (size > least).nonzero().flatten()
    return torch.cat([above, (size == least).nonzero().flatten()[: number - len(above)]])
