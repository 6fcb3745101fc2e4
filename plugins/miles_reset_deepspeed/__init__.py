"""What DeepSpeed's optimizers remember, and how its wrappers are unwrapped.

ZeRO 1 to 3, with and without offload to host memory, the three 16-bit wrappers, Muon, and Adam and Lion
for the CPU are held to the law through DeepSpeed 0.19.8 itself, on a CPU. FusedAdam, FusedLamb and
FusedLion, ZenFlow and SuperOffload are from the source of DeepSpeed 0.19.8, not run here: each needs a
GPU. The 1-bit optimizers are from the source of DeepSpeed at earlier commits, for 0.19.8 lacks them; not
run here: they need a GPU.
"""

from typing import Any

from miles_reset import Initial, StateSchema, UnwrapRule, clock, hookimpl, kept, momentum, scratch, variance
from miles_reset.checkpoint import CheckpointReader
from miles_reset_deepspeed._checkpoints import READERS

_FLOAT32 = Initial.either("fp32_optimizer_states", Initial.ZEROS.as_dtype("float32"), Initial.ZEROS)
_ON_CPU = (momentum("exp_avg", _FLOAT32), variance("exp_avg_sq", _FLOAT32), clock("step"))

# The step of a group is no count: it is what the count of a new entry starts at. offload_states() leaves
# copies beside the moments, which it writes before it reads them.
_ADAM = (
    momentum("exp_avg"), variance("exp_avg_sq"), clock("step"), clock("step", Initial.ABSENT, at="group"),
)  # fmt: skip
_FUSED = (*_ADAM, scratch("exp_avg_offload_buffer"), scratch("exp_avg_sq_offload_buffer"))
_LION = (momentum("exp_avg"), clock("step"), clock("step", Initial.ABSENT, at="group"))
_MUON = momentum("momentum_buffer")

# Grad scaling: what has been found out about the gradients' range is no memory of the optimizer's.
_SCALER = tuple(
    kept(f"loss_scaler.{key}", at="attribute")
    for key in ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
)
_SCALE_CONFIG = tuple(
    kept(f"loss_scale_config.{key}", at="attribute")
    for key in ("cur_scale", "cur_iter", "last_overflow_iter")
)

_ZERO_GRADIENTS_LEAVE_NO_MOMENTS = {
    "deepspeed.ops.adam.fused_adam.FusedAdam",
    "deepspeed.ops.lamb.fused_lamb.FusedLamb",
    "deepspeed.ops.lion.fused_lion.FusedLion",
    "torch.optim.adam.Adam",
    "torch.optim.adamw.AdamW",
    "torch.optim.sgd.SGD",
}
"""Optimizers after whose step without gradients the count is 1 and all else is zero, or the buffer is."""


def _has_stepped_once(wrapper: Any) -> str | None:
    """Say where it is not known what the step leaves that the wrapper makes when it is built."""
    inner = wrapper.optimizer
    name = f"{type(inner).__module__}.{type(inner).__qualname__}"
    if name not in _ZERO_GRADIENTS_LEAVE_NO_MOMENTS:
        return f"it makes a step when it is built, and what that leaves in {name} is not known."
    decoupled = getattr(inner, "adam_w_mode", None) or name.endswith((".AdamW", ".FusedLamb", ".FusedLion"))
    if not decoupled and any(group.get("weight_decay") for group in inner.param_groups):
        return f"it makes a step when it is built, and {name} has the weight decay in the moments then."
    if any(group.get("maximize") for group in inner.param_groups):
        return f"it makes a step when it is built, and what that leaves in {name} with maximize is not known."
    return None


_AFTER_ONE_STEP = (clock("step", Initial.ONES, at="child"), momentum("momentum_buffer", at="child"))


_ZENFLOW = "ZenFlow steps a part of the weights with optimizers of its own, which no rule names."


def _not_zenflow(wrapper: Any) -> str | None:
    return _ZENFLOW if vars(wrapper).get("zenflow") else None


def _in_memory(wrapper: Any) -> str | None:
    """Tell state that is swapped to a disk, and Muon's momentum where a load has parted it from the state."""
    if reason := _not_zenflow(wrapper):
        return reason
    if getattr(vars(wrapper).get("optimizer_swapper"), "swap_params_info", None):
        return "it is swapped to NVMe, and what is on the disk would come back at the next step."
    apart = vars(wrapper).get("muon_momentum_buffer_partitioned_groups_flat") or {}
    for i, buffer in apart.items():
        entry = wrapper.optimizer.state.get(wrapper.fp32_partitioned_groups_flat[i], {})
        held = entry.get("momentum_buffer")
        if held is not buffer:
            return "a load has parted the state from Muon's momentum in memory, and a step takes the latter."
    return None


def _refresh(wrapper: Any) -> None:
    """Copy the weights of the model into the partitions in float32."""
    if {str(getattr(one, "value", one)) for one in vars(wrapper).get("offloaded_states", ())} & {"lp_params"}:
        raise RuntimeError("The model's weights are offloaded. Call reload_states() first.")
    wrapper.refresh_fp32_params()


def _with_backup(wrapper: Any) -> list[tuple[str, Any]]:
    """Return the optimizer on the CPU, and the one that steps the rest where only a part is offloaded."""
    held = [("", wrapper.optimizer)]
    if "backup_optimizer" in vars(wrapper):
        held.append(("backup", wrapper.backup_optimizer))
    return held


def _real(wrapper: Any) -> Any:
    return wrapper.optimizer if wrapper.using_real_optimizer else None


def _compresses(optimizer: Any) -> str | None:
    return (
        "its first step only sets communication up, and its stage is kept in the engine too. "
        "What a fresh one does next cannot be had in place: build it anew."
    )


def _in_another_process(optimizer: Any) -> str | None:
    return "it steps in another process, which keeps state of its own."


def _zenflow(optimizer: Any) -> str | None:
    return _ZENFLOW


@hookimpl
def miles_reset_schemas() -> list[StateSchema]:
    """Return the schemas of DeepSpeed's optimizers."""
    ops, muon = "deepspeed.ops", "deepspeed.runtime.zero.muon"
    onebit = "deepspeed.runtime.fp16.onebit"
    return [
        StateSchema(f"{ops}.adam.cpu_adam.DeepSpeedCPUAdam", *_ON_CPU),
        StateSchema(f"{ops}.lion.cpu_lion.DeepSpeedCPULion", *_ON_CPU),
        StateSchema(f"{ops}.adagrad.cpu_adagrad.DeepSpeedCPUAdagrad",
            variance("exp_avg_sq", _FLOAT32), clock("step")),
        StateSchema(f"{ops}.adam.fused_adam.FusedAdam", *_FUSED),
        StateSchema(f"{ops}.lion.fused_lion.FusedLion", *_LION),
        StateSchema(f"{ops}.lamb.fused_lamb.FusedLamb",
            momentum("exp_avg"), variance("exp_avg_sq"), clock("step"),
            scratch("lamb_coeffs", at="attribute")),
        StateSchema(f"{muon}.original_muon.Muon", _MUON),
        StateSchema(f"{muon}.original_muon.SingleDeviceMuon", _MUON),
        # The subclass of it that ZeRO steps shares its state and groups with the Adam that it holds.
        StateSchema(f"{muon}.original_muon.MuonWithAuxAdam", _MUON, *_ADAM),
        StateSchema(f"{muon}.original_muon.SingleDeviceMuonWithAuxAdam", _MUON, *_ADAM),
        StateSchema(f"{onebit}.adam.OnebitAdam", ready=_compresses),
        StateSchema(f"{onebit}.lamb.OnebitLamb", ready=_compresses),
        StateSchema(f"{onebit}.zoadam.ZeroOneAdam", ready=_compresses),
        StateSchema(f"{ops}.adam.zenflow_cpu_adam.ZenFlowCPUAdam", ready=_zenflow),
        StateSchema(f"{ops}.adam.zenflow_torch_adam.ZenFlowSelectiveAdamW", ready=_zenflow),
        StateSchema(f"{ops}.adam.zenflow_torch_adam.ZenFlowSelectiveAdamW_stage3", ready=_zenflow),
    ]  # fmt: skip


@hookimpl
def miles_reset_unwrap_rules() -> list[UnwrapRule]:
    """Return the rules of DeepSpeed's wrappers.

    The partitions in float32 are weights, and are the parameters of the optimizers inside. ZeRO 3 takes them
    out of the groups between steps, and leaves them in the state.
    """
    zero, fp16 = "deepspeed.runtime.zero", "deepspeed.runtime.fp16"
    return [
        UnwrapRule(f"{zero}.stage_1_and_2.DeepSpeedZeroOptimizer", "optimizer",
            *_SCALER, ready=_not_zenflow, refresh_masters=_refresh),
        UnwrapRule(f"{zero}.stage3.DeepSpeedZeroOptimizer_Stage3", _with_backup,
            *_SCALER, ready=_in_memory, refresh_masters=_refresh),
        UnwrapRule("deepspeed.runtime.superoffload.superoffload_stage3.SuperOffloadOptimizer_Stage3",
            _with_backup, ready=_in_another_process),
        UnwrapRule("deepspeed.runtime.bf16_optimizer.BF16_Optimizer", _real, refresh_masters=_refresh),
        # Both make a step on gradients of zero when they are built: a fresh count is 1.
        UnwrapRule(f"{fp16}.fused_optimizer.FP16_Optimizer", "optimizer",
            *_AFTER_ONE_STEP, *_SCALE_CONFIG, ready=_has_stepped_once, refresh_masters=_refresh),
        UnwrapRule(f"{fp16}.unfused_optimizer.FP16_UnfusedOptimizer", "optimizer",
            *_AFTER_ONE_STEP, *_SCALE_CONFIG, ready=_has_stepped_once, refresh_masters=_refresh),
    ]  # fmt: skip


@hookimpl
def miles_reset_checkpoint_readers() -> list[CheckpointReader]:
    """Return the reader of DeepSpeed's checkpoints."""
    return READERS
