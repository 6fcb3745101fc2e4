"""What the optimizers of adam-atan2-pytorch remember."""

from miles_reset import StateSchema, hookimpl


@hookimpl
def miles_reset_schemas() -> list[StateSchema]:
    """Return the schemas of adam-atan2-pytorch."""
    return []
