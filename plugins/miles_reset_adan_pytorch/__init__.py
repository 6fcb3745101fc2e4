"""What Adan of adan-pytorch remembers: three means, and the last gradient.

Read off adan-pytorch 0.1.
"""

from miles_reset import StateSchema, clock, history, hookimpl, momentum, variance


@hookimpl
def miles_reset_schemas() -> list[StateSchema]:
    """Return the schema of adan-pytorch."""
    return [
        StateSchema("adan_pytorch.adan.Adan",
            momentum("m"), momentum("v"), variance("n"), history("prev_grad"), clock("step")),
    ]  # fmt: skip
