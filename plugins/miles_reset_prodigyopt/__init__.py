"""What Prodigy of prodigyopt remembers: where it started, how far it came, and the step size found so far.

Read off prodigyopt 1.1.
"""

from typing import Any

from miles_reset import Initial, StateSchema, clock, history, hookimpl, momentum, variance


def _start(parameter: Any, group: Any, optimizer: Any) -> Any:
    """Return every ``slice_p``-th weight, or one zero for all if all are zero."""
    start = parameter.detach().flatten()[:: group["slice_p"]]
    return start if parameter.any() else start.new_zeros(())


@hookimpl
def miles_reset_schemas() -> list[StateSchema]:
    """Return the schema of prodigyopt."""
    return [
        StateSchema("prodigyopt.prodigy.Prodigy",
            momentum("exp_avg"), variance("exp_avg_sq"), history("s"), clock("step"),
            history("p0", Initial.computed(_start)),
            clock("k", at="group"), history("d_numerator", at="group"),
            history("d", Initial.group("d0"), at="group"), history("d_max", Initial.group("d0"), at="group"),
            history("d_denom", Initial.ABSENT, at="group"), history("d_hat", Initial.ABSENT, at="group")),
    ]  # fmt: skip
