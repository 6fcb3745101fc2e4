"""What the optimizers of schedulefree remember: a second copy of the weights, and a running weight of it.

Read off schedulefree 1.4. The rules hold in training and in evaluation mode.
"""

from miles_reset import Initial, StateSchema, UnwrapRule, clock, history, hookimpl, kept, variance

_CLOCKS = (
    clock("k", at="group"), history("weight_sum", at="group"), history("scheduled_lr", at="group"),
    kept("train_mode", at="group"),
)  # fmt: skip
_SINCE_MINUS_ONE = history("lr_max", Initial.constant(-1.0), at="group")
_SINCE_ZERO = history("lr_max", at="group")  # where a closure steps

_COPY = history("z", Initial.COPY)
_COPIES = (_COPY, history("x", Initial.COPY), history("y", Initial.COPY))
_ADAM = variance("exp_avg_sq")


@hookimpl
def miles_reset_schemas() -> list[StateSchema]:
    """Return the schemas of schedulefree."""
    here = "schedulefree"
    return [
        StateSchema(f"{here}.adamw_schedulefree.AdamWScheduleFree", _COPY, _ADAM, _SINCE_MINUS_ONE, *_CLOCKS),
        StateSchema(f"{here}.adamw_schedulefree_closure.AdamWScheduleFreeClosure",
            _COPY, _ADAM, _SINCE_ZERO, *_CLOCKS),
        StateSchema(f"{here}.adamw_schedulefree_paper.AdamWScheduleFreePaper",
            _COPY, _ADAM, _SINCE_MINUS_ONE, *_CLOCKS),
        StateSchema(f"{here}.adamw_schedulefree_reference.AdamWScheduleFreeReference",
            *_COPIES, _ADAM, _SINCE_MINUS_ONE, *_CLOCKS),
        StateSchema(f"{here}.radam_schedulefree.RAdamScheduleFree", _COPY, _ADAM, _SINCE_MINUS_ONE, *_CLOCKS),
        StateSchema(f"{here}.radam_schedulefree_closure.RAdamScheduleFreeClosure",
            _COPY, _ADAM, _SINCE_ZERO, *_CLOCKS),
        StateSchema(f"{here}.sgd_schedulefree.SGDScheduleFree", _COPY, _SINCE_MINUS_ONE, *_CLOCKS),
        StateSchema(f"{here}.sgd_schedulefree_closure.SGDScheduleFreeClosure", _COPY, _SINCE_ZERO, *_CLOCKS),
        StateSchema(f"{here}.sgd_schedulefree_reference.SGDScheduleFreeReference",
            *_COPIES, _SINCE_MINUS_ONE, *_CLOCKS),
    ]  # fmt: skip


@hookimpl
def miles_reset_unwrap_rules() -> list[UnwrapRule]:
    """Return the rules of the wrappers, which keep their copies in the state and groups of what they hold."""
    clocks = [clock(key, Initial.ABSENT, at="group") for key in ("k", "weight_sum", "lr_max")]
    copies = [history(key, Initial.COPY, at="child") for key in ("z", "x", "y")]
    return [
        UnwrapRule("schedulefree.wrap_schedulefree.ScheduleFreeWrapper", "base", copies[0], *clocks),
        UnwrapRule("schedulefree.wrap_schedulefree_reference.ScheduleFreeWrapperReference", "base",
            *copies, *clocks),
    ]  # fmt: skip
