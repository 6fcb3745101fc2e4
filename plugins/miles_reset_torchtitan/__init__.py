"""How the containers of torchtitan are unwrapped.

Held to the law through torchtitan 0.3. What earlier versions have in another module is from their
sources, not run here. The hook that makes Adam's state in bfloat16 makes it where there is none: a reset
leaves the state, and its dtype, where it is.
"""

from typing import Any

from miles_reset import UnwrapRule, hookimpl


def _all(container: Any) -> list[Any]:
    """Return the optimizers. Nothing reads the state and groups that the container has as an optimizer."""
    optimizers: list[Any] = container.optimizers
    return optimizers


@hookimpl
def miles_reset_unwrap_rules() -> list[UnwrapRule]:
    """Return the rule of the container, and of OptimizersInBackwardContainer, which is one."""
    return [
        UnwrapRule("torchtitan.components.optimizer.optimizer.OptimizersContainer", _all),
        UnwrapRule("torchtitan.components.optimizer.OptimizersContainer", _all),  # before 0.3
    ]
