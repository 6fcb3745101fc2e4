"""What Adam-mini remembers: a mean of gradients, and one mean of squares for each block of a parameter.

Read off adam-mini 1.1. How a parameter is split into blocks is kept: by heads, by neurons, or not at all.
"""

from miles_reset import StateSchema, clock, hookimpl, kept, momentum, variance


@hookimpl
def miles_reset_schemas() -> list[StateSchema]:
    """Return the schema of adam-mini."""
    return [
        StateSchema("adam_mini.adam_mini.Adam_mini",
            momentum("m"), variance("v"), variance("vmean"), clock("step"),
            kept("head_per_gpu"), kept("neuron_per_gpu"), kept("block_numel"), kept("reduced")),
    ]  # fmt: skip
