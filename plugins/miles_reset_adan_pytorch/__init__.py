"""What the optimizers of adan-pytorch remember."""

from miles_reset import StateSchema, hookimpl


@hookimpl
def miles_reset_schemas() -> list[StateSchema]:
    """Return the schemas of adan-pytorch."""
    return []
