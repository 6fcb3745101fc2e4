"""What the optimizers of lion-pytorch remember."""

from miles_reset import StateSchema, hookimpl


@hookimpl
def miles_reset_schemas() -> list[StateSchema]:
    """Return the schemas of lion-pytorch."""
    return []
