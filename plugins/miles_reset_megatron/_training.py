"""A resume at the place of Megatron's load or of miles', driven by their arguments."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from miles_reset import CheckpointError, default_registry, open_checkpoint, plan_resume
from miles_reset import reset_optimizer_states as reset
from miles_reset.cadence import ResetClock
from miles_reset.policy import ResumePolicy
from miles_reset.scheduler import Schedule, SchedulerRule
from miles_reset_megatron._adapter import load_lora_adapter
from miles_reset_megatron._arguments import adapter_folder, fresh_start, policy_from_args

logger = logging.getLogger("miles_reset")


def resume_training(
    args: Any,
    model: Any,
    optimizer: Any = None,
    opt_param_scheduler: Any = None,
    *,
    load: Callable[..., Any] | None = None,
    clock: ResetClock | None = None,
    **options: Any,
) -> int:
    """Resume as the arguments say, and return the iteration.

    In Megatron's ``setup_model_and_optimizer``, and in miles' ``initialize_model_and_optimizer``::

        iteration = resume_training(args, model, optimizer, opt_param_scheduler, load=load_checkpoint)

    Megatron's own function loads the weights, and sharded optimizers. The scheduler and the count come back
    here: once, and also where the optimizer does not. An adapter's count beats that of its base model.

    Args:
        args: The arguments; see :func:`policy_from_args`.
        model: The model, or its chunks.
        optimizer: The live optimizer.
        opt_param_scheduler: The live scheduler, just built.
        load: Megatron's ``load_checkpoint``, or the trainer's.
        clock: When resets are due. What was due at the iteration and not done is done here.
        options: What :func:`load_lora_adapter` takes besides.

    Raises:
        PolicyError: See :func:`policy_from_args`.
        CheckpointError: See :func:`load_lora_adapter`.
        RankDisagreementError: See :func:`load_lora_adapter`.
    """
    policy = policy_from_args(args)
    folder = adapter_folder(args)
    extras = {**({"reset_clock": clock} if clock is not None else {}), **options.pop("extras", {})}
    resumed: int | None
    if folder is None:
        resumed, unit, done = _whole(args, policy, model, optimizer, opt_param_scheduler, load), "step", 0
    else:
        base = _base(args, model, load)
        _, resumed = load_lora_adapter(
            model, folder, optimizer=optimizer, opt_param_scheduler=opt_param_scheduler, policy=policy,
            extras=extras, **options,
        )  # fmt: skip
        resumed, unit, done = base if resumed is None else resumed, "rollout", 1  # the last that is done
    if clock is not None and optimizer is not None and resumed and unit == clock.schedule.unit:
        if policy.reset.on_resume:
            clock.done(resumed + done)
        else:
            clock(optimizer, resumed + done)
    return resumed or 0


def _base(args: Any, model: Any, load: Callable[..., Any] | None) -> int | None:
    """Load the weights that the adapter is over; its own optimizer and scheduler come with the adapter."""
    if load is None:
        return None
    with _set(args, no_load_optim=True):
        return _iteration(load(model, None, None))


def _whole(
    args: Any,
    policy: ResumePolicy,
    model: Any,
    optimizer: Any,
    scheduler: Any,
    load: Callable[..., Any] | None,
) -> int | None:
    path = getattr(args, "load", None)
    if load is None:
        raise CheckpointError(str(path), "model", "is no adapter: give load=, which loads the weights.")
    if fresh_start(args) and policy.on_missing == "fresh":
        load(model, optimizer, scheduler)
        return policy.iteration if isinstance(policy.iteration, int) else 0
    found = open_checkpoint(_chosen(path, getattr(args, "ckpt_step", None)), allow=_allowed(policy))
    there = found.part("optimizer").there
    back = optimizer is not None and (
        policy.optimizer == "restore" or (policy.optimizer == "restore-if-present" and there)
    )
    # What the policy refuses is refused before the weights are loaded.
    choices = {**policy.model_dump(exclude_unset=True), "rng": "fresh"}
    choices |= {"optimizer": "fresh"} if back else {}
    plan = plan_resume(
        ResumePolicy.from_dict(choices), found, optimizer=None if back else optimizer, scheduler=scheduler
    )
    outcome = {line.part: line.outcome for line in plan.parts}
    schedule = Schedule(scheduler, default_registry().table(SchedulerRule)) if scheduler is not None else None
    own = schedule.owned(schedule.groups) if schedule is not None else []
    with _set(args, no_load_optim=not back, no_load_rng=policy.rng == "fresh"):
        load(model, optimizer, scheduler if outcome["scheduler"] == "restore" else None)
    if schedule is not None and back and outcome["scheduler"] != "restore":
        schedule.put(own)  # the optimizer has brought the saved rate with it
    report = plan.apply()
    if back:
        logger.info("the optimizer came back by Megatron's own load")
        if policy.reset.on_resume:
            reset(optimizer)
    return report.iteration


def _chosen(path: Any, step: int | None) -> Path:
    return Path(path) / f"iter_{step:07d}" if step is not None else Path(path)


def _allowed(policy: ResumePolicy) -> list[str]:
    """Return what Megatron's files need: they hold its arguments next to all the rest."""
    return [*policy.allow, "argparse.Namespace"]


def _iteration(returned: Any) -> int | None:
    """Return the first of what Megatron's function returns."""
    first = returned[0] if isinstance(returned, (tuple, list)) and returned else returned
    return first if isinstance(first, int) else None


@contextlib.contextmanager
def _set(args: Any, **flags: bool) -> Iterator[None]:
    """Set flags for a while, and only to what they are not already."""
    before = {name: getattr(args, name) for name in flags if hasattr(args, name)}
    for name, flag in flags.items():
        setattr(args, name, bool(before.get(name)) or flag)
    try:
        yield
    finally:
        for name in flags:
            if name in before:
                setattr(args, name, before[name])
            else:
                delattr(args, name)
