"""What the optimizers of bitsandbytes remember: moments of 8 bits or of 32, paged or not.

Read off bitsandbytes 0.50, and what older versions kept beside. Codes of 8 bits are zero when fresh, and so
is their scale, ``absmax``. The tables that they are codes into, ``qmap``, are none of it: with a table of
zeros the first step is right, and the second is not.
"""

from typing import Any

from miles_reset import Initial, Slot, StateSchema, clock, history, hookimpl, kept, momentum, variance

# `initialized` is set at the first step, after which overrides of options by module are not looked up again.
# `gnorm_vec` is of versions before 0.50: past norms of gradients, to clip at a percentile.
_COMMON = (
    clock("step"), history("unorm_vec"), history("gnorm_vec"),
    history("initialized", at="attribute"), kept("name2qmap", at="attribute"),
)  # fmt: skip


def _moment(number: int) -> tuple[Slot, ...]:
    """Return what stands beside the codes of a moment: one scale for all, in versions before 0.50."""
    scales = (history(f"{key}{number}") for key in ("absmax", "max", "new_max"))
    return (kept(f"qmap{number}"), *scales)


def _of_the_bits_wanted(optimizer: Any) -> str | None:
    """Say so where a load left state of other bits than a fresh optimizer would make."""
    for at, group in enumerate(optimizer.param_groups):
        for number, parameter in enumerate(group["params"]):
            state = optimizer.state.get(parameter, {})
            if "state1" not in state or parameter.numel() < 4096:
                continue  # whether those have 8 bits at all depends on the version
            config = optimizer.get_config(at, number, group)
            codes = config["optim_bits"] == 8 and parameter.numel() >= config["min_8bit_size"]
            if codes != ("qmap1" in state):
                wanted, held = (8, 32) if codes else (32, 8)
                return f"it holds {held} bits where its options ask for {wanted} bits. Build it anew."
    return None


@hookimpl
def miles_reset_schemas() -> list[StateSchema]:
    """Return the schemas of bitsandbytes."""
    optim = "bitsandbytes.optim"
    return [
        # Base of LARS, Lion, RMSprop and SGD, where the one state is a momentum, and of Adagrad.
        StateSchema(f"{optim}.optimizer.Optimizer1State",
            momentum("state1"), *_moment(1), *_COMMON,
            ready=_of_the_bits_wanted),
        # Base of AdEMAMix (whose two momenta are one tensor), Adam, AdamW and LAMB.
        StateSchema(f"{optim}.optimizer.Optimizer2State",
            momentum("state1"), *_moment(1), variance("state2"), *_moment(2), *_COMMON,
            ready=_of_the_bits_wanted),
        StateSchema(f"{optim}.ademamix._ReferenceAdEMAMix",
            momentum("m1_m2"), variance("nu"), clock("step", Initial.ABSENT, at="group")),
        StateSchema(f"{optim}.lars.PytorchLARS", momentum("momentum_buffer", Initial.SGD_BUFFER)),
    ]  # fmt: skip
