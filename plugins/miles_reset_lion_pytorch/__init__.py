"""What the optimizers of lion-pytorch remember: three classes of one name, in three modules.

Read off lion-pytorch 0.2.5.
"""

from miles_reset import StateSchema, hookimpl, kept, momentum


@hookimpl
def miles_reset_schemas() -> list[StateSchema]:
    """Return the schemas of lion-pytorch."""
    return [
        StateSchema(f"lion_pytorch.{module}.Lion", momentum("exp_avg"), kept("_init_lr", at="attribute"))
        for module in ("lion_pytorch", "cautious_lion", "foreach")
    ]
