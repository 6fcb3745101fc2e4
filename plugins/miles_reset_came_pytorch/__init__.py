"""What CAME of came-pytorch remembers.

Read off came-pytorch 0.1. State is made in the dtype of the gradient, and in float32 where that is a narrow
one: ``load_state_dict`` casts it to the weights' dtype, and a reset casts it back.
"""

from functools import cache
from typing import Any

from miles_reset import Initial, StateSchema, clock, history, hookimpl, momentum, variance


@cache  # the same record each time
def _zeros(key: str) -> Initial:
    """Return zeros in place of what stands under a key, in the dtype that a fresh optimizer gives them."""

    def zeros(parameter: Any, group: Any, optimizer: Any) -> Any:
        held = optimizer.state[parameter][key]
        fresh = held.new_zeros(held.shape)
        return fresh.float() if parameter.element_size() < 4 else fresh.to(parameter.dtype)

    return Initial.computed(zeros)


@hookimpl
def miles_reset_schemas() -> list[StateSchema]:
    """Return the schema of came-pytorch."""
    means = ("exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_res_row", "exp_avg_res_col")
    return [
        StateSchema("came_pytorch.CAME.CAME",
            momentum("exp_avg", _zeros("exp_avg")), *(variance(key, _zeros(key)) for key in means),
            history("RMS"), clock("step")),
    ]  # fmt: skip
