"""What the optimizers of lomo-optim remember, which step while gradients are computed.

Read off lomo-optim 0.1. All is in attributes. Lomo remembers no gradients; the scale of the loss, which it
finds by itself for float16, is kept as that of any grad scaler is.
"""

from miles_reset import Initial, StateSchema, clock, history, hookimpl, kept, scratch, variance

# What to clip by is computed by grad_norm(), for the backward pass that comes next.
_CLIPPED = (history("clip_coef", Initial.NONE, at="attribute"), scratch("grad_norms", at="attribute"))


@hookimpl
def miles_reset_schemas() -> list[StateSchema]:
    """Return the schemas of lomo-optim."""
    squares = ("exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col")
    return [
        StateSchema("lomo_optim.lomo.Lomo",
            *_CLIPPED, kept("loss_scaler", at="attribute"), kept("first_backward", at="attribute")),
        StateSchema("lomo_optim.adalomo.AdaLomo",
            *(variance(key, at="attribute") for key in squares), clock("step_num", at="attribute"),
            *_CLIPPED),
    ]  # fmt: skip
