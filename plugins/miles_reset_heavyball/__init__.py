"""What the optimizers of heavyball remember.

Read off heavyball 3.2. All are chains of functions, and what a function remembers is under its name, the
name of the value and its place in the chain, in an entry for each part of a parameter. The entry also holds a
set of the places that are initialized: without it all is made anew, from the parameter, the first gradient or
random numbers.
"""

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

_REMADE = Initial.ABSENT

_MOMENTUMS = ("exp_avg", "exp_avg_fast", "exp_avg_slow", "momentum")
_VARIANCES = ("exp_avg_sq", "GG", "Q", "Q_basis", "Q_cache", "U", "V", "d", "fisher_approx")
_HISTORIES = (
    "delta", "init", "init_norm", "init_std", "mars_old_grad", "mu_product", "precond_grad_accum",
    "running_lower_bound", "scion_state", "state", "z",
)  # fmt: skip

_CHAIN = (
    *(momentum(f"*_{name}_[0-9]*", _REMADE) for name in _MOMENTUMS),
    *(variance(f"*_{name}_[0-9]*", _REMADE) for name in _VARIANCES),
    *(history(f"*_{name}_[0-9]*", _REMADE) for name in _HISTORIES),
    clock("*_step_[0-9]*", _REMADE), clock("_warmup_[0-9]*", _REMADE), clock("step", _REMADE),
    history("is_initialized", _REMADE), history("param_ema", _REMADE),
    kept("param::ecc"),  # the lower bits of the weights
)  # fmt: skip

_GROUPS = (
    clock("step_count", _REMADE, at="group"), clock("precond_step", _REMADE, at="group"),
    clock("ema_step", _REMADE, at="group"), clock("_*_steps_taken_*", _REMADE, at="group"),
    clock("_sf_step", _REMADE, at="group"), history("weight_sum", _REMADE, at="group"),
    history("is_cached", _REMADE, at="group"), scratch("prev_lr", at="group"),
    scratch("is_preconditioning", at="group"), kept("base_lr", at="group"), kept("train_mode", at="group"),
)  # fmt: skip


@hookimpl
def miles_reset_schemas() -> list[StateSchema]:
    """Return the schema of heavyball's chains, the base of all its optimizers."""
    return [
        StateSchema("heavyball.chainable.ChainOpt", *_CHAIN, *_GROUPS,
            # How many steps there were, and when the preconditioner is due.
            clock("inner_group", Initial.EMPTY, at="attribute")),
    ]  # fmt: skip


@hookimpl
def miles_reset_unwrap_rules() -> list[UnwrapRule]:
    """Return the rules of the wrappers, which remember nothing themselves."""
    return [
        UnwrapRule("heavyball.SplitOpt", "optimizers"),
        UnwrapRule("heavyball.SAMWrapper", "wrapped_optimizer"),
    ]
