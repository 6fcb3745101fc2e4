"""What the optimizers of torchtitan remember."""

from miles_reset import StateSchema, hookimpl


@hookimpl
def miles_reset_schemas() -> list[StateSchema]:
    """Return the schemas of torchtitan."""
    return []
