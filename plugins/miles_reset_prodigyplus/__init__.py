"""What the optimizers of prodigy-plus-schedule-free remember."""

from miles_reset import StateSchema, hookimpl


@hookimpl
def miles_reset_schemas() -> list[StateSchema]:
    """Return the schemas of prodigy-plus-schedule-free."""
    return []
