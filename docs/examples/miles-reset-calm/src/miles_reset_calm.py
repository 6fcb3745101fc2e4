"""What the optimizer of calm remembers.

Read off calm 0.1. The class is claimed under the name of the module that defines it, ``Calm.__module__``,
wherever one imports it from.
"""

from miles_reset import Initial, StateSchema, history, hookimpl, momentum


@hookimpl
def miles_reset_schemas() -> list[StateSchema]:
    """Return the schema: a running mean of the gradients, and how far it still is from being one."""
    return [StateSchema("calm.Calm", momentum("mean"), history("decay", Initial.ONES))]
