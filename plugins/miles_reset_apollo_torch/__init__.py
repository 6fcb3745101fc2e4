"""What the optimizers of apollo-torch remember."""

from miles_reset import StateSchema, hookimpl


@hookimpl
def miles_reset_schemas() -> list[StateSchema]:
    """Return the schemas of apollo-torch."""
    return []
