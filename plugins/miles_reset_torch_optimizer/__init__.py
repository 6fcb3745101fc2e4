"""What the optimizers of torch-optimizer remember, and those of pytorch-ranger, which it hands on.

Read off torch-optimizer 0.3 and pytorch-ranger 0.1.1.
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

_ADAM = (momentum("exp_avg"), variance("exp_avg_sq"), clock("step"))
_WEIGHTED_ADAM = (
    momentum("exp_avg"), variance("exp_avg_sq"), history("beta1_weight"), history("beta2_weight"),
)  # fmt: skip
_SCALAR = Initial.ZEROS.as_dtype("default")

_BUFFER = momentum("momentum_buffer", Initial.SGD_BUFFER)

# The mean of the gradients starts as a copy of the first one, times zero.
_A2GRAD = (
    momentum("avg_grad", Initial.constant(-0.0)), history("x_k", Initial.COPY), variance("v_k"),
    history("alpha_k", Initial.ONES), clock("step"),
)  # fmt: skip

_SLOW = history("slow_buffer", Initial.COPY)


def _largest_length(parameter: Any, group: Any, optimizer: Any) -> float:
    return 2.0 / (1.0 - group["betas"][1]) - 1.0  # type: ignore[no-any-return]


def _no_step_sizes(parameter: Any, group: Any, optimizer: Any) -> list[Any]:
    """Return the cache of ten step sizes as it is before any is found."""
    return [[None, None, None] for _ in range(10)]


def _still_adam(optimizer: Any) -> str | None:
    if all(group["phase"] == "ADAM" for group in optimizer.param_groups):
        return None
    return (
        "it has gone over to SGD, at a rate of its own, and the rate that it had before is lost. "
        "Set 'phase' to 'ADAM' and 'lr' to what it should be in its param groups first."
    )


@hookimpl
def miles_reset_schemas() -> list[StateSchema]:
    """Return the schemas of torch-optimizer."""
    here, ranger = "torch_optimizer", "pytorch_ranger"
    return [
        StateSchema(f"{here}.a2grad.A2GradUni", *_A2GRAD),
        StateSchema(f"{here}.a2grad.A2GradInc", *_A2GRAD),
        StateSchema(f"{here}.a2grad.A2GradExp", *_A2GRAD, variance("v_kk")),
        StateSchema(f"{here}.accsgd.AccSGD", momentum("momentum_buffer", Initial.COPY)),
        StateSchema(f"{here}.adabelief.AdaBelief",
            momentum("exp_avg"), variance("exp_avg_var"), variance("max_exp_avg_var"), clock("step"),
            history("rho_inf", Initial.computed(_largest_length)), scratch("rho_t")),
        # Its bounds close in on a rate that is told from those of the constructor.
        StateSchema(f"{here}.adabound.AdaBound",
            *_ADAM, variance("max_exp_avg_sq"), kept("base_lrs", at="attribute")),
        StateSchema(f"{here}.adafactor.Adafactor",
            *_ADAM, variance("exp_avg_sq_row"), variance("exp_avg_sq_col"), scratch("RMS")),
        StateSchema(f"{here}.adahessian.Adahessian",
            momentum("exp_avg"), variance("exp_hessian_diag_sq"), clock("step")),
        StateSchema(f"{here}.adamod.AdaMod", *_ADAM, history("exp_avg_lr")),
        StateSchema(f"{here}.adamp.AdamP", *_ADAM),
        StateSchema(f"{here}.aggmo.AggMo", momentum("momentum_buffer")),
        StateSchema(f"{here}.apollo.Apollo",
            momentum("exp_avg_grad"), variance("approx_hessian"), history("update"), clock("step")),
        StateSchema(f"{here}.diffgrad.DiffGrad", *_ADAM, history("previous_grad")),
        StateSchema(f"{here}.lamb.Lamb",
            *_ADAM, scratch("weight_norm"), scratch("adam_norm"), scratch("trust_ratio")),
        StateSchema(f"{here}.lars.LARS", _BUFFER),
        StateSchema(f"{here}.madgrad.MADGRAD",
            momentum("s"), variance("grad_sum_sq"), history("x0", Initial.COPY), clock("k", at="group")),
        StateSchema(f"{here}.novograd.NovoGrad",
            momentum("exp_avg"), variance("exp_avg_sq", _SCALAR), variance("max_exp_avg_sq", _SCALAR),
            clock("step")),
        # The first gradient is added without dampening, and makes no difference.
        StateSchema(f"{here}.pid.PID",
            momentum("i_buffer", Initial.either("dampening", Initial.ABSENT, Initial.ZEROS)),
            history("grad_buffer", Initial.ABSENT), history("d_buffer", Initial.ABSENT)),
        StateSchema(f"{here}.qhadam.QHAdam", *_WEIGHTED_ADAM),
        StateSchema(f"{here}.qhm.QHM", momentum("momentum_buffer")),
        # The step sizes found so far are those of the rate that there was.
        StateSchema(f"{here}.radam.RAdam",
            *_ADAM, history("buffer", Initial.computed(_no_step_sizes), at="group")),
        StateSchema(f"{here}.sgdp.SGDP", momentum("momentum")),
        StateSchema(f"{here}.sgdw.SGDW", _BUFFER),
        # The buffer is read with momentum alone, and starts as the first gradient where there is no entry.
        StateSchema(f"{here}.shampoo.Shampoo",
            momentum("momentum_buffer", Initial.either("momentum", Initial.ABSENT_ENTRY, Initial.ABSENT)),
            variance("precond_*", Initial.identity("epsilon")), variance("inv_precond_*"), clock("step")),
        StateSchema(f"{here}.swats.SWATS",
            *_ADAM, variance("max_exp_avg_sq"), history("exp_avg2"),
            momentum("momentum_buffer", Initial.ABSENT), ready=_still_adam),
        StateSchema(f"{here}.yogi.Yogi",
            momentum("exp_avg", Initial.group("initial_accumulator")),
            variance("exp_avg_sq", Initial.group("initial_accumulator")), clock("step")),
        StateSchema(f"{ranger}.ranger.Ranger",
            *_ADAM, _SLOW, history("radam_buffer", Initial.computed(_no_step_sizes), at="attribute")),
        StateSchema(f"{ranger}.ranger913A.RangerVA", *_ADAM, variance("max_exp_avg_sq"), _SLOW),
        # With decoupled decay the slow weights are copied from weights that have decayed once already.
        StateSchema(f"{ranger}.rangerqh.RangerQH", *_WEIGHTED_ADAM, clock("step"),
            history("slow_buffer",
                Initial.either("decouple_weight_decay", Initial.ABSENT_ENTRY, Initial.COPY))),
    ]  # fmt: skip


@hookimpl
def miles_reset_unwrap_rules() -> list[UnwrapRule]:
    """Return the rule of the wrapper."""
    return [
        # Its slow weights are copied after the first step of what it holds.
        UnwrapRule("torch_optimizer.lookahead.Lookahead", "optimizer",
            history("slow_param", Initial.ABSENT), clock("counter", at="group")),
    ]  # fmt: skip
