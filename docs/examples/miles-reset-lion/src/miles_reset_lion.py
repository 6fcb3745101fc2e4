"""What the optimizers of lion-pytorch remember.

Read off lion-pytorch 0.2.5. Its three classes are all called Lion; each is claimed under the name of the
module that defines it, ``Lion.__module__``, and not under ``lion_pytorch.Lion``, from where one imports it.
"""

from miles_reset import StateSchema, hookimpl, momentum

_MODULES = ("lion_pytorch", "foreach", "cautious_lion")


@hookimpl
def miles_reset_schemas() -> list[StateSchema]:
    """Return the schemas: a running mean of the gradients, zero at first, and no count of steps."""
    return [StateSchema(f"lion_pytorch.{module}.Lion", momentum("exp_avg")) for module in _MODULES]
