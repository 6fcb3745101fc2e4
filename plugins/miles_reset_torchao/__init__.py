"""What the optimizers of torchao remember, and how the one that offloads others to the CPU is unwrapped.

Read off torchao 0.18. A moment of 4096 elements and more is a tensor made of codes and their scales, and of
the table that they are codes into; a smaller one is a plain tensor.
"""

from typing import Any

from miles_reset import StateSchema, UnwrapRule, clock, history, hookimpl, kept, momentum, variance

_CODES = (history("codes", at="attribute"), history("scale", at="attribute"))
_TABLE = kept("qmap", at="attribute")


@hookimpl
def miles_reset_schemas() -> list[StateSchema]:
    """Return the schemas of torchao."""
    optim = "torchao.optim"
    return [
        # Base of Adam and AdamW in 8 bits, in 4 bits, in float8 and, for quantized weights, in none of them.
        StateSchema(f"{optim}.adam._AdamBase",
            momentum("exp_avg"), variance("exp_avg_sq"), variance("max_exp_avg_sq"), clock("step")),
        StateSchema(f"{optim}.subclass_8bit.OptimState8bit", *_CODES, _TABLE),
        StateSchema(f"{optim}.subclass_4bit.OptimState4bit", *_CODES, _TABLE),
        StateSchema(f"{optim}.subclass_fp8.OptimStateFp8", *_CODES),
    ]  # fmt: skip


def _held(wrapper: Any) -> list[tuple[str, Any]]:
    """List an optimizer for each parameter on the CPU, and the one for the small ones, on the device."""
    on_cpu = [(str(number), child) for number, child in enumerate(wrapper.optim_dict.values())]
    return [*on_cpu, ("on-device", wrapper.d_opt)]


def _refresh(wrapper: Any) -> None:
    """Copy the weights on the device to the CPU, where they are stepped."""
    for on_device, on_cpu in wrapper.param_d2h_map.items():
        on_cpu.data.copy_(on_device.data)


@hookimpl
def miles_reset_unwrap_rules() -> list[UnwrapRule]:
    """Return the rule of the wrapper, whose groups are those of its children."""
    return [
        UnwrapRule("torchao.optim.cpu_offload.CPUOffloadOptimizer", _held, refresh_masters=_refresh),
    ]
