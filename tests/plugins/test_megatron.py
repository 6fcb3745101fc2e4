"""Hold the Megatron plugin to the law, through Megatron's own wrappers on a CPU."""

import copy
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from fakes import class_named
from fused_adam import ApexFusedAdamLike, FusedAdamLike

pytest.importorskip("megatron.core")

from megatron_cpu import (
    FIXTURES,
    UPSTREAM_WARNINGS,
    build,
    cases,
    group_holders,
    megatron_session,
    trial,
)

from miles_reset import (
    Registry,
    UnreachableStateError,
    default_registry,
    load_registry,
    plan_reset,
    reset_optimizer_states,
)
from miles_reset.testing import Trial, assert_reset_is_fresh
from miles_reset.walk import walk

pytestmark = [
    pytest.mark.usefixtures("session"),
    pytest.mark.filterwarnings(*UPSTREAM_WARNINGS),
]

# A stub has nothing to remember, so that the law could not fail.
WITH_HISTORY = [case for case in cases("build", "step") if case.values != ("chain_stub_only",)]
AT = {"warmups": (1, 4), "further": 5}


@pytest.fixture(scope="module")
def session() -> Iterator[None]:
    with megatron_session():
        yield


def needs(*names: str) -> list[Any]:
    """List fixtures by name, as `cases` does."""
    return [case for case in cases("build", "step") if case.values[0] in names]


@pytest.mark.parametrize("name", WITH_HISTORY)
def test_reset_is_fresh(name: str) -> None:
    round_trips = (False,) if FIXTURES[name].failure("round_trip") else (False, True)
    assert_reset_is_fresh(lambda _: trial(name), round_trips=round_trips, **AT)


@pytest.mark.parametrize("name", WITH_HISTORY)
def test_state_keeps_its_storage(name: str) -> None:
    fixture = build(name)
    fixture.step(0)
    before = addresses(fixture.optimizer)
    reset_optimizer_states(fixture.optimizer)
    assert before == addresses(fixture.optimizer)


def addresses(optimizer: object) -> list[tuple[str, int]]:
    """Say where each tensor of the state lies."""
    leaves = walk(optimizer, default_registry()).leaves
    entries = chain.from_iterable(leaf.obj.state.values() for leaf in leaves)
    items = chain.from_iterable(entry.items() for entry in entries)
    return [(key, value.data_ptr()) for key, value in items if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("name", cases("build"))
def test_reset_before_the_first_step_changes_nothing(name: str) -> None:
    optimizer = build(name).optimizer
    report = reset_optimizer_states(optimizer)
    made_when_built = name == "distributed_aware_fused"
    assert bool(report.changed) == made_when_built
    for leaf in walk(optimizer, default_registry()).leaves:
        assert bool(leaf.obj.state) == made_when_built
        assert not any("step" in group for group in leaf.obj.param_groups)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("fp32_adam", "ChainedOptimizer[0].FP32Optimizer.AdamW"),
        ("chain_nested", "ChainedOptimizer[0].ChainedOptimizer[0].FP32Optimizer.AdamW"),
        ("distributed_experts", "ChainedOptimizer[1].DistributedOptimizer.AdamW"),
        ("hybrid_overlap", "HybridDeviceOptimizer[2].AdamW"),
        ("hybrid_no_overlap", "HybridDeviceOptimizer[1].AdamW"),
        ("distributed_hybrid", "ChainedOptimizer[0].DistributedOptimizer.HybridDeviceOptimizer[1].AdamW"),
    ],
)
def test_path_names_every_wrapper_on_the_way(name: str, path: str) -> None:
    fixture = build(name)
    leaves = walk(fixture.optimizer, default_registry()).leaves
    assert path in {leaf.path for leaf in leaves}


@pytest.mark.parametrize(
    ("name", "path", "reason"),
    [
        ("chain_fp32_stub", "ChainedOptimizer[1].FP32Optimizer.None", "stub: holds no optimizer"),
        ("chain_stub_only", "ChainedOptimizer[0].FP32Optimizer.None", "stub: holds no optimizer"),
        ("chain_empty", "ChainedOptimizer", "holds no optimizers"),
        (
            "chain_distributed_stub",
            "ChainedOptimizer[1].DistributedOptimizer.None",
            "stub: holds no optimizer",
        ),
    ],
)
def test_what_holds_no_optimizer_is_passed_over_and_listed(name: str, path: str, reason: str) -> None:
    report = reset_optimizer_states(build(name).optimizer)
    assert report.left_alone == ((path, reason),)
    assert f"left alone: {path}: {reason}" in str(report)
    if not report.leaves:
        assert "No optimizer was reached: nothing reset." in str(report)


def masters_of(name: str, fixture: Any) -> list[torch.Tensor]:
    """Find master weights where Megatron keeps them, whatever the fixture says."""
    (optimizer,) = getattr(fixture.optimizer, "chained_optimizers", [fixture.optimizer])
    if name.startswith("hybrid"):
        return list(optimizer.param_to_fp32_param.values())
    if name == "distributed_aware_fused":
        return [state["master_param"] for state in optimizer.optimizer.state.values()]
    groups = (
        "shard_fp32_from_float16_groups" if name.startswith("distributed") else "fp32_from_float16_groups"
    )
    return list(chain.from_iterable(getattr(optimizer, groups)))


@pytest.mark.parametrize(
    "name", ["bf16", "fp16_scaler", "distributed_bf16", "distributed_aware_fused", "hybrid_overlap"]
)
def test_master_weights_are_not_touched(name: str) -> None:
    fixture = build(name)
    fixture.step(0)
    before = [(tensor.data_ptr(), tensor.detach().clone()) for tensor in masters_of(name, fixture)]
    reset_optimizer_states(fixture.optimizer)
    after = masters_of(name, fixture)
    assert len(before) == len(after) == 5
    for (address, master), now in zip(before, after, strict=True):
        assert now.dtype == torch.float32
        assert now.data_ptr() == address
        assert torch.equal(master, now)


def test_gradient_scaler_is_kept_and_listed() -> None:
    fixture = build("fp16_scaler")
    (wrapper,) = fixture.optimizer.chained_optimizers
    for i in range(3):
        fixture.step(i)
    wrapper.grad_scaler.update(found_inf=True)
    before = copy.deepcopy(wrapper.grad_scaler.state_dict())
    assert before != build("fp16_scaler").optimizer.chained_optimizers[0].grad_scaler.state_dict()
    report = reset_optimizer_states(fixture.optimizer)
    assert wrapper.grad_scaler.state_dict() == before
    kept = {line.key for line in report.lines if line.outcome == "kept"}
    assert kept == {f"grad_scaler._{key}" for key in before}


def outcomes(optimizer: torch.optim.Optimizer) -> dict[str, tuple[str, str]]:
    """Take a step over one parameter, and say what becomes of each slot, by whose word."""
    (param,) = optimizer.param_groups[0]["params"]
    param.grad = torch.ones(3)
    optimizer.step()
    return {line.key: (line.outcome, line.plugin) for line in plan_reset(optimizer).lines}


def one_parameter() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(3))]


FILLED, REMOVED = ("filled in place", "megatron"), ("removed", "megatron")


@pytest.mark.parametrize("optimizer_class", [FusedAdamLike, ApexFusedAdamLike])
def test_fused_adam_is_found_by_its_dotted_name(optimizer_class: type) -> None:
    assert_reset_is_fresh(lambda params: optimizer_class(params, lr=0.1), **AT)
    found = outcomes(optimizer_class(one_parameter()))
    assert found == {"exp_avg": FILLED, "exp_avg_sq": FILLED, "step": REMOVED}


@pytest.mark.parametrize("optimizer_class", [FusedAdamLike, ApexFusedAdamLike])
def test_step_that_a_captured_graph_holds_is_zeroed_in_place(optimizer_class: type) -> None:
    assert_reset_is_fresh(lambda params: optimizer_class(params, lr=0.1, capturable=True), **AT)
    assert outcomes(optimizer_class(one_parameter(), capturable=True))["step"] == FILLED


def test_fused_adam_of_apex_is_fresh_in_a_hybrid_optimizer() -> None:
    name = "distributed_hybrid_aware_fused"
    assert_reset_is_fresh(lambda _: trial(name, ApexFusedAdamLike), **AT)
    leaves = walk(build(name, ApexFusedAdamLike).optimizer, default_registry()).leaves
    assert "apex.optimizers.fused_adam.FusedAdam" in {leaf.claim.record.target for leaf in leaves}


class FusedSGDLike(torch.optim.Optimizer):
    """Stand in for FusedSGD: the first gradient becomes the momentum, undampened, if there is none."""

    def __init__(self, params: Any, dampening: float) -> None:
        super().__init__(params, {"lr": 0.1, "momentum": 0.9, "dampening": dampening})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if "momentum_buffer" in state:
                    buffer = state["momentum_buffer"].mul_(group["momentum"])
                    buffer.add_(param.grad, alpha=1 - group["dampening"])
                else:
                    buffer = state["momentum_buffer"] = param.grad.clone()
                param.sub_(buffer, alpha=group["lr"])


@pytest.mark.parametrize("dampening", [0.0, 0.5])
@pytest.mark.parametrize("library", ["transformer_engine.pytorch", "apex"])
def test_fused_sgd_is_found_by_its_dotted_name(library: str, dampening: float) -> None:
    optimizer_class = class_named(f"{library}.optimizers.fused_sgd.FusedSGD", FusedSGDLike)
    assert_reset_is_fresh(lambda params: optimizer_class(params, dampening), **AT)
    found = outcomes(optimizer_class(one_parameter(), dampening))
    assert found == {"momentum_buffer": REMOVED if dampening else FILLED}


def test_muon_of_megatron_016_is_found_by_its_dotted_name() -> None:
    # That version's muon does not run with any released emerging-optimizers; its state is SGD's.
    muon = class_named("megatron.core.optimizer.muon.TensorParallelMuon", torch.optim.SGD)
    assert_reset_is_fresh(lambda params: muon(params, momentum=0.9), registry=without_emerging(), **AT)
    assert outcomes(muon(one_parameter(), momentum=0.9)) == {"momentum_buffer": FILLED}


def without_emerging() -> Registry:
    return load_registry(disabled=["emerging"])


@pytest.mark.parametrize("name", needs("fp32_adam", "muon", "adaptive_muon_adamuon", "adaptive_muon_normuon"))
def test_plugin_of_emerging_optimizers_is_not_needed(name: str) -> None:
    assert_reset_is_fresh(lambda _: trial(name), registry=without_emerging(), **AT)


def test_layer_wise_children_without_a_wrapper_are_reset_though_megatron_cannot_step_them() -> None:
    if reason := FIXTURES["muon_layer_wise_fp32"].unavailable():
        pytest.skip(reason)

    def raw_children(_: object) -> Trial:
        fixture = build("muon_layer_wise_fp32")

        def step(i: int) -> None:
            fixture.set_gradients(i)
            for child in fixture.optimizer.chained_optimizers:
                for param in chain.from_iterable(group["params"] for group in child.param_groups):
                    param.grad = param.main_grad
                child.step()

        return Trial(fixture.optimizer, step, fixture.weights)

    assert_reset_is_fresh(raw_children, round_trips=(False,), **AT)


@pytest.mark.parametrize("name", needs("bf16", "fp16_scaler", "distributed_bf16", "muon_layer_wise"))
def test_reset_while_megatron_keeps_the_state_on_the_cpu_is_fresh(name: str) -> None:
    def offloading(_: object) -> Trial:
        fixture = build(name)

        def step(i: int) -> None:
            fixture.optimizer.restore_from_cpu()
            fixture.step(i)

        return Trial(fixture.optimizer, step, fixture.weights, fixture.optimizer.offload_to_cpu)

    assert_reset_is_fresh(offloading, round_trips=(True,), **AT)


def test_what_a_hybrid_optimizer_saves_after_the_reset_is_fresh() -> None:
    optimizer = (fixture := build("hybrid_overlap")).optimizer
    fixture.step(0)
    reset_optimizer_states(optimizer)
    held = [entry for child in optimizer.sub_optimizers for entry in child.state.values()]
    assert all(any(entry is own for own in optimizer.state.values()) for entry in held)
    for entry in optimizer.state_dict()["state"].values():
        assert not any(entry[key].any() for key in ("exp_avg", "exp_avg_sq", "step"))


LOADED = 5.0


def refresh_masters(optimizer: object) -> None:
    for node in walk(optimizer, default_registry()).wrappers:
        if node.claim.record.refresh_masters is not None:
            node.claim.record.refresh_masters(node.obj)


def after_a_load_of_weights_alone(name: str, loaded: bool, *, refreshed: bool) -> Any:
    fixture = build(name)
    for i in range(2):
        fixture.step(i)
    if loaded:
        fixture.round_trip()
    for param in fixture.net.parameters():
        param.data.fill_(LOADED)
    if refreshed:
        refresh_masters(fixture.optimizer)
    reset_optimizer_states(fixture.optimizer)
    return fixture


@pytest.mark.parametrize(
    ("name", "loaded"),
    [
        pytest.param(case.values[0], loaded, marks=case.marks)
        for case in WITH_HISTORY
        for loaded in (False, True)
        if not (loaded and FIXTURES[case.values[0]].failure("round_trip"))
    ],
)
def test_weights_loaded_without_the_optimizer_outlive_the_next_steps(name: str, loaded: bool) -> None:
    fixture = after_a_load_of_weights_alone(name, loaded, refreshed=True)
    twin = build(name)
    for weight in twin.weights():
        weight.data.fill_(LOADED)
    for i in range(3):
        fixture.step(i)
        twin.step(i)
        assert all(map(torch.equal, fixture.weights(), twin.weights()))
        assert all((param - LOADED).abs().max() < 1 for param in fixture.net.parameters())

    fixture = after_a_load_of_weights_alone(name, loaded, refreshed=False)
    of_model = {param.untyped_storage().data_ptr() for param in fixture.net.parameters()}
    copies = [w for w in fixture.weights() if w.untyped_storage().data_ptr() not in of_model]
    fixture.step(0)
    undone = [param for param in fixture.net.parameters() if param.mean() < 1]
    assert bool(undone) == bool(copies)


def test_what_a_hybrid_optimizer_saves_after_a_refresh_are_the_loaded_weights() -> None:
    fixture = after_a_load_of_weights_alone("hybrid_overlap", loaded=True, refreshed=True)
    saved = fixture.optimizer.state_dict()["state"].values()
    assert all((entry["master_param"] == LOADED).all() for entry in saved)


def test_remainders_of_master_weights_outlive_a_reset_and_are_zero_once_refreshed() -> None:
    """Transformer Engine can keep, in int16, only what a bf16 parameter lacks of its master weight."""
    optimizer = build("distributed_aware_fused").optimizer
    (leaf,) = group_holders(optimizer)
    for state in leaf.state.values():
        state["master_param"] = torch.ones_like(state["exp_avg"], dtype=torch.int16)
    reset_optimizer_states(optimizer)
    assert all(state["master_param"].all() for state in leaf.state.values())
    refresh_masters(optimizer)
    assert not any(state["master_param"].any() for state in leaf.state.values())


FROM_SOURCE = {
    "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam": (
        "from the source of transformer_engine, not run here: needs a GPU; a stand-in has its state"
    ),
    "transformer_engine.pytorch.optimizers.fused_sgd.FusedSGD": (
        "from the source of transformer_engine, not run here: needs a GPU; a stand-in has its state"
    ),
    "apex.optimizers.fused_adam.FusedAdam": (
        "from the source of apex, not run here: needs a GPU; a stand-in has its state"
    ),
    "apex.optimizers.fused_sgd.FusedSGD": (
        "from the source of apex, not run here: needs a GPU; a stand-in has its state"
    ),
    "megatron.core.optimizer.muon.TensorParallelMuon": (
        "from the source of megatron-core 0.16, not run here: it fits no release of emerging-optimizers"
    ),
}
"""What is declared without being held to the law through the library itself, and why."""


def stand_in_wrapper(name: str, **attributes: Any) -> Any:
    """Return a wrapper of a Megatron that has no release, without its constructor."""
    optimizer_module = pytest.importorskip("megatron.core.optimizer.optimizer")
    cls = class_named(f"megatron.core.optimizer.{name}", optimizer_module.MixedPrecisionOptimizer)
    cls.__abstractmethods__ = frozenset()
    wrapper = cls.__new__(cls)
    vars(wrapper).update(attributes)
    return wrapper


def test_a_fully_sharded_optimizer_is_unwrapped_by_its_base() -> None:
    """Stand in for FullyShardedOptimizer of Megatron-LM: its weights in float32 are the model's."""
    (parameter,) = one_parameter()
    inner = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones(3)
    inner.step()
    copied: list[object] = []
    wrapper = stand_in_wrapper(
        "fully_sharded_optimizer.FullyShardedOptimizer",
        optimizer=inner,
        is_stub_optimizer=False,
        _casted_grads=[],
        reload_model_params=lambda: copied.append(1),
    )
    path = plan_reset(wrapper).lines[0].path
    assert path == "FullyShardedOptimizer.AdamW"
    reset_optimizer_states(wrapper)
    assert not inner.state[parameter]["exp_avg"].any()
    refresh_masters(wrapper)
    assert copied == [1]


@pytest.mark.parametrize("name", needs("muon_layer_wise"))
def test_tags_of_a_slot_of_many_adapters_are_kept(name: str) -> None:
    """Tag the groups of each child with a slot, as miles does with many adapters under a layer-wise chain."""
    fixture = build(name)
    fixture.step(0)
    for slot, child in enumerate(fixture.optimizer.chained_optimizers):
        for group in child.param_groups:
            group["miles_multi_lora_slot"] = slot
    reset_optimizer_states(fixture.optimizer)
    for slot, child in enumerate(fixture.optimizer.chained_optimizers):
        assert {group["miles_multi_lora_slot"] for group in child.param_groups} <= {slot}
        assert not any(tensor.any() for entry in child.optimizer.state.values() for tensor in entry.values())
    first = reset_optimizer_states(fixture.optimizer.chained_optimizers[0])
    assert first.leaves == 1


@pytest.mark.parametrize("under_a_chain", [False, True])
def test_state_that_miles_streams_to_a_disk_is_refused_by_name(under_a_chain: bool) -> None:
    optimizer = build("distributed_bf16").optimizer
    (wrapper,) = optimizer.chained_optimizers
    wrapper._nvme_state_store = object()
    with pytest.raises(UnreachableStateError, match="streamed to disk by _nvme_state_store"):
        reset_optimizer_states(optimizer if under_a_chain else wrapper)
