"""Hold torch's own wrappers to the law of a reset, on two ranks over gloo."""

import copy
from collections.abc import Callable

import pytest
import torch
from fakes import plugin
from fused_adam import FusedAdamLike
from ranks import run_ranks
from torch import distributed
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import (
    PostLocalSGDOptimizer,
    ZeroRedundancyOptimizer,
    _apply_optimizer_in_backward,
    _get_in_backward_optimizers,
    _NamedOptimizer,
)
from torch.optim import SGD, AdamW, Optimizer
from variants import draw, step_some

from miles_reset import (
    UnreachableStateError,
    UnwrapRule,
    load_registry,
    plan_reset,
    reset_optimizer_states,
)
from miles_reset.registry import class_name
from miles_reset.testing import Parameters, Trial, assert_reset_is_fresh, sample_parameters, trial_of

FROM_SOURCE = {
    "torch.distributed.optim.optimizer.DistributedOptimizer": (
        "from the source of torch 2.14, not run here: needs workers over RPC; it is refused"
    )
}
"""What is declared without being held to the law through the library itself, and why."""

RANKS = 2
LAW = {"warmups": (0, 3), "further": 8}  # with 4, what happens every fourth step would not show


# ZeroRedundancyOptimizer: each rank steps some of the parameters


def zero(leaf: type[Optimizer]) -> Callable[[Parameters], Trial]:
    def build(parameters: Parameters) -> Trial:
        optimizer = ZeroRedundancyOptimizer(parameters, leaf, lr=0.1)

        def save_and_load() -> None:
            for rank in range(RANKS):  # one rank at a time has all of the state
                optimizer.consolidate_state_dict(rank)
                if rank == distributed.get_rank():
                    saved = copy.deepcopy(optimizer.state_dict())
            optimizer.load_state_dict(saved)

        inner = trial_of(optimizer, parameters)
        return Trial(optimizer, inner.step, inner.weights, save_and_load)

    return build


def hold_zero() -> None:
    assert_reset_is_fresh(zero(AdamW), **LAW)
    assert_reset_is_fresh(zero(FusedAdamLike), **LAW)  # counts its steps in the group
    trial = step_some(zero(AdamW)(sample_parameters()))
    trial.reload()
    assert trial.optimizer.state  # copies that a load leaves, and a later save takes where a leaf has none
    reset_optimizer_states(trial.optimizer)
    assert not trial.optimizer.state


@pytest.mark.slow
def test_reset_is_fresh_below_zero_redundancy_optimizer() -> None:
    run_ranks(hold_zero, RANKS)


def bring_the_fault_back() -> None:
    no_stale_groups = UnwrapRule(class_name(ZeroRedundancyOptimizer), "optim", override=True)
    registry = load_registry(plugins=[plugin("fault", no_stale_groups)])
    with pytest.raises(AssertionError, match=r"step 1 of 8 leaves weight 0 off"):
        assert_reset_is_fresh(zero(FusedAdamLike), **LAW, registry=registry)


@pytest.mark.slow
def test_count_returns_where_the_rule_does_not_name_stale_groups() -> None:
    run_ranks(bring_the_fault_back, RANKS)


# PostLocalSGDOptimizer: each rank steps by itself, and every so often they average


def post_local(leaf: type[Optimizer]) -> Callable[[Parameters], Trial]:
    def build(parameters: Parameters) -> Trial:
        optimizer = PostLocalSGDOptimizer(leaf(parameters, lr=0.1), PeriodicModelAverager(period=4))

        def step(i: int) -> None:
            for number, parameter in enumerate(parameters):
                parameter.grad = draw(parameter, 100 * i + 10 * distributed.get_rank() + number)
            optimizer.step()

        return Trial(optimizer, step, lambda: parameters)

    return build


def hold_post_local() -> None:
    assert_reset_is_fresh(post_local(AdamW), **LAW)
    assert_reset_is_fresh(post_local(SGD), **LAW)  # has no history but the averager's


@pytest.mark.slow
def test_reset_is_fresh_below_post_local_sgd_optimizer() -> None:
    run_ranks(hold_post_local, RANKS)


# FSDP2: no wrapper, but parameters and state are sharded


def sharded(leaf: Callable[[Parameters], Optimizer]) -> Callable[[Parameters], Trial]:
    def build(_: Parameters) -> Trial:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 1))
        fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
        optimizer = leaf(list(model.parameters()))

        def step(i: int) -> None:
            optimizer.zero_grad()
            inputs = torch.randn(
                3, 6, generator=torch.Generator().manual_seed(10 * i + distributed.get_rank())
            )
            model(inputs).square().sum().backward()
            optimizer.step()

        return Trial(optimizer, step, lambda: list(model.parameters()))

    return build


def hold_fsdp2() -> None:
    assert_reset_is_fresh(sharded(AdamW), **LAW)
    assert_reset_is_fresh(sharded(lambda parameters: SGD(parameters, momentum=0.9, dampening=0.3)), **LAW)
    optimizer = step_some(sharded(AdamW)(sample_parameters())).optimizer
    shards = [state["exp_avg"].to_local() for state in optimizer.state.values()]
    empty = [shard.numel() == 0 for shard in shards]
    assert any(empty) == (distributed.get_rank() == 1)
    assert plan_reset(optimizer).counts == {"filled in place": 3 * len(shards)}


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="FSDP2 of this torch (2.6) cannot run on a CPU"
)
def test_reset_is_fresh_where_fsdp2_shards_the_state() -> None:
    run_ranks(hold_fsdp2, RANKS)


# _NamedOptimizer: parameters by name


@pytest.mark.parametrize("leaf", [AdamW, FusedAdamLike])
def test_reset_is_fresh_below_named_optimizer(leaf: type[Optimizer]) -> None:
    def build(parameters: Parameters) -> Trial:
        named = {str(i): parameter for i, parameter in enumerate(parameters)}
        return trial_of(_NamedOptimizer(named, leaf, lr=0.1), parameters)

    assert_reset_is_fresh(build, warmups=(3,), further=4, round_trips=(False,))  # it loads no AdamW's groups


# Optimizers that step in the backward pass: a list, found through the module


def in_backward(parameters: Parameters) -> Trial:
    module = torch.nn.ParameterList(parameters)
    _apply_optimizer_in_backward(AdamW, module.parameters(), {"lr": 0.1})
    optimizers = _get_in_backward_optimizers(module)

    def step(i: int) -> None:
        sum((parameter * draw(parameter, i)).sum() for parameter in module).backward()

    def save_and_load() -> None:
        for optimizer in optimizers:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    return Trial(optimizers, step, lambda: parameters, save_and_load)


def test_reset_is_fresh_where_optimizers_step_in_the_backward_pass() -> None:
    trial = in_backward(sample_parameters())
    assert len(trial.optimizer) == 4
    assert plan_reset(trial.optimizer).leaves == 4
    assert_reset_is_fresh(in_backward, warmups=(3,), further=4)


@pytest.mark.parametrize(
    "collect",
    [list, tuple, lambda some: {"first": some[0], "rest": some[1:]}, lambda some: [some[0], [*some[1:]]]],
    ids=["list", "tuple", "dict", "nested"],
)
def test_optimizers_are_reset_in_any_collection(collect: Callable[[list[Optimizer]], object]) -> None:
    optimizers = step_some(in_backward(sample_parameters())).optimizer
    assert reset_optimizer_states(collect(optimizers)).leaves == 4
    assert not any(state["exp_avg"].any() for one in optimizers for state in one.state.values())


# DistributedOptimizer: remote


def test_optimizers_of_other_processes_are_refused() -> None:
    from torch.distributed.optim.optimizer import DistributedOptimizer

    remote = DistributedOptimizer.__new__(DistributedOptimizer)
    with pytest.raises(UnreachableStateError, match="in other processes"):
        reset_optimizer_states(remote)
