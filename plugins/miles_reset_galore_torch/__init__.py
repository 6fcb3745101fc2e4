"""What the optimizers of galore-torch remember."""

from miles_reset import StateSchema, hookimpl


@hookimpl
def miles_reset_schemas() -> list[StateSchema]:
    """Return the schemas of galore-torch."""
    return []
