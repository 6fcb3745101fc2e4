"""What the optimizers of adamp remember.

Read off adamp 0.3.
"""

from miles_reset import StateSchema, clock, hookimpl, momentum, variance


@hookimpl
def miles_reset_schemas() -> list[StateSchema]:
    """Return the schemas of adamp."""
    return [
        StateSchema("adamp.adamp.AdamP",
            momentum("exp_avg"), variance("exp_avg_sq"), clock("step")),
        StateSchema("adamp.sgdp.SGDP",
            momentum("momentum")),
    ]  # fmt: skip
