"""What AdaBound of adabound remembers.

Read off adabound 0.0.5. Its ``base_lrs`` are the rates that the constructor was given, which those of a
schedule are compared with.
"""

from miles_reset import StateSchema, clock, hookimpl, kept, momentum, variance


@hookimpl
def miles_reset_schemas() -> list[StateSchema]:
    """Return the schema of adabound."""
    return [
        StateSchema("adabound.adabound.AdaBound",
            momentum("exp_avg"), variance("exp_avg_sq"), variance("max_exp_avg_sq"), clock("step"),
            kept("base_lrs", at="attribute")),
    ]  # fmt: skip
