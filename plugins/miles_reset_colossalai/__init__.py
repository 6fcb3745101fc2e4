"""What ColossalAI's optimizers remember, and how its wrappers are unwrapped.

Lamb, Lars, Adafactor, CAME, MixedPrecisionOptimizer and LowLevelZeroOptimizer are held to the law through
colossalai 0.5 itself, on a CPU. The rest is from the source of colossalai 0.5, not run here: it needs a
GPU, a kernel that compiles for minutes, or tensor parallelism.
"""

from typing import Any

from miles_reset import Initial, StateSchema, UnwrapRule, clock, hookimpl, kept, momentum, variance

_OPTIM = "colossalai.nn.optimizer"
_ADAM = (momentum("exp_avg"), variance("exp_avg_sq"), clock("step"))
_FACTORED = (
    *_ADAM, variance("exp_avg_sq_row"), variance("exp_avg_sq_col"),
)  # fmt: skip
_RESIDUALS = (variance("exp_avg_res_row"), variance("exp_avg_res_col"))
_GROUP_ADAM = (momentum("exp_avg"), variance("exp_avg_sq"), clock("step", Initial.ABSENT, at="group"))


def _in_memory(optimizer: Any) -> str | None:
    """Tell the moments that are on a disk between steps."""
    if any((vars(optimizer).get("is_on_nvme") or {}).values()):
        return "moments are on NVMe, and would come back from there at the next step."
    return None


def _quantized(optimizer: Any) -> str | None:
    return "it keeps 8-bit moments and a projector of its own, which no rule of this plugin names."


def _refresh(wrapper: Any) -> None:
    """Copy the weights of the model into those in float32, each where the wrapper has them."""
    for working, master in getattr(wrapper, "working_to_master_map", {}).items():
        if master is not working:
            master.data.copy_(working.data)
    model = vars(wrapper).get("model")
    if "_master_param_groups_of_current_rank" in vars(wrapper):
        if model is not None:
            wrapper.update_master_params(model)
            return
        working = (p for group in wrapper._working_param_groups.values() for p in group)
        wrapper.update_master_params(_Parameters(list(working)))


class _Parameters:
    """What LowLevelZeroOptimizer asks of a model."""

    def __init__(self, held: list[Any]) -> None:
        self._held = held

    def parameters(self) -> list[Any]:
        return self._held


def _cannot_refresh(wrapper: Any) -> None:
    raise RuntimeError(
        "Gemini has its weights in float32 in chunks: load the model through its booster, which writes both."
    )


@hookimpl
def miles_reset_schemas() -> list[StateSchema]:
    """Return the schemas of ColossalAI's optimizers."""
    return [
        # Base of CPUAdam and of HybridAdam, which keep their step and moments alike.
        StateSchema(f"{_OPTIM}.cpu_adam.CPUAdam", *_ADAM, ready=_in_memory),
        StateSchema(f"{_OPTIM}.fused_adam.FusedAdam", *_GROUP_ADAM),
        StateSchema(f"{_OPTIM}.fused_lamb.FusedLAMB", *_GROUP_ADAM),
        StateSchema(f"{_OPTIM}.fused_sgd.FusedSGD", momentum("momentum_buffer", Initial.SGD_BUFFER)),
        StateSchema(f"{_OPTIM}.lamb.Lamb", *_ADAM),
        StateSchema(f"{_OPTIM}.lars.Lars", momentum("momentum_buffer", Initial.constant(-0.0))),
        StateSchema(f"{_OPTIM}.adafactor.Adafactor", *_FACTORED, variance("RMS")),
        StateSchema(f"{_OPTIM}.came.CAME", *_FACTORED, *_RESIDUALS, variance("RMS")),
        StateSchema(f"{_OPTIM}.distributed_lamb.DistributedLamb", *_ADAM),
        StateSchema(f"{_OPTIM}.distributed_adafactor.DistributedAdaFactor", *_FACTORED, variance("RMS")),
        StateSchema(f"{_OPTIM}.distributed_came.DistributedCAME", *_FACTORED, *_RESIDUALS, variance("RMS")),
        StateSchema(f"{_OPTIM}.galore.GaLoreAdamW8bit", ready=_quantized),
        StateSchema(f"{_OPTIM}.distributed_galore.DistGaloreAwamW", ready=_quantized),
    ]  # fmt: skip


@hookimpl
def miles_reset_unwrap_rules() -> list[UnwrapRule]:
    """Return the rules of the wrappers.

    The weights in float32 (working_to_master_map, _master_param_groups_of_current_rank, the chunks of Gemini)
    are parameters of the optimizers inside, or lie behind them. What a gradient scaler has found out is kept.
    """
    scaler = tuple(
        kept(f"{owner}.grad_scaler.{key}", at="attribute")
        for owner in ("mixed_precision", "mixed_precision_mixin", "mix_precision_mixin")
        for key in ("_scale", "_growth_step", "_hysteresis_step")
    )
    return [
        # Base of HybridParallelNaiveOptimizer, FSDPOptimizerWrapper and TorchAMPOptimizer.
        UnwrapRule("colossalai.interface.optimizer.OptimizerWrapper", "optim"),
        # Base of HybridParallelAMPOptimizer.
        UnwrapRule("colossalai.amp.naive_amp.mixed_precision_optimizer.MixedPrecisionOptimizer", "optim",
            *scaler, refresh_masters=_refresh),
        # Base of HybridParallelZeroOptimizer and MoeHybridParallelZeroOptimizer.
        UnwrapRule("colossalai.zero.low_level.low_level_optim.LowLevelZeroOptimizer", "optim",
            *scaler, refresh_masters=_refresh),
        # Its state is keyed by parameters that stand for ranges of chunks, and are empty between steps.
        UnwrapRule("colossalai.zero.gemini.gemini_optimizer.GeminiOptimizer", "optim",
            *scaler, refresh_masters=_cannot_refresh),
    ]  # fmt: skip
