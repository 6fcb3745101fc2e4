"""What the schedulers of torch.optim own in param groups, and how it is found again."""

from collections.abc import Mapping, Sequence
from typing import Any

from miles_reset.scheduler import SchedulerRule, put

_LIBRARY = "torch.optim.lr_scheduler"


def _momentum(scheduler: Any) -> Sequence[str]:
    return ("momentum", "base_momentum", "max_momentum") if getattr(scheduler, "cycle_momentum", True) else ()


def _cyclic(scheduler: Any) -> Sequence[str]:
    return ("lr", "initial_lr", *_momentum(scheduler))


def _one_cycle(scheduler: Any) -> Sequence[str]:
    return ("lr", "initial_lr", "max_lr", "min_lr", *_momentum(scheduler))


def _last_rates(scheduler: Any) -> None:
    """Write the rates that it set last, and those that it starts from, unless only those inside have some."""
    for group, rate in zip(scheduler.optimizer.param_groups, scheduler._last_lr, strict=True):
        put(group, "lr", rate)
    for group, base in zip(
        scheduler.optimizer.param_groups, getattr(scheduler, "base_lrs", ()), strict=False
    ):
        put(group, "initial_lr", base)


def _cyclic_rates(scheduler: Any) -> None:
    """Write also the momentum, which it computes together with the rate."""
    if scheduler.cycle_momentum:
        for group, base, most in zip(
            scheduler.optimizer.param_groups, scheduler.base_momentums, scheduler.max_momentums, strict=True
        ):
            group["base_momentum"], group["max_momentum"] = base, most
    _computed_momentum(scheduler)
    _last_rates(scheduler)


def _one_cycle_rates(scheduler: Any) -> None:
    """Find the highest and lowest rates again: in the groups is what the live one was built with.

    The saved state has the first rate alone. The highest and the lowest are multiples of it that were
    given to the constructor (``div_factor``, ``final_div_factor``); they are taken to be the live one's.
    """
    for group, base in zip(scheduler.optimizer.param_groups, scheduler.base_lrs, strict=True):
        scale = base / group["initial_lr"]
        group["max_lr"], group["min_lr"] = group["max_lr"] * scale, group["min_lr"] * scale
    rates = _computed_momentum(scheduler)
    for computed, saved in zip(rates, scheduler._last_lr, strict=True):
        if abs(computed - saved) > 1e-9 * abs(saved):
            raise ValueError(
                f"its rate was {float(saved)}, and with the live one's div_factor and final_div_factor it "
                f"would be {float(computed)}: build it with those of the saved run"
            )
    _last_rates(scheduler)


def _computed_momentum(scheduler: Any) -> list[Any]:
    """Let it write the momentum of its last step, and return the rates of that."""
    called = getattr(scheduler, "_get_lr_called_within_step", False)
    scheduler._get_lr_called_within_step = True  # else it warns that it is not stepping
    try:
        rates: list[Any] = scheduler.get_lr()
    finally:
        scheduler._get_lr_called_within_step = called
    return rates


def _rebase(scheduler: Any, rate: float) -> None:
    """Start from another rate: each rate, above its floor, is a multiple of the first."""
    floor = float(getattr(scheduler, "eta_min", 0))
    for i, group in enumerate(scheduler.optimizer.param_groups):
        scale = (rate - floor) / (scheduler.base_lrs[i] - floor)
        put(group, "lr", floor + (group["lr"] - floor) * scale)
        put(group, "initial_lr", rate)
        scheduler.base_lrs[i] = rate
    scheduler._last_lr = [float(group["lr"]) for group in scheduler.optimizer.param_groups]


def _rebase_inner(scheduler: Any, rate: float) -> None:
    """Start all schedulers inside from another rate; what is in the groups counts once."""
    groups = scheduler._schedulers[0].optimizer.param_groups
    for one in scheduler._schedulers:
        if type(one).__name__ not in _PROPORTIONAL or getattr(one, "eta_min", None):
            raise ValueError(f"{type(one).__name__} inside it is not proportional to the rate it starts from")
    rates = [group["lr"] * rate / scheduler._schedulers[0].base_lrs[i] for i, group in enumerate(groups)]
    for one in scheduler._schedulers:
        one.base_lrs = [rate] * len(groups)
        one._last_lr = list(map(float, rates))
    for group, now in zip(groups, rates, strict=True):
        put(group, "lr", now)
        put(group, "initial_lr", rate)
    scheduler._last_lr = list(map(float, rates))


def _functions(scheduler: Any, state: Any) -> Sequence[str]:
    saved = state.get("lr_lambdas") if isinstance(state, Mapping) else None
    lost = [i for i, one in enumerate(saved or [None]) if one is None]
    name = type(scheduler).__name__
    return [f"{name} cannot save its functions of groups {lost}: the live ones go on"] if lost else []


def _scale(scheduler: Any, state: Any) -> Sequence[str]:
    lost = getattr(scheduler, "_scale_fn_custom", None) is not None and not state.get("_scale_fn_custom")
    return ["CyclicLR cannot save its scale_fn: the live one goes on"] if lost else []


def _swa(scheduler: Any, state: Any) -> Sequence[str]:
    return ["SWALR keeps swa_lr in the param groups alone: where they were not saved, the live one goes on"]


_PROPORTIONAL = (
    "StepLR", "MultiStepLR", "ConstantLR", "LinearLR", "ExponentialLR", "PolynomialLR",
    "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "LambdaLR", "MultiplicativeLR",
)  # fmt: skip
"""Those whose rates, above their floor, are multiples of the first."""
_WITH_FUNCTIONS = ("LambdaLR", "MultiplicativeLR")

SCHEDULERS = [
    SchedulerRule(f"{_LIBRARY}.LRScheduler", settle=_last_rates),
    *(
        SchedulerRule(f"{_LIBRARY}.{name}", settle=_last_rates, rebase=_rebase,
            forgets=_functions if name in _WITH_FUNCTIONS else None)
        for name in _PROPORTIONAL
    ),
    SchedulerRule(f"{_LIBRARY}.CyclicLR", _cyclic, settle=_cyclic_rates, forgets=_scale),
    SchedulerRule(f"{_LIBRARY}.OneCycleLR", _one_cycle, settle=_one_cycle_rates),
    SchedulerRule(f"{_LIBRARY}.SequentialLR", settle=_last_rates, rebase=_rebase_inner),
    SchedulerRule(f"{_LIBRARY}.ChainedScheduler", settle=_last_rates, rebase=_rebase_inner),
    SchedulerRule("torch.optim.swa_utils.SWALR", ("lr", "initial_lr", "swa_lr"),
        settle=_last_rates, forgets=_swa),
]  # fmt: skip
