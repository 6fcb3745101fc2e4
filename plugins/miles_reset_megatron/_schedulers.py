"""How Megatron's OptimizerParamScheduler comes back."""

from collections.abc import Sequence
from typing import Any

from miles_reset.scheduler import SchedulerRule


def _owns(scheduler: Any) -> Sequence[str]:
    """Return what it writes; where the code's values win over the file's, not the bounds of the rate."""
    bounds = () if scheduler.override_opt_param_scheduler else ("max_lr", "min_lr")
    return ("lr", "weight_decay", *bounds)


def _restore(scheduler: Any, state: Any) -> None:
    """Set the count, which its own load adds to the one that is there, and the values of the file.

    ``override_opt_param_scheduler`` is a choice made by hand, and stays: then the code's values win. The
    weight decay is set by a step of nothing; a load leaves that for the next step.
    """
    before = scheduler.max_lr, scheduler.min_lr
    takes = scheduler.use_checkpoint_opt_param_scheduler
    scheduler.num_steps = 0
    scheduler.use_checkpoint_opt_param_scheduler = not scheduler.override_opt_param_scheduler
    try:
        scheduler.load_state_dict(state)
    finally:
        scheduler.use_checkpoint_opt_param_scheduler = takes
    now = scheduler.max_lr, scheduler.min_lr
    for group in scheduler.optimizer.param_groups:
        for key, was, is_now in zip(("max_lr", "min_lr"), before, now, strict=True):
            if group.get(key) == was:  # else the group has bounds of its own
                group[key] = is_now
    scheduler.step(increment=0)


_SETTINGS = (
    "max_lr", "min_lr", "lr_warmup_steps", "lr_decay_steps", "lr_decay_style",
    "start_wd", "end_wd", "wd_incr_steps", "wd_incr_style",
)  # fmt: skip

SCHEDULERS = [
    SchedulerRule("megatron.core.optimizer_param_scheduler.OptimizerParamScheduler", _owns,
        restore=_restore, settings=_SETTINGS),
]  # fmt: skip
