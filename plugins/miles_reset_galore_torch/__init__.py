"""What the optimizers of galore-torch remember, and of what rank.

Read off galore-torch 1.0. Where a group has a rank, the moments are of gradients that a projector made small.
It is made again from the first gradient, and from the options that the group has then.
"""

from miles_reset import Initial, Slot, StateSchema, clock, history, hookimpl, kept, momentum, variance

_PROJECTOR = history("projector", Initial.ABSENT)


def _moment(number: int) -> tuple[Slot, ...]:
    """Return what bitsandbytes keeps beside the codes of a moment."""
    return (kept(f"qmap{number}"), history(f"absmax{number}"))


@hookimpl
def miles_reset_schemas() -> list[StateSchema]:
    """Return the schemas of galore-torch."""
    return [
        StateSchema("galore_torch.adamw.AdamW",
            momentum("exp_avg"), variance("exp_avg_sq"), clock("step"), _PROJECTOR),
        StateSchema("galore_torch.adafactor.Adafactor",
            momentum("exp_avg"), variance("exp_avg_sq"),
            variance("exp_avg_sq_row"), variance("exp_avg_sq_col"), history("RMS"), clock("step"),
            _PROJECTOR),
        StateSchema("galore_torch.adamw8bit.AdamW8bit",
            momentum("state1"), *_moment(1), variance("state2"), *_moment(2),
            history("unorm_vec"), history("gnorm_vec"), clock("step"), _PROJECTOR,
            history("initialized", at="attribute"), kept("name2qmap", at="attribute")),
    ]  # fmt: skip
