"""What the optimizers of adam-atan2-pytorch remember, and where a parameter was that is drawn back there.

Read off adam-atan2-pytorch 0.4. A fresh optimizer draws a parameter back to where it is now.
"""

from typing import Any

from miles_reset import Initial, StateSchema, clock, history, hookimpl, momentum, variance


def _in_order(parameter: Any, group: Any, optimizer: Any) -> Any:
    """Return the weights from the least to the greatest."""
    return parameter.detach().flatten().sort(dim=-1).values.reshape(parameter.shape)


_START = history("param_init", Initial.COPY)
_ADAM = (momentum("exp_avg"), variance("exp_avg_sq"), clock("steps"))

# The second moment starts as the first gradient's square, which is made where the parameter has no entry.
_ADOPT = (momentum("m"), variance("v", Initial.ABSENT_ENTRY), clock("steps"))


@hookimpl
def miles_reset_schemas() -> list[StateSchema]:
    """Return the schemas of adam-atan2-pytorch."""
    here = "adam_atan2_pytorch"
    return [
        StateSchema(f"{here}.adam_atan2.AdamAtan2", *_ADAM, _START),
        StateSchema(f"{here}.adam_atan2_clip_grok.AdamAtan2ClipGrok", *_ADAM, _START),
        # Gradients are made orthogonal to a mean of past ones, once there is one.
        StateSchema(f"{here}.adam_atan2_with_orthog_grad.AdamAtan2",
            *_ADAM, _START, history("grad_emas", Initial.EMPTY)),
        StateSchema(f"{here}.adam_atan2_with_wasserstein_reg.AdamAtan2",
            *_ADAM, history("param_init", Initial.computed(_in_order))),
        StateSchema(f"{here}.adopt.Adopt", *_ADOPT),
        StateSchema(f"{here}.adopt_atan2.AdoptAtan2", *_ADOPT, _START),
        StateSchema(f"{here}.foreach.AdamAtan2", *_ADAM, _START),
        StateSchema(f"{here}.muon_adam_atan2.MuonAdamAtan2",
            *_ADAM, _START, variance("exp_avg_sq_orthog_row")),
        StateSchema(f"{here}.polar_adam_atan2.PolarAdamAtan2", *_ADAM, _START),
    ]  # fmt: skip
