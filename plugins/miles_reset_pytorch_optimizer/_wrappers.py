"""The wrappers: what they keep themselves, and where."""

from typing import Any

from miles_reset import (
    Initial,
    StateSchema,
    UnwrapRule,
    clock,
    default_registry,
    history,
    kept,
    momentum,
    scratch,
)
from miles_reset_pytorch_optimizer._moments import HERE


def _between_steps(wrapper: Any) -> str | None:
    """Tell whether the weights stand where a first step has put them, to look for a sharper gradient."""
    for entry in wrapper.state.values():
        if any(key in entry for key in ("old_p", "e_w")):
            return "it is between two half steps, with its weights moved. Call its second_step() first."
    return None


def _copied_too_late(inner: Any) -> str | None:
    """Tell whether what is inside copies its weights in its first step, when the wrapper has moved them.

    It is a matter of the last bits: they are added to and taken from, or decayed.
    """
    claim = default_registry().find(type(inner))
    schema = claim.record if claim is not None and isinstance(claim.record, StateSchema) else None
    starts = [slot.initial for slot in schema.slots if slot.initial is not None] if schema else []
    if any(start.kind is Initial.COPY.kind for start in starts) and any(inner.state.values()):
        name = type(inner).__name__
        return f"it moves the weights before {name} copies them: what a fresh one would hold is not known."
    return None


def _moved_and_back(wrapper: Any) -> str | None:
    return _between_steps(wrapper) or _copied_too_late(wrapper.base_optimizer)


def _decayed_first(wrapper: Any) -> str | None:
    return _copied_too_late(wrapper.optimizer) if wrapper.weight_decay else None


def _first_count(attribute: str) -> Any:
    """Return where a wrapper starts to count: at the step that its optimizer puts into the groups."""

    def first_count(parameter: Any, group: Any, wrapper: Any) -> Any:
        return getattr(wrapper, attribute).defaults.get("step", 0)

    return Initial.computed(first_count)


def _fast_weights(lookahead: Any) -> str | None:
    """Tell whether the slow weights stand in place of the fast ones, which are kept beside them."""
    if any("backup_params" in entry for entry in lookahead.state.values()):
        return "its slow weights are loaded. Call its clear_and_load_backup() first."
    return None


def _refresh_float32(wrapper: Any) -> None:
    for half, whole in zip(wrapper.fp16_params, wrapper.fp32_params, strict=True):
        whole.data.copy_(half.data)


def _refresh_on_cpu(wrapper: Any) -> None:
    for device, host in wrapper.param_cuda2cpu_map.items():
        host.data.copy_(device.data)


_BASE = "base_optimizer"
_AVERAGED = (clock("step", _first_count("optimizer"), at="group"),
    history("lr_max", Initial.ABSENT, at="group"),
    history("weight_sum", Initial.ABSENT, at="group"))  # fmt: skip

WRAPPERS = [
    UnwrapRule(f"{HERE}.lookahead.Lookahead", "optimizer",
        history("slow_params", Initial.COPY), momentum("slow_momentum"), clock("counter", at="group"),
        # It puts one there whatever the optimizer calls its own; if that has one, its own schema counts.
        momentum("momentum_buffer*", Initial.ABSENT, at="child"), ready=_fast_weights),
    UnwrapRule(f"{HERE}.sam.SAM", _BASE, ready=_between_steps),
    UnwrapRule(f"{HERE}.sam.GSAM", _BASE, scratch("old_g"),
        kept("rho_t", at="attribute"), kept("rho_scheduler", at="attribute"), ready=_moved_and_back),
    UnwrapRule(f"{HERE}.sam.WSAM", _BASE,
        scratch("sharpness"), scratch("grad"), ready=_moved_and_back),
    UnwrapRule(f"{HERE}.sam.LookSAM", _BASE,
        history("gv", Initial.ABSENT), scratch("old_grad_p"),
        clock("looksam_step", _first_count(_BASE), at="group"), ready=_between_steps),
    UnwrapRule(f"{HERE}.sam.FriendlySAM", _BASE, momentum("momentum", Initial.ABSENT), ready=_between_steps),
    UnwrapRule(f"{HERE}.schedulefree.ScheduleFreeWrapper", "optimizer",
        history("z", Initial.COPY), kept("train_mode", at="attribute"), *_AVERAGED, ready=_decayed_first),
    UnwrapRule(f"{HERE}.trac.TRAC", "optimizer", history("trac", Initial.ABSENT, at="child")),
    UnwrapRule(f"{HERE}.orthograd.OrthoGrad", "optimizer"),
    UnwrapRule(f"{HERE}.pcgrad.PCGrad", "optimizer"),
    UnwrapRule(f"{HERE}.magma.Magma", "optimizer", history("_state", Initial.EMPTY, at="attribute")),
    UnwrapRule(f"{HERE}.fp16.SafeFP16Optimizer", "optimizer",
        kept("fp32_params", at="attribute"), kept("scaler", at="attribute"),
        refresh_masters=_refresh_float32),
    UnwrapRule(f"{HERE}.utils.offload.CPUOffloadOptimizer", "optimizer",
        kept("param_cuda2cpu_map", at="attribute"), refresh_masters=_refresh_on_cpu),
]  # fmt: skip
