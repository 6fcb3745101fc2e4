"""What torchrec's optimizers remember, and how its wrappers are unwrapped.

Held to the law through torchrec 1.9. FusedOptimizer, whose moments lie in the buffers of kernels, and
SemisyncOptimizer are refused: from the source of torchrec 1.9, not run here, for they need sharded
embeddings.
"""

import sys
from typing import Any

from miles_reset import Initial, StateSchema, UnwrapRule, clock, hookimpl, variance

_OPTIM = "torchrec.optim"


def _first_rows(parameter: Any, group: Any, optimizer: Any) -> Any:
    """Return the accumulator of each row as it is built: the mean of a row of the initial value."""
    value = group["initial_accumulator_value"]
    start = complex(value, value) if parameter.is_complex() else value
    return parameter.new_full(parameter.shape, start).mean(axis=1).view(-1, 1)


def _first_rate(parameter: Any, group: Any, optimizer: Any) -> Any:
    """Return the rate at which the warm-up starts, by the function that its own module has for it."""
    module: Any = sys.modules["torchrec.optim.warmup"]
    return optimizer._lr * module._get_multiplier(optimizer._stages[0], 0)


def _warms_lr_up(wrapper: Any) -> str | None:
    name = wrapper._lr_param
    return None if name == "lr" else f"it warms {name!r} up, and only 'lr' is known."


def _in_kernels(optimizer: Any) -> str | None:
    return "its moments lie in the buffers of the embeddings' kernels, which no walk over the state reaches."


def _averages(optimizer: Any) -> str | None:
    return "it averages models at intervals, and what a fresh one takes for the global model is not known."


def _holds_none(optimizer: Any) -> list[Any]:
    return []


@hookimpl
def miles_reset_schemas() -> list[StateSchema]:
    """Return the schemas of torchrec."""
    return [
        StateSchema(f"{_OPTIM}.rowwise_adagrad.RowWiseAdagrad",
            variance("sum", Initial.computed(_first_rows)), clock("step")),
        StateSchema(f"{_OPTIM}.fused.FusedOptimizer", ready=_in_kernels),
    ]  # fmt: skip


@hookimpl
def miles_reset_unwrap_rules() -> list[UnwrapRule]:
    """Return the rules of the wrappers, whose state and groups are those of what they hold."""
    return [
        UnwrapRule(f"{_OPTIM}.keyed.KeyedOptimizerWrapper", "_optimizer"),
        # Base of GradientClippingOptimizer.
        UnwrapRule(f"{_OPTIM}.keyed.OptimizerWrapper", "_optimizer"),
        # Keeps its count in the state of the optimizer inside, under a parameter of its own, and the rate
        # that belongs to it in the groups.
        UnwrapRule(f"{_OPTIM}.warmup.WarmupOptimizer", "_optimizer",
            clock("warmup", at="child"), clock("lr", Initial.computed(_first_rate), at="group"),
            ready=_warms_lr_up),
        UnwrapRule(f"{_OPTIM}.keyed.CombinedOptimizer", "_optims"),
        UnwrapRule(f"{_OPTIM}.semi_sync.SemisyncOptimizer", "_optimizer", ready=_averages),
        UnwrapRule(f"{_OPTIM}.fused.EmptyFusedOptimizer", _holds_none),
    ]  # fmt: skip
