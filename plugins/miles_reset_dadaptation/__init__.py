"""What the optimizers of dadaptation remember: how far they have come, and the step size found so far.

Read off dadaptation 3.2. Both are numbers of the groups; the step size becomes a tensor over
ranks, and in DAdaptAdanIP.
"""

from typing import Any

from miles_reset import Initial, StateSchema, clock, history, hookimpl, momentum, variance


def _first_size(parameter: Any, group: Any, optimizer: Any) -> Any:
    return optimizer.defaults["d"]


_DISTANCE = (clock("k", at="group"), history("d", Initial.computed(_first_size), at="group"))
_NUMERATOR = (*_DISTANCE, history("numerator_weighted", at="group"))
_SQUARES = (*_DISTANCE, history("gsq_weighted", at="group"))

_ADAM = (momentum("exp_avg"), variance("exp_avg_sq"), history("s"), clock("step"))
_ADAN = (*_ADAM, history("exp_avg_diff"), history("pre_grad"))


@hookimpl
def miles_reset_schemas() -> list[StateSchema]:
    """Return the schemas of dadaptation."""
    here = "dadaptation"
    return [
        StateSchema(f"{here}.dadapt_adagrad.DAdaptAdaGrad",
            variance("alphak", Initial.constant(1e-6)), momentum("sk"), history("x0", Initial.COPY),
            history("weighted_sk"), *_SQUARES,
            history("sksq_weighted", at="group"), history("skl1", at="group")),
        StateSchema(f"{here}.dadapt_adam.DAdaptAdam", *_ADAM, *_NUMERATOR),
        StateSchema(f"{here}.dadapt_adan.DAdaptAdan", *_ADAN, *_SQUARES),
        StateSchema(f"{here}.dadapt_lion.DAdaptLion", momentum("exp_avg"), history("s"), *_NUMERATOR),
        StateSchema(f"{here}.dadapt_sgd.DAdaptSGD",
            history("z", Initial.COPY), history("x0", Initial.COPY), momentum("s"), *_NUMERATOR,
            history("g0_norm", Initial.ABSENT, at="group")),
        StateSchema(f"{here}.experimental.dadapt_adam_preprint.DAdaptAdamPreprint", *_ADAM, *_SQUARES),
        StateSchema(f"{here}.experimental.dadapt_adan_ip.DAdaptAdanIP", *_ADAN, *_NUMERATOR),
    ]  # fmt: skip
