"""What the optimizers of apollo-torch remember, and of what rank.

Read off apollo-torch 1.0. Where a group has a rank, the moments are of gradients that a projector made small.
It is made again from the first gradient, or from the seed that the constructor gave the parameter.
"""

from miles_reset import Initial, Slot, StateSchema, clock, history, hookimpl, kept, momentum, variance

_PROJECTOR = history("projector", Initial.ABSENT)

# The last norm of an update, which the next one may not exceed by much: there is none for the first.
_LIMITED = (history("scaled_grad", Initial.ABSENT), kept("seed"))


def _moment(number: int) -> tuple[Slot, ...]:
    """Return what bitsandbytes keeps beside the codes of a moment."""
    return (kept(f"qmap{number}"), history(f"absmax{number}"))


_BITSANDBYTES = (
    momentum("state1"), *_moment(1), variance("state2"), *_moment(2),
    history("unorm_vec"), history("gnorm_vec"), clock("step"), _PROJECTOR,
    history("initialized", at="attribute"), kept("name2qmap", at="attribute"),
)  # fmt: skip


@hookimpl
def miles_reset_schemas() -> list[StateSchema]:
    """Return the schemas of apollo-torch."""
    return [
        StateSchema("apollo_torch.apollo.AdamW",
            momentum("exp_avg"), variance("exp_avg_sq"), clock("step"), _PROJECTOR, *_LIMITED),
        StateSchema("apollo_torch.q_apollo.AdamW", *_BITSANDBYTES, *_LIMITED),
        # Those of GaLore, which come with it.
        StateSchema("apollo_torch.adamw.AdamW",
            momentum("exp_avg"), variance("exp_avg_sq"), clock("step"), _PROJECTOR),
        StateSchema("apollo_torch.adafactor.Adafactor",
            momentum("exp_avg"), variance("exp_avg_sq"),
            variance("exp_avg_sq_row"), variance("exp_avg_sq_col"), history("RMS"), clock("step"),
            _PROJECTOR),
        StateSchema("apollo_torch.adamw8bit.AdamW8bit", *_BITSANDBYTES),
    ]  # fmt: skip
