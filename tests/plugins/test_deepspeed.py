"""Hold the DeepSpeed plugin to the law: through DeepSpeed where it runs on a CPU, else through stand-ins."""

import copy
import importlib.util
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import class_named, plugin
from ranks import run_ranks
from torch import distributed
from torch.optim import SGD, Adagrad, AdamW, Optimizer
from variants import Options, Setting, Table, cast, no_gradient, step_some

from miles_reset import (
    UnreachableStateError,
    UnsupportedOptimizerState,
    UnwrapRule,
    load_registry,
    plan_reset,
    reset_optimizer_states,
)
from miles_reset.resume import refresh_masters
from miles_reset.testing import Parameters, Trial, assert_reset_is_fresh, sample_parameters, trial_of

FROM_SOURCE = {
    name: f"from the source of DeepSpeed {version}, not run here: {needs}"
    for version, needs, names in [
        ("0.19.8", "its kernel needs a GPU; a stand-in has its state", [
            "deepspeed.ops.adam.fused_adam.FusedAdam",
            "deepspeed.ops.lamb.fused_lamb.FusedLamb",
            "deepspeed.ops.lion.fused_lion.FusedLion",
        ]),
        ("0.19.8", "its kernel compiles for minutes", [
            "deepspeed.ops.adagrad.cpu_adagrad.DeepSpeedCPUAdagrad",
        ]),
        ("0.19.8", "needs a GPU; it is refused", [
            "deepspeed.ops.adam.zenflow_cpu_adam.ZenFlowCPUAdam",
            "deepspeed.ops.adam.zenflow_torch_adam.ZenFlowSelectiveAdamW",
            "deepspeed.ops.adam.zenflow_torch_adam.ZenFlowSelectiveAdamW_stage3",
            "deepspeed.runtime.superoffload.superoffload_stage3.SuperOffloadOptimizer_Stage3",
        ]),
        ("at 06fa7eea, 0a849d56 and 0628e182", "needs a GPU, and 0.19.8 lacks it; it is refused", [
            "deepspeed.runtime.fp16.onebit.adam.OnebitAdam",
            "deepspeed.runtime.fp16.onebit.lamb.OnebitLamb",
            "deepspeed.runtime.fp16.onebit.zoadam.ZeroOneAdam",
        ]),
    ]
    for name in names
}  # fmt: skip
"""What is declared without being held to the law through the library itself, and why."""

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="could not import 'deepspeed'"
)
LAW = {"warmups": (2,), "further": 3}


def deepspeed() -> Any:
    """Import DeepSpeed for the CPU, without what it would compile."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "TORCH_COMPILE_DISABLE": "1", "LOCAL_RANK": "0"}
    import deepspeed
    import deepspeed.comm.torch

    deepspeed.comm.torch.build_shm_op = lambda: None  # all-reduce through shared memory; gloo does, too
    deepspeed.utils.logger.setLevel("ERROR")
    return deepspeed


# Wrappers, through DeepSpeed's engine


def optimizers_of(model: torch.nn.Module, leaf: Callable[[Any], Optimizer]) -> Optimizer:
    """Return an optimizer of two groups."""
    return leaf([{"params": model[0].parameters(), "lr": 0.05}, {"params": model[1].parameters()}])


def masters(wrapper: Any) -> list[torch.Tensor]:
    """Return the weights in float32, by whatever name a wrapper has them."""
    for name in (
        "single_partition_of_fp32_groups", "fp32_partitioned_groups_flat", "fp32_groups_flat_partition",
        "fp32_groups_flat", "fp32_groups",
    ):  # fmt: skip
        if name in vars(wrapper):
            return flat(getattr(wrapper, name))
    raise AssertionError(f"{type(wrapper)} has no master weights")


def copies(wrapper: Any) -> list[torch.Tensor]:
    """Return the model's own weights, or this rank's part of them."""
    for name in ("bit16_groups_flat", "fp16_partitioned_groups_flat", "bf16_groups_flat", "fp16_groups"):
        if name in vars(wrapper):
            return flat(getattr(wrapper, name))
    raise AssertionError(f"{type(wrapper)} has no weights")


def flat(held: list[Any]) -> list[torch.Tensor]:
    return [one for part in held for one in (part if isinstance(part, list) else [part])]


def engine(
    config: Options, leaf: Callable[[Any], Optimizer] = lambda groups: AdamW(groups, lr=0.1)
) -> Callable[[Parameters], Trial]:
    def build(_: Parameters) -> Trial:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 1))
        settings = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True}
        engine = deepspeed().initialize(
            model=model,
            optimizer=optimizers_of(model, leaf),
            config=settings | {"bf16": {"enabled": True}, "zero_force_ds_cpu_optimizer": False} | config,
        )[0]

        def step(i: int) -> None:
            seed = torch.Generator().manual_seed(10 * i + distributed.get_rank())
            engine.backward(engine(torch.randn(3, 6, generator=seed).bfloat16()).square().sum())
            engine.step()

        def save_and_load() -> None:
            folder = [tempfile.mkdtemp()]
            distributed.broadcast_object_list(folder)
            engine.save_checkpoint(folder[0])
            assert engine.load_checkpoint(folder[0])[0]

        wrapper = engine.optimizer
        return Trial(wrapper, step, lambda: [*masters(wrapper), *copies(wrapper)], save_and_load)

    return build


OFFLOADED = {"offload_optimizer": {"device": "cpu"}}
IN_FLOAT32 = {"data_types": {"grad_accum_dtype": "fp32"}}
WRAPPERS = {
    "DeepSpeedZeroOptimizer": [
        {"zero_optimization": {"stage": 1}},
        {"zero_optimization": {"stage": 2, **OFFLOADED}},
    ],
    "DeepSpeedZeroOptimizer_Stage3": [
        {"zero_optimization": {"stage": 3}},
        {"zero_optimization": {"stage": 3, **OFFLOADED}},
    ],
    "BF16_Optimizer": [{"zero_optimization": {"stage": 1}, **IN_FLOAT32}],
    "FP16_UnfusedOptimizer": [{}],
}


def hold(name: str) -> None:
    for config in WRAPPERS[name]:
        assert type(engine(config)([]).optimizer).__name__ == name
        assert_reset_is_fresh(engine(config), **LAW)
    sgd = engine(WRAPPERS[name][0], lambda groups: SGD(groups, lr=0.1, momentum=0.9, nesterov=True))
    if name == "DeepSpeedZeroOptimizer_Stage3":  # which of two groups an entry is of, nothing tells there
        with pytest.raises(UnsupportedOptimizerState, match="depends on 'dampening'"):
            reset_optimizer_states(step_some(sgd([])).optimizer)
    else:
        assert_reset_is_fresh(sgd, **LAW, round_trips=(False,))


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_reset_is_fresh_below(name: str) -> None:
    run_ranks(hold, 1, name)


def fused(weights: Parameters) -> Trial:
    """Build the wrapper that the engine takes for kernels alone, around torch's AdamW."""
    deepspeed().init_distributed("gloo")
    from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer

    parameters = weights[:4]  # without the flat copies, which it makes
    wrapper = FP16_Optimizer(AdamW(parameters, lr=0.1), low_precision_dtype=torch.bfloat16)
    inner = trial_of(wrapper, parameters)
    return Trial(wrapper, inner.step, lambda: [*parameters, *wrapper.fp32_groups_flat])


def hold_fused() -> None:
    assert_reset_is_fresh(fused, parameters=cast(torch.bfloat16), **LAW)
    trial = step_some(fused(cast(torch.bfloat16)()))
    for weight in trial.weights()[:4]:
        weight.data.fill_(0.5)
    assert refresh_masters(trial.optimizer) == 1
    assert all(torch.all(master == 0.5) for master in trial.weights()[4:])


@needs_deepspeed
@pytest.mark.slow
def test_a_reset_is_fresh_below_the_wrapper_for_kernels() -> None:
    run_ranks(hold_fused, 1)


def hold_partitioned() -> None:
    for name in ("DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3", "BF16_Optimizer"):
        assert_reset_is_fresh(engine(WRAPPERS[name][0]), **LAW, round_trips=(name != "BF16_Optimizer",))


@needs_deepspeed
@pytest.mark.slow
def test_a_reset_is_fresh_where_ranks_share_the_state() -> None:
    run_ranks(hold_partitioned, 2)


def look_at_each() -> None:
    for configs in WRAPPERS.values():
        trial = engine(configs[0])([])
        wrapper = trial.optimizer
        for i in range(3):
            trial.step(i)
        refresh(wrapper)
    refuse_adagrad()
    forget_the_step_that_building_makes()


def refresh(wrapper: Any) -> None:
    """See the master weights follow weights that were loaded without the optimizer."""
    for weights in copies(wrapper):
        weights.data.fill_(0.5)
    assert not any(torch.all(master == 0.5) for master in masters(wrapper))
    assert refresh_masters(wrapper) == 1
    assert all(torch.all(master == 0.5) for master in masters(wrapper))


def refuse_adagrad() -> None:
    """See an optimizer refused whose state after one step nobody has looked at."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 1))
    wrapper = engine({})([]).optimizer
    wrapper.optimizer = Adagrad(model.parameters())
    with pytest.raises(UnreachableStateError, match=r"that leaves in torch\.optim\.adagrad\.Adagrad is not"):
        reset_optimizer_states(wrapper)
    wrapper.optimizer = SGD(model.parameters(), momentum=0.9, weight_decay=0.1)
    with pytest.raises(UnreachableStateError, match="has the weight decay in the moments"):
        reset_optimizer_states(wrapper)


def forget_the_step_that_building_makes() -> None:
    target = "deepspeed.runtime.fp16.unfused_optimizer.FP16_UnfusedOptimizer"
    registry = load_registry(plugins=[plugin("fault", UnwrapRule(target, "optimizer", override=True))])
    with pytest.raises(AssertionError, match="step 1 of 3 leaves"):
        assert_reset_is_fresh(engine({}), **LAW, registry=registry)


@needs_deepspeed
@pytest.mark.slow
def test_masters_follow_weights_and_the_step_that_building_makes_counts() -> None:
    run_ranks(look_at_each, 1)


# Optimizers of DeepSpeed's that run on a CPU


def built(op: str) -> bool:
    """Say whether a kernel is there: to compile one takes minutes."""
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory(op, verbose=False), f"{op}.so").is_file()


ON_CPU = {
    "DeepSpeedCPUAdam": ("deepspeed.ops.adam.cpu_adam", "cpu_adam"),
    "DeepSpeedCPULion": ("deepspeed.ops.lion.cpu_lion", "cpu_lion"),
    "DeepSpeedCPUAdagrad": ("deepspeed.ops.adagrad.cpu_adagrad", "cpu_adagrad"),
}


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.parametrize("name", ON_CPU)
def test_a_reset_is_fresh_for_the_cpu(name: str) -> None:
    module, op = ON_CPU[name]
    if not built(op):
        pytest.skip(f"{op} would be compiled, which takes minutes: build it first")
    run_ranks(hold_on_cpu, 1, module, name)


def hold_on_cpu(module: str, name: str) -> None:
    deepspeed()
    cls = getattr(importlib.import_module(module), name)
    for dtype, options in [
        (torch.float32, {}),
        (torch.bfloat16, {}),
        (torch.bfloat16, {"fp32_optimizer_states": False}),
    ]:
        optimizer = partial(cls, lr=0.1, **options)
        trips = (
            (False,) if name == "DeepSpeedCPULion" else (False, True)
        )  # its load adds amsgrad to the groups
        assert_reset_is_fresh(optimizer, parameters=cast(dtype), round_trips=trips, **LAW)


def hold_muon() -> None:
    deepspeed().init_distributed("gloo")
    from deepspeed.runtime.zero.muon import muon_optimizer, original_muon

    def groups(parameters: Parameters) -> list[Options]:
        matrices, others = parameters[:2], parameters[2:]
        return [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}]

    matrices = lambda: sample_parameters()[:2]  # noqa: E731 - two of them
    assert_reset_is_fresh(original_muon.SingleDeviceMuon, parameters=matrices, **LAW)
    assert_reset_is_fresh(original_muon.Muon, parameters=matrices, **LAW)
    for cls in (original_muon.SingleDeviceMuonWithAuxAdam, original_muon.MuonWithAuxAdam):
        assert_reset_is_fresh(lambda parameters, cls=cls: cls(groups(parameters)), **LAW)
    for inside in (None, AdamW, FusedAdamLike):
        cls = muon_optimizer.MuonWithAuxAdam
        assert_reset_is_fresh(
            lambda parameters, cls=cls, inside=inside: cls(groups(parameters), adam_optimizer=inside), **LAW
        )


@needs_deepspeed
@pytest.mark.slow
def test_a_reset_of_muon_is_fresh() -> None:
    run_ranks(hold_muon, 1)


# Stand-ins for optimizers whose kernels need a GPU


class FusedAdamLike(Optimizer):
    """Stand in for FusedAdam of DeepSpeed: its name and state; the last entry of a group counts steps."""

    __module__ = "deepspeed.ops.adam.fused_adam"
    __qualname__ = "FusedAdam"

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group.setdefault("step", 0)
            held = [p for p in group["params"] if p.grad is not None]
            for p in held:
                if not self.state[p]:
                    moments = {key: torch.zeros_like(p) for key in ("exp_avg", "exp_avg_sq")}
                    self.state[p] = {"step": group["step"], **moments}
            if held:
                self.state[held[-1]]["step"] += 1
                step = self.state[held[-1]]["step"]
            for p in held:
                state, (beta1, beta2) = self.state[p], group["betas"]
                mean = state["exp_avg"].lerp_(p.grad, 1 - beta1) / (1 - beta1**step)
                square = state["exp_avg_sq"].lerp_(p.grad.square(), 1 - beta2) / (1 - beta2**step)
                p.sub_(group["lr"] * mean / (square.sqrt() + 1e-8))


class FusedLambLike(AdamW):
    """Stand in for FusedLamb of DeepSpeed: its name and its state, which is that of Adam."""

    __module__ = "deepspeed.ops.lamb.fused_lamb"
    __qualname__ = "FusedLamb"


class FusedLionLike(Optimizer):
    """Stand in for FusedLion of DeepSpeed: its name and its state."""

    __module__ = "deepspeed.ops.lion.fused_lion"
    __qualname__ = "FusedLion"

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group.setdefault("step", 0)
            for p in group["params"]:
                if p.grad is not None:
                    if not self.state[p]:
                        self.state[p] = {"step": group["step"], "exp_avg": torch.zeros_like(p)}
                    self.state[p]["step"] += 1
                    mean = self.state[p]["exp_avg"]
                    p.sub_(group["lr"] * mean.lerp(p.grad, 0.1).sign())
                    mean.lerp_(p.grad, 0.01)


STAND_INS = {"FusedAdam": FusedAdamLike, "FusedLamb": FusedLambLike, "FusedLion": FusedLionLike}
SETTINGS = {"plain": Setting(), "no gradient": Setting(build=no_gradient)}
TABLE = Table(STAND_INS, {name: [{}] for name in STAND_INS}, SETTINGS, {}, package="deepspeed")


@pytest.mark.parametrize("case", TABLE.cases())
def test_a_reset_of_a_stand_in_is_fresh(case: Any) -> None:
    case.assert_reset_is_fresh()


def test_copies_that_offloading_leaves_are_no_state() -> None:
    """Do as offload_states() and reload_states() of ZeRO 3 do, and reset between."""
    parameters = sample_parameters()
    trial = trial_of(FusedAdamLike(parameters), parameters)
    trial.step(0)
    states = trial.optimizer.state.values()
    moments = ("exp_avg", "exp_avg_sq")
    for state in states:
        for key in moments:
            state[f"{key}_offload_buffer"] = state[key].clone()
            state[key].data = state[f"{key}_offload_buffer"]
    reset_optimizer_states(trial.optimizer)
    for state in states:
        for key in moments:
            state[key].data = state[f"{key}_offload_buffer"].clone()
            assert not state[key].any()
    trial.step(1)
    reset_optimizer_states(trial.optimizer)
    assert not any(state[key].any() for state in states for key in moments)


def stand_in(name: str, **attributes: Any) -> Any:
    wrapper = class_named(name)()
    vars(wrapper).update(attributes)
    return wrapper


STAGE_2 = "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer"
STAGE_3 = "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3"
ONEBIT = "deepspeed.runtime.fp16.onebit"
SWAPPER = stand_in("swap.Swapper", swap_params_info={0: 1})


@pytest.mark.parametrize(
    ("name", "attributes", "reason"),
    [
        (
            STAGE_3,
            {"optimizer_swapper": SWAPPER},
            "swapped to NVMe",
        ),
        (STAGE_3, {"zenflow": True}, "ZenFlow steps a part"),
        (
            "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer",
            {"zenflow": True},
            "ZenFlow steps a part",
        ),
        ("deepspeed.ops.adam.zenflow_cpu_adam.ZenFlowCPUAdam", {}, "ZenFlow steps a part"),
        (
            "deepspeed.runtime.superoffload.superoffload_stage3.SuperOffloadOptimizer_Stage3",
            {},
            "another process",
        ),
        (f"{ONEBIT}.adam.OnebitAdam", {}, "its stage is kept in the engine"),
        (f"{ONEBIT}.lamb.OnebitLamb", {}, "its stage is kept in the engine"),
        (f"{ONEBIT}.zoadam.ZeroOneAdam", {}, "its stage is kept in the engine"),
    ],
)
def test_what_is_out_of_reach_is_refused(name: str, attributes: Options, reason: str) -> None:
    optimizer = AdamW(sample_parameters())
    with pytest.raises(UnreachableStateError, match=reason):
        reset_optimizer_states(stand_in(name, optimizer=optimizer, **attributes))


def test_momentum_that_a_load_has_parted_from_the_state_is_refused() -> None:
    parameters = sample_parameters()[:1]
    optimizer = SGD(parameters, momentum=0.9)
    trial_of(optimizer, parameters).step(0)
    held = optimizer.state[parameters[0]]["momentum_buffer"]
    wrapper = stand_in(
        STAGE_3,
        optimizer=optimizer,
        fp32_partitioned_groups_flat=parameters,
        muon_momentum_buffer_partitioned_groups_flat={0: held},
    )
    plan_reset(wrapper)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with pytest.raises(UnreachableStateError, match="parted the state from Muon's momentum"):
        plan_reset(wrapper)


def test_the_optimizer_beside_an_offloaded_one_is_reset_too() -> None:
    trials = [
        trial_of(AdamW(parameters), parameters) for parameters in (sample_parameters(), sample_parameters())
    ]
    for trial in trials:
        trial.step(0)
    one, other = (trial.optimizer for trial in trials)
    report = reset_optimizer_states(stand_in(STAGE_3, optimizer=one, backup_optimizer=other))
    assert report.leaves == 2
    assert not any(state["step"] for trial in trials for state in trial.optimizer.state.values())


def test_masters_do_not_follow_weights_that_are_offloaded() -> None:
    wrapper = stand_in(STAGE_3, optimizer=None, offloaded_states={"lp_params"})
    with pytest.raises(RuntimeError, match=r"Call reload_states\(\) first"):
        refresh_masters(wrapper)


def test_accelerate_s_wrapper_is_seen_through() -> None:
    accelerate = pytest.importorskip("accelerate.utils.deepspeed")
    parameters = sample_parameters()
    trial = trial_of(AdamW(parameters), parameters)
    trial.step(0)
    zero = stand_in(STAGE_2, optimizer=trial.optimizer)
    wrapper = accelerate.DeepSpeedOptimizerWrapper.__new__(accelerate.DeepSpeedOptimizerWrapper)
    wrapper.optimizer = zero
    assert plan_reset(wrapper).rows[0].nodes[0].path == (
        "DeepSpeedOptimizerWrapper.DeepSpeedZeroOptimizer.AdamW"
    )
