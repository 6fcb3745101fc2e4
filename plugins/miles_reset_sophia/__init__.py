"""What SophiaG of sophia-opt remembers: a mean of gradients, and an estimate of the curvature.

Read off sophia-opt 0.2.
"""

from miles_reset import StateSchema, clock, hookimpl, momentum, variance


@hookimpl
def miles_reset_schemas() -> list[StateSchema]:
    """Return the schema of sophia-opt."""
    return [
        StateSchema("sophia_opt.SophiaG",
            momentum("exp_avg"), variance("hessian"), clock("step")),
    ]  # fmt: skip
