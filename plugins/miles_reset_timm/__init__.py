"""What the optimizers of timm remember.

Read off timm 1.0.31. Adafactor finds its rate anew in each step; the one in its groups is for others to see.
"""

from typing import Any

from miles_reset import (
    Initial,
    StateSchema,
    UnwrapRule,
    clock,
    history,
    hookimpl,
    kept,
    momentum,
    scratch,
    variance,
)

_BUFFER = momentum("momentum_buffer", Initial.SGD_BUFFER)
_ADAM = (momentum("exp_avg"), variance("exp_avg_sq"), clock("step"))


def _preconditioners(parameter: Any, group: Any, optimizer: Any) -> Any:
    """Return a scaled identity matrix, or its diagonal alone, for each dimension."""
    held = optimizer.state[parameter]["Q"]
    scale = group["precond_init_scale"] ** (1 / len(held))
    return [scale * (q.new_ones(len(q)).diag() if q.ndim == 2 else q.new_ones(q.shape)) for q in held]


@hookimpl
def miles_reset_schemas() -> list[StateSchema]:
    """Return the schemas of timm."""
    here = "timm.optim"
    return [
        StateSchema(f"{here}.adabelief.AdaBelief",
            momentum("exp_avg"), variance("exp_avg_var"), variance("max_exp_avg_var"), clock("step")),
        StateSchema(f"{here}.adafactor.Adafactor",
            *_ADAM, variance("exp_avg_sq_row"), variance("exp_avg_sq_col"), scratch("RMS")),
        StateSchema(f"{here}.adafactor_bv.AdafactorBigVision",
            *_ADAM, variance("exp_avg_sq_r"), variance("exp_avg_sq_c")),
        StateSchema(f"{here}.adahessian.Adahessian",
            momentum("exp_avg"), variance("exp_hessian_diag_sq"), clock("step"), clock("hessian step"),
            history("generator", Initial.seeded(2147483647), at="attribute")),
        StateSchema(f"{here}.adamp.AdamP", *_ADAM),
        StateSchema(f"{here}.adamw.AdamWLegacy", *_ADAM, variance("max_exp_avg_sq")),
        StateSchema(f"{here}.adan.Adan",
            momentum("exp_avg"), variance("exp_avg_sq"), history("exp_avg_diff"),
            history("neg_pre_grad", Initial.ABSENT), clock("step", at="group")),
        # The first gradient is squared into exp_avg_sq where there is no entry, whatever the count.
        StateSchema(f"{here}.adopt.Adopt",
            momentum("exp_avg"), variance("exp_avg_sq", Initial.ABSENT_ENTRY), clock("step")),
        StateSchema(f"{here}.kron.Kron",
            momentum("momentum_buffer"), clock("step"), clock("update_counter"),
            history("Q", Initial.computed(_preconditioners)),
            history("rng", Initial.seeded(1337), at="attribute")),
        StateSchema(f"{here}.lamb.Lamb",
            momentum("exp_avg"), variance("exp_avg_sq"), clock("step", at="group")),
        StateSchema(f"{here}.laprop.LaProp", *_ADAM, history("exp_avg_lr_1"), history("exp_avg_lr_2")),
        StateSchema(f"{here}.lars.Lars", _BUFFER),
        StateSchema(f"{here}.lion.Lion", momentum("exp_avg")),
        StateSchema(f"{here}.madgrad.MADGRAD",
            momentum("s"), variance("grad_sum_sq"), history("x0", Initial.COPY), clock("step")),
        StateSchema(f"{here}.mars.Mars", *_ADAM, history("last_grad")),
        # Which parameters it leaves to an AdamW is settled by their shapes and the options.
        StateSchema(f"{here}.muon.Muon", *_ADAM, momentum("momentum_buffer"), kept("use_muon")),
        StateSchema(f"{here}.nadam.NAdamLegacy", *_ADAM, history("m_schedule", Initial.ONES)),
        StateSchema(f"{here}.nadamw.NAdamW", *_ADAM),
        StateSchema(f"{here}.nvnovograd.NvNovoGrad", *_ADAM, variance("max_exp_avg_sq")),
        StateSchema(f"{here}.radam.RAdamLegacy", *_ADAM),
        StateSchema(f"{here}.rmsprop_tf.RMSpropTF",
            variance("square_avg", Initial.ONES), momentum("momentum_buffer"), history("grad_avg"),
            clock("step")),
        StateSchema(f"{here}.sgdp.SGDP", momentum("momentum")),
        StateSchema(f"{here}.sgdw.SGDW", _BUFFER),
    ]  # fmt: skip


@hookimpl
def miles_reset_unwrap_rules() -> list[UnwrapRule]:
    """Return the rule of the wrapper, whose slow weights are in the state of what it holds."""
    return [
        # They are copied not at the start, but at the first synchronization.
        UnwrapRule("timm.optim.lookahead.Lookahead", "_base_optimizer",
            history("lookahead_slow_buff", Initial.ABSENT, at="child"), clock("lookahead_step", at="group")),
    ]  # fmt: skip
