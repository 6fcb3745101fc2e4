"""What Megatron's own optimizers remember, and how its wrappers are unwrapped.

Rules for megatron-core 0.16 to 0.19 are held to the law through the real wrappers. What the forks of
radixark add to them, and Transformer Engine's and Apex's optimizers, are declared from their sources.
"""

from typing import TYPE_CHECKING, Any

from miles_reset import Initial, StateSchema, UnwrapRule, clock, hookimpl, kept, momentum, variance
from miles_reset.checkpoint import CheckpointReader, SafeGlobal
from miles_reset.scheduler import SchedulerRule
from miles_reset_megatron._checkpoints import READERS
from miles_reset_megatron._schedulers import SCHEDULERS

if TYPE_CHECKING:
    from miles_reset_megatron._adapter import load_lora_adapter, save_lora_adapter
    from miles_reset_megatron._arguments import add_arguments, policy_from_args
    from miles_reset_megatron._training import resume_training

_LATER = {
    "add_arguments": "_arguments",
    "load_lora_adapter": "_adapter",
    "policy_from_args": "_arguments",
    "resume_training": "_training",
    "save_lora_adapter": "_adapter",
}
"""What a trainer calls. It is imported when it is first asked for: a reset needs none of it."""

__all__ = [
    "add_arguments",
    "load_lora_adapter",
    "policy_from_args",
    "resume_training",
    "save_lora_adapter",
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)


_OPTIMIZER = "megatron.core.optimizer"


def _not_streamed_or_offloaded(wrapper: Any) -> str | None:
    """Tell state on disk (miles' NVMe store) or in host memory (OptimizerStateOffloader) from live state."""
    if vars(wrapper).get("_nvme_state_store") is not None:
        return "it is streamed to disk by _nvme_state_store, where no walk over the optimizers reaches it."
    if getattr(vars(wrapper).get("_state_offloader"), "_offloaded", False):
        return "it is offloaded, and a reload would bring the old moments back. Call its reload() first."
    return None


def _refresh_masters(wrapper: Any) -> None:
    """Do also what reload_model_params() leaves to the optimizer inside, which does not do it."""
    wrapper.reload_model_params()
    inner = wrapper.optimizer
    if hasattr(wrapper, "shard_fp32_from_float16_groups") and hasattr(inner, "sub_optimizers"):
        wrapper.optimizer = None  # It passes over its shards where it sees a HybridDeviceOptimizer.
        try:
            wrapper._copy_model_params_to_main_params()
        finally:
            wrapper.optimizer = inner
    if hasattr(inner, "set_scaled_state"):  # FusedAdam, with master weights in its state.
        for parameter, state in inner.state.items():
            master = state.get("master_param")
            if master is not None and not master.is_floating_point():
                master.zero_()  # What the parameter lacks of float32.
            elif master is not None:
                inner.set_scaled_state(parameter, "master_param", parameter.detach().float())


def _refresh_copies(hybrid: Any) -> None:
    """Do also what update_fp32_param_by_new_param() passes over: copies that are not in float32."""
    for parameter, inner in hybrid.param_to_inner_param.items():
        # After a load, and until the next step, the state has a master of its own.
        for held in (inner, hybrid.state.get(parameter, {}).get("master_param", inner)):
            if held is not parameter:
                held.data.copy_(parameter.data)


@hookimpl
def miles_reset_schemas() -> list[StateSchema]:
    """Return the schemas of the optimizers that Megatron steps with."""
    muon = f"{_OPTIMIZER}.emerging_optimizers"
    # The first step makes the count: a number, or a tensor that a captured graph holds on to.
    count = Initial.either("capturable", Initial.ZEROS, Initial.ABSENT)
    # DistributedOptimizer loads a step into the state too, if a HybridDeviceOptimizer is between them.
    fused_adam = (
        momentum("exp_avg"), variance("exp_avg_sq"), clock("step", count, at="group"),
        clock("step", Initial.ABSENT),
    )  # fmt: skip
    fused_sgd = momentum("momentum_buffer", Initial.SGD_BUFFER)  # the kernel takes the first gradient
    return [
        StateSchema(f"{muon}.TensorParallelMuon", momentum("momentum_buffer")),
        StateSchema(f"{muon}.TensorParallelAdaptiveMuon",
            momentum("momentum_buffer"), variance("moment2_buffer")),
        StateSchema(f"{_OPTIMIZER}.muon.TensorParallelMuon", momentum("momentum_buffer")),  # 0.16
        StateSchema("transformer_engine.pytorch.optimizers.fused_adam.FusedAdam",
            *fused_adam, kept("master_param")),
        StateSchema("transformer_engine.pytorch.optimizers.fused_sgd.FusedSGD", fused_sgd),
        StateSchema("apex.optimizers.fused_adam.FusedAdam", *fused_adam),
        StateSchema("apex.optimizers.fused_sgd.FusedSGD", fused_sgd),
    ]  # fmt: skip


@hookimpl
def miles_reset_unwrap_rules() -> list[UnwrapRule]:
    """Return the rules of megatron-core's wrappers.

    Master weights (fp32_from_float16_groups, shard_fp32_*) are parameters of the optimizers inside.
    """
    return [
        # Base of FP32Optimizer, Float16OptimizerWithFloat16Params, DistributedOptimizer. A stub holds None.
        # What a gradient scaler has found out is no memory of the optimizer's.
        UnwrapRule(f"{_OPTIMIZER}.optimizer.MegatronOptimizer", "optimizer",
            kept("grad_scaler._scale", at="attribute"),
            kept("grad_scaler._growth_tracker", at="attribute"),
            kept("grad_scaler._hysteresis_tracker", at="attribute"),
            ready=_not_streamed_or_offloaded, refresh_masters=_refresh_masters),
        # Base of LayerWiseDistributedOptimizer. Its property `optimizer` asserts unless it holds exactly one.
        UnwrapRule(f"{_OPTIMIZER}.optimizer.ChainedOptimizer", "chained_optimizers",
            ready=_not_streamed_or_offloaded),
        # Copies its groups down at each step. After a load they hold a step, which a fresh one's do not.
        UnwrapRule(f"{_OPTIMIZER}.cpu_offloading.hybrid_optimizer.HybridDeviceOptimizer", "sub_optimizers",
            kept("master_param", at="child"), stale_groups="delete", refresh_masters=_refresh_copies),
    ]  # fmt: skip


@hookimpl
def miles_reset_scheduler_rules() -> list[SchedulerRule]:
    """Return how Megatron's scheduler comes back."""
    return SCHEDULERS


@hookimpl
def miles_reset_checkpoint_readers() -> list[CheckpointReader]:
    """Return the readers of Megatron's checkpoints and of miles'."""
    return READERS


@hookimpl
def miles_reset_safe_globals() -> list[SafeGlobal]:
    """Return the classes that HybridDeviceOptimizer's saved groups name; they are not called."""
    return [SafeGlobal(f"torch.optim.{name}") for name in ("adam.Adam", "adamw.AdamW", "sgd.SGD")]
