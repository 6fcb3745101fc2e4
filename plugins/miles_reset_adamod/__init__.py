"""What AdaMod of adamod remembers: the moments, and a mean of past step sizes.

Read off adamod 0.0.3.
"""

from miles_reset import StateSchema, clock, history, hookimpl, momentum, variance


@hookimpl
def miles_reset_schemas() -> list[StateSchema]:
    """Return the schema of adamod."""
    return [
        StateSchema("adamod.adamod.AdaMod",
            momentum("exp_avg"), variance("exp_avg_sq"), history("exp_avg_lr"), clock("step")),
    ]  # fmt: skip
