"""How torchtune's optimizers that step in the backward pass are unwrapped.

From the source of torchtune 0.6 and, for OptimizerInBackward, of its repository, where no release has it.
Not run here: torchtune 0.6 needs an older torchao.
"""

from miles_reset import UnwrapRule, hookimpl


@hookimpl
def miles_reset_unwrap_rules() -> list[UnwrapRule]:
    """Return the rules of both: neither has state of its own."""
    return [
        UnwrapRule("torchtune.training.memory.OptimizerInBackwardWrapper", "optim_map"),
        UnwrapRule("torchtune.modules.optim.OptimizerInBackward", "_optimizers"),
    ]
