"""What the optimizers of pytorch-optimizer remember, and how its wrappers are unwrapped.

Read off pytorch-optimizer 4.1. Its base classes claim nothing: each optimizer has a record of its own.
"""

from miles_reset import StateSchema, UnwrapRule, hookimpl
from miles_reset_pytorch_optimizer._computed import COMPUTED
from miles_reset_pytorch_optimizer._moments import MOMENTS
from miles_reset_pytorch_optimizer._wrappers import WRAPPERS


@hookimpl
def miles_reset_schemas() -> list[StateSchema]:
    """Return the schemas of pytorch-optimizer."""
    return [*MOMENTS, *COMPUTED]


@hookimpl
def miles_reset_unwrap_rules() -> list[UnwrapRule]:
    """Return the rules of its wrappers."""
    return WRAPPERS
