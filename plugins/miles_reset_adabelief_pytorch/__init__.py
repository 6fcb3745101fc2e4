"""What AdaBelief of adabelief-pytorch remembers.

Read off adabelief-pytorch 0.2. A group's ``buffer`` holds what the last ten counts came to, for the betas
of then.
"""

from typing import Any

from miles_reset import Initial, StateSchema, clock, history, hookimpl, momentum, variance


def _nothing_looked_up(parameter: Any, group: Any, optimizer: Any) -> list[list[None]]:
    return [[None, None, None] for _ in range(10)]


@hookimpl
def miles_reset_schemas() -> list[StateSchema]:
    """Return the schema of adabelief-pytorch."""
    return [
        StateSchema("adabelief_pytorch.AdaBelief.AdaBelief",
            momentum("exp_avg"), variance("exp_avg_var"), variance("max_exp_avg_var"), clock("step"),
            history("buffer", Initial.computed(_nothing_looked_up), at="group")),
    ]  # fmt: skip
