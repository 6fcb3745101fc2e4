"""What the optimizer of prodigy-plus-schedule-free remembers.

Read off prodigy-plus-schedule-free 2.0.1. The rules hold in training and in evaluation mode.
"""

from typing import Any

from miles_reset import Initial, StateSchema, clock, history, hookimpl, kept, momentum, variance


def _slice(parameter: Any, group: Any, optimizer: Any) -> Any:
    """Return every eleventh weight, in bfloat16 where the weights are float32."""
    part = parameter.detach().ravel()[::11]
    return part.bfloat16() if str(part.dtype) == "torch.float32" else part


def _start(parameter: Any, group: Any, optimizer: Any) -> Any:
    """Return the slice, or one zero for all if all weights are zero."""
    start = _slice(parameter, group, optimizer)
    return start if parameter.any() else start.new_zeros(())


def _no_sums(parameter: Any, group: Any, optimizer: Any) -> Any:
    part = _slice(parameter, group, optimizer)
    return part.new_zeros(part.shape)


def _nothing(parameter: Any, group: Any, optimizer: Any) -> int:
    return 0


# With prodigy_steps it lets go of s and p0 in time, and makes them again where there is no entry.
_COPY = Initial.either("prodigy_steps", Initial.ABSENT_ENTRY, Initial.COPY)
_ZEROS = Initial.either("prodigy_steps", Initial.ABSENT_ENTRY, Initial.ZEROS)
_FACTOR = Initial.either("factored_fp32", Initial.ZEROS.as_dtype("float32"), Initial.ZEROS)

_SUMS = ("d_denom", "d_numerator", "prev_d_numerator", "max_d_numerator")


@hookimpl
def miles_reset_schemas() -> list[StateSchema]:
    """Return the schema of prodigy-plus-schedule-free."""
    return [
        StateSchema("prodigyplus.prodigy_plus_schedulefree.ProdigyPlusScheduleFree",
            history("z", _COPY), momentum("exp_avg", _ZEROS), variance("exp_avg_sq"),
            variance("exp_avg_sq_row", _FACTOR), variance("exp_avg_sq_col", _FACTOR),
            kept("exp_avg_sq_metadata"),
            history("s", Initial.computed(_no_sums)), history("p0", Initial.computed(_start)),
            history("exp_avg_x0_dot", Initial.ABSENT),
            history("max_x0_minus_l1_norm", Initial.constant(1e-8)),
            history("max_x0_minus_l2_norm", Initial.constant(1e-8)),
            clock("k", Initial.ONES, at="group"),
            history("d", Initial.group("d0"), at="group"), history("d_prev", Initial.group("d0"), at="group"),
            history("shared_d", Initial.NONE, at="group"),
            *(history(key, Initial.computed(_nothing), at="group") for key in _SUMS),
            history("running_d_numerator", at="group"), history("running_d_denom", at="group"),
            history("weight_sum", Initial.ABSENT, at="group"),
            history("running_weight_sum", Initial.ABSENT, at="group"),
            history("effective_lr", Initial.default("effective_lr"), at="group"),
            kept("train_mode", at="group"),
            clock("parameters_to_process", Initial.NONE, at="attribute")),
    ]  # fmt: skip
