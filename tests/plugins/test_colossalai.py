"""Hold the ColossalAI plugin to the law: through its library where that runs on a CPU, else stand-ins."""

import contextlib
import copy
import importlib
import importlib.util
import warnings
from typing import Any

import pytest
import torch
from fakes import class_named
from ranks import run_ranks
from torch.optim import AdamW, Optimizer
from variants import Options, Setting, Table, cast, no_gradient, step_some

from miles_reset import UnreachableStateError, plan_reset, reset_optimizer_states
from miles_reset.resume import refresh_masters
from miles_reset.testing import Parameters, Trial, assert_reset_is_fresh, sample_parameters, trial_of

OPTIM = "colossalai.nn.optimizer"
GEMINI = "colossalai.zero.gemini.gemini_optimizer.GeminiOptimizer"
FROM_SOURCE = {
    name: f"from the source of colossalai 0.5, not run here: needs {needs}"
    for needs, names in {
        "a GPU; a stand-in has its state": [
            f"{OPTIM}.fused_adam.FusedAdam", f"{OPTIM}.fused_lamb.FusedLAMB", f"{OPTIM}.fused_sgd.FusedSGD",
        ],
        "a kernel that compiles for minutes; a stand-in has its state": [f"{OPTIM}.cpu_adam.CPUAdam"],
        "several ranks of tensor parallelism; it holds what its base does": [
            f"{OPTIM}.distributed_lamb.DistributedLamb",
            f"{OPTIM}.distributed_adafactor.DistributedAdaFactor",
            f"{OPTIM}.distributed_came.DistributedCAME",
        ],
        "a GPU; it is refused": [
            f"{OPTIM}.galore.GaLoreAdamW8bit", f"{OPTIM}.distributed_galore.DistGaloreAwamW",
        ],
        "chunks on a GPU; a stand-in has its shape": [GEMINI],
    }.items()
    for name in names
}  # fmt: skip
"""What is declared without being held to the law through the library itself, and why."""

LAW = {"warmups": (3,), "further": 4}
needs_colossalai = pytest.mark.skipif(
    importlib.util.find_spec("colossalai") is None, reason="could not import 'colossalai'"
)


def library(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(f"colossalai.{name}")


# Optimizers of colossalai's that run on a CPU

VARIANTS: dict[str, list[Options]] = {
    "lamb.Lamb": [{"lr": 0.1}, {"lr": 0.1, "bias_correction": True}],
    "lars.Lars": [{"lr": 0.1, "momentum": 0.9}],
    "adafactor.Adafactor": [{"lr": 0.1, "beta1": 0.9}, {"relative_step": True, "warmup_init": True}],
    "came.CAME": [{"lr": 0.1}],
}


def hold_optimizers() -> None:
    for name, variants in VARIANTS.items():
        module, cls = name.split(".")
        optimizer = getattr(library(f"nn.optimizer.{module}"), cls)
        for options in variants:
            assert_reset_is_fresh(lambda parameters, o=optimizer, v=options: o(parameters, **v), **LAW)


@needs_colossalai
@pytest.mark.slow
def test_a_reset_is_fresh() -> None:
    run_ranks(hold_optimizers, 1)


# Wrappers of colossalai's that run on a CPU


def mixed(weights: Parameters) -> Trial:
    parameters = weights[:4]  # without the copies in float32, which it makes
    module = library("amp.naive_amp.mixed_precision_optimizer")
    optimizer = module.MixedPrecisionOptimizer(AdamW(parameters, lr=0.1), precision="bf16", max_norm=1.0)
    masters = list(optimizer.master_to_working_map)
    return Trial(optimizer, trial_of(optimizer, parameters).step, lambda: [*parameters, *masters])


def zero(weights: Parameters) -> Trial:
    parameters = weights[:4]
    module = library("zero.low_level.low_level_optim")
    module.LowLevelZeroOptimizer._sanity_checks = lambda self: None  # asks for a GPU, for its streams
    accelerator = type(library("accelerator").get_accelerator())
    accelerator.Stream = accelerator.stream = accelerator.current_stream = lambda self, *_: NoStream()
    optimizer = module.LowLevelZeroOptimizer(AdamW(parameters, lr=0.1))
    masters = list(optimizer._master_param_groups_of_current_rank[0])

    def step(i: int) -> None:
        generator = torch.Generator().manual_seed(10 * i + torch.distributed.get_rank())
        loss = sum((p * torch.randn(p.shape, generator=generator).to(p.dtype)).sum() for p in parameters)
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    def save_and_load() -> None:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    return Trial(optimizer, step, lambda: [*parameters, *masters], save_and_load)


class NoStream(contextlib.nullcontext):
    """Stand in for a stream of a GPU, where all is done in order."""

    def synchronize(self) -> None: ...

    def wait_stream(self, stream: object) -> None: ...


def matrices() -> Parameters:
    return [torch.nn.Parameter(p.detach().reshape(-1)) for p in cast(torch.bfloat16)()]


def hold_wrappers() -> None:
    assert_reset_is_fresh(mixed, parameters=cast(torch.bfloat16), round_trips=(False,), **LAW)
    hold_zero()
    wrapper = library("interface.optimizer").OptimizerWrapper
    assert_reset_is_fresh(lambda parameters: trial_of(wrapper(AdamW(parameters)), parameters), **LAW)
    for build in (mixed, zero):
        trial = step_some(build(matrices()))
        working, masters = trial.weights()[:4], trial.weights()[4:]
        for weight in working:
            weight.data.fill_(0.5)
        assert refresh_masters(trial.optimizer) == 1
        assert all(torch.all(master == 0.5) for master in masters)


def hold_zero() -> None:
    assert_reset_is_fresh(zero, parameters=matrices, **LAW)


@needs_colossalai
@pytest.mark.slow
def test_a_reset_is_fresh_below_wrappers() -> None:
    run_ranks(hold_wrappers, 1)


@needs_colossalai
@pytest.mark.slow
def test_a_reset_is_fresh_where_ranks_share_the_state() -> None:
    run_ranks(hold_zero, 2)


# Stand-ins


class CPUAdamLike(Optimizer):
    """Stand in for CPUAdam: its state, and where NVMeOptimizer says that the moments are."""

    __module__ = f"{OPTIM}.cpu_adam"
    __qualname__ = "CPUAdam"

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})
        self.is_on_nvme: dict[torch.Tensor, bool] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                state = self.state[p]
                if not state:
                    state |= {"step": 0, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                    self.is_on_nvme[p] = False
                state["step"] += 1
                adam(p, state["exp_avg"], state["exp_avg_sq"], state["step"])


def adam(p: torch.Tensor, mean: torch.Tensor, square: torch.Tensor, step: int) -> None:
    mean.lerp_(p.grad, 0.1)
    square.lerp_(p.grad.square(), 0.01)
    p.sub_(0.1 * (mean / (1 - 0.9**step)) / ((square / (1 - 0.99**step)).sqrt() + 1e-8))


class HybridAdamLike(CPUAdamLike):
    """Stand in for HybridAdam, which is a CPUAdam."""

    __module__ = f"{OPTIM}.hybrid_adam"
    __qualname__ = "HybridAdam"


class FusedAdamLike(Optimizer):
    """Stand in for FusedAdam: the count is in the group."""

    __module__ = f"{OPTIM}.fused_adam"
    __qualname__ = "FusedAdam"

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    if not self.state[p]:
                        self.state[p] = {key: torch.zeros_like(p) for key in ("exp_avg", "exp_avg_sq")}
                    adam(p, *self.state[p].values(), group["step"])


class FusedLambLike(FusedAdamLike):
    """Stand in for FusedLAMB, which has the state of FusedAdam."""

    __module__ = f"{OPTIM}.fused_lamb"
    __qualname__ = "FusedLAMB"


class FusedSGDLike(torch.optim.SGD):
    """Stand in for FusedSGD: its kernel takes the first gradient for the momentum."""

    __module__ = f"{OPTIM}.fused_sgd"
    __qualname__ = "FusedSGD"


STAND_INS = {
    "CPUAdam": CPUAdamLike, "HybridAdam": HybridAdamLike, "FusedAdam": FusedAdamLike,
    "FusedLAMB": FusedLambLike, "FusedSGD": FusedSGDLike,
}  # fmt: skip
SGD = [{"lr": 0.1, "momentum": 0.9}, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}]
SETTINGS = {"plain": Setting(), "no gradient": Setting(build=no_gradient, once=True)}
TABLE = Table(
    STAND_INS,
    {name: SGD if name == "FusedSGD" else [{}] for name in STAND_INS},
    SETTINGS,
    {},
    package="colossalai",
)


@pytest.mark.parametrize("case", TABLE.cases())
def test_a_reset_of_a_stand_in_is_fresh(case: Any) -> None:
    case.assert_reset_is_fresh()


def test_moments_on_a_disk_are_refused() -> None:
    parameters = sample_parameters()
    optimizer = HybridAdamLike(parameters)
    step_some(trial_of(optimizer, parameters))
    plan_reset(optimizer)
    optimizer.is_on_nvme[parameters[1]] = True
    with pytest.raises(UnreachableStateError, match="moments are on NVMe"):
        reset_optimizer_states(optimizer)


def wrapper(name: str, **attributes: Any) -> Any:
    made = class_named(name)()
    vars(made).update(attributes)
    return made


def test_gemini_s_parameters_that_stand_for_chunks_are_found_in_the_state() -> None:
    parameters = sample_parameters()
    inner = step_some(trial_of(AdamW(parameters), parameters)).optimizer
    for parameter in parameters:
        parameter.data = torch.empty(0)  # as between its steps
    gemini = wrapper(GEMINI, optim=inner)
    assert reset_optimizer_states(gemini).leaves == 1
    assert not any(state["exp_avg"].any() or state["step"] for state in inner.state.values())
    with pytest.raises(RuntimeError, match="load the model through its booster"):
        refresh_masters(gemini)


@pytest.mark.parametrize("name", ["galore.GaLoreAdamW8bit", "distributed_galore.DistGaloreAwamW"])
def test_quantized_projections_are_refused(name: str) -> None:
    with pytest.raises(UnreachableStateError, match="8-bit moments and a projector"):
        reset_optimizer_states(wrapper(f"{OPTIM}.{name}"))
