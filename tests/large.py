"""Optimizers with many parameters, and trees of many leaves, to count and to time on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import AdamW

from miles_reset import StateSchema, clock, hookimpl, momentum, variance

ELEMENTS = 64
"""The elements of a parameter, unless a test says otherwise: few, so that bookkeeping shows."""


def stepped_adamw(parameters: int, elements: int = ELEMENTS, **options: Any) -> AdamW:
    """Return an AdamW that has made one step: three state tensors for each parameter."""
    device, dtype = options.pop("device", "cpu"), options.pop("dtype", torch.float32)
    weights = [
        torch.nn.Parameter(torch.ones(elements, device=device, dtype=dtype)) for _ in range(parameters)
    ]
    optimizer = AdamW(weights, **options)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


class HybridStandIn:
    """Stands in for HybridDeviceOptimizer, which needs a GPU: one AdamW for each parameter.

    Its name makes Megatron's rule hold for it.
    """

    __module__ = "megatron.core.optimizer.cpu_offloading.hybrid_optimizer"
    __qualname__ = "HybridDeviceOptimizer"

    def __init__(self, leaves: int, elements: int = ELEMENTS) -> None:
        self.sub_optimizers = [stepped_adamw(1, elements) for _ in range(leaves)]
        weights = [leaf.param_groups[0]["params"][0] for leaf in self.sub_optimizers]
        self.param_groups = [{**self.sub_optimizers[0].param_groups[0], "params": weights}]


def leaves_of(optimizer: Any) -> list[Any]:
    """Return the leaves of a `HybridStandIn`, or an optimizer itself."""
    return getattr(optimizer, "sub_optimizers", [optimizer])


def state_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in the state of the leaves."""
    for leaf in leaves_of(optimizer):
        for entry in leaf.state.values():
            yield from entry.values()


class InventedPlugin:
    """A plugin that declares optimizers of a library that does not exist, anew each time it is asked."""

    def __init__(self, number: int, schemas: int) -> None:
        self.__name__ = f"invented{number}"
        self.number, self.schemas = number, schemas

    @hookimpl
    def miles_reset_schemas(self) -> list[StateSchema]:
        """Return schemas like Adam's."""
        return [
            StateSchema(f"invented{self.number}.optimizers.Optimizer{i}",
                momentum("exp_avg"), variance("exp_avg_sq"), clock("step"))
            for i in range(self.schemas)
        ]  # fmt: skip
