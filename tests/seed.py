"""The algorithm that miles_reset replaces, written from its description, as a yardstick.

It recurses through chains, sub-optimizers and ``.optimizer``, knows history keys by class, zeroes
them one by one while it walks, and refuses classes and keys that it does not know.
"""

from __future__ import annotations

from typing import Any

import torch

from miles_reset import UnsupportedOptimizerState

HISTORY_KEYS: dict[str, tuple[str, ...]] = {
    "TensorParallelAdaptiveMuon": ("momentum_buffer", "moment2_buffer"),
    "TensorParallelMuon": ("momentum_buffer",),
    "FusedAdamLike": ("exp_avg", "exp_avg_sq"),
    "AdamW": ("exp_avg", "exp_avg_sq"),
    "Adam": ("exp_avg", "exp_avg_sq"),
}


def seed_reset(optimizer: Any) -> None:
    """Reset a tree of optimizers the way that the seed does."""
    if hasattr(optimizer, "chained_optimizers"):
        for child in optimizer.chained_optimizers:
            seed_reset(child)
    elif hasattr(optimizer, "sub_optimizers"):
        for child in optimizer.sub_optimizers:
            seed_reset(child)
    elif hasattr(optimizer, "optimizer"):
        if optimizer.optimizer is not None:
            seed_reset(optimizer.optimizer)
    else:
        _reset_leaf(optimizer)


def _reset_leaf(optimizer: Any) -> None:
    names = [cls.__name__ for cls in type(optimizer).__mro__]
    keys = next((HISTORY_KEYS[name] for name in names if name in HISTORY_KEYS), None)
    if keys is None:
        raise UnsupportedOptimizerState("", f"unknown optimizer {names[0]}")
    for group in optimizer.param_groups:
        _reset_step(group)
    for state in optimizer.state.values():
        unknown = state.keys() - {*keys, "step", "master_param"}
        if unknown:
            raise UnsupportedOptimizerState("", f"unknown keys {sorted(unknown)}")
        for key in keys:
            if key in state:
                state[key].zero_()
        _reset_step(state)


def _reset_step(holder: Any) -> None:
    step = holder.get("step")
    if isinstance(step, torch.Tensor):
        step.zero_()
    elif step is not None:
        holder["step"] = 0
