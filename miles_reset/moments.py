"""What the next update becomes where the moments and the clock of an optimizer no longer fit."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from miles_reset.schema import Role, Slot
from miles_reset.walk import Node


@dataclass
class Moments:
    """What is reset of the moments and the clock of one optimizer."""

    node: Node
    reset: dict[Role, bool] = field(default_factory=dict)
    clock: float = 0

    def see(self, slot: Slot, value: Any, reset: int) -> None:
        """Note one value."""
        self.reset[slot.role] = self.reset.get(slot.role, False) or bool(reset)
        is_number = value.numel() == 1 if isinstance(value, torch.Tensor) else isinstance(value, (int, float))
        if slot.role is Role.CLOCK and is_number:
            self.clock = max(self.clock, float(value))

    def note(self) -> str:
        """Say how large the next update of Adam's rule is beside a steady one, if it is not as large."""
        groups = getattr(self.node.obj, "param_groups", None) or [{}]
        betas, seen = groups[0].get("betas"), self.reset
        if not (
            isinstance(betas, (list, tuple))
            and len(betas) == 2
            and {*_ADAM} <= seen.keys()
            and any(seen.values())
        ):
            return ""
        first, second = map(float, betas)
        done = 1 if seen[Role.CLOCK] else self.clock + 1
        mean = (1 - first if seen[Role.MOMENTUM] else 1) / (1 - first**done)
        square = (1 - second if seen[Role.VARIANCE] else 1) / (1 - second**done)
        factor = mean / math.sqrt(square) if square else math.inf
        if math.isclose(factor, 1, rel_tol=0.01):
            return ""
        parts = ", ".join(f"{role} {'reset' if seen[role] else 'kept'}" for role in _ADAM)
        at = "" if seen[Role.CLOCK] else f" at {self.clock:,.0f}"
        return (
            f"{type(self.node.obj).__name__}: {parts}{at}. By Adam's rule the next update of what was reset "
            f"is {factor:.4g} times a steady one's."
        )


_ADAM = (Role.MOMENTUM, Role.VARIANCE, Role.CLOCK)
