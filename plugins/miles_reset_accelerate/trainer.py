"""Accelerate, resumed by a policy."""

import os
import random
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from miles_reset import PolicyError, ResumePolicy, ResumeReport, open_checkpoint, plan_resume

if TYPE_CHECKING:
    from accelerate import Accelerator

_ITSELF = ("FSDP", "DEEPSPEED", "MEGATRON_LM")


def resume_accelerate(
    accelerator: "Accelerator", folder: str | os.PathLike[str], policy: ResumePolicy, **options: Any
) -> list[ResumeReport]:
    """Do what ``accelerator.load_state(folder)`` does, with a policy.

    Accelerate loads weights, samplers and the objects that were registered for checkpointing. What becomes
    of optimizers, schedulers, loss scale and random numbers is the policy's. Accelerate saves no iteration:
    a policy that leaves it to the default starts at what the caller knows.

    Args:
        accelerator: It has prepared the models, optimizers and schedulers.
        folder: What ``save_state`` wrote.
        policy: What comes back.
        options: For ``load_state``.

    Returns:
        A report for each optimizer.

    Raises:
        ResetError: The policy cannot be carried out. Nothing was changed.
    """
    if accelerator.distributed_type.name in _ITSELF:
        name = accelerator.distributed_type.name
        raise PolicyError("optimizer", f"comes back by {name} itself, which knows no policy.")
    policy = policy.infer({"iteration": "restore-if-present"}, "Accelerate saves none")
    found = open_checkpoint(Path(folder), allow=policy.allow)
    optimizers, schedulers = accelerator._optimizers, accelerator._schedulers
    scaler = accelerator.scaler
    plans = []
    for i, optimizer in enumerate(optimizers):
        own = optimizer.optimizer
        mine = [(j, s) for j, s in enumerate(schedulers) if _optimizer_of(s) is own]
        if len(mine) > 1:
            raise PolicyError("scheduler", f"is not clear: optimizer {i} has {len(mine)} schedulers.")
        number, scheduler = mine[0] if mine else (0, None)
        parts = {
            **found.parts,
            "optimizer": found.part(f"optimizer_{i}" if i else "optimizer"),
            "scheduler": found.part(f"scheduler_{number}" if number else "scheduler"),
        }
        plans.append(
            plan_resume(
                policy,
                replace(found, parts=parts),
                optimizer=own,
                scheduler=getattr(scheduler, "scheduler", scheduler),
                extras={"grad_scaler": scaler} if scaler is not None else {},
            )
        )
    rng = _random_numbers()
    accelerator._optimizers, accelerator._schedulers, accelerator.scaler = [], [], None
    try:
        accelerator.load_state(str(folder), **options)
    finally:
        accelerator._optimizers, accelerator._schedulers, accelerator.scaler = optimizers, schedulers, scaler
    _set_random_numbers(rng)
    return [plan.apply() for plan in plans]


def _optimizer_of(scheduler: Any) -> Any:
    held = getattr(scheduler, "scheduler", scheduler).optimizer
    return getattr(held, "optimizer", held)


def _random_numbers() -> tuple[Any, ...]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda


def _set_random_numbers(states: tuple[Any, ...]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    if states[3]:
        torch.cuda.set_rng_state_all(states[3])
