"""Show the faults of the algorithm that miles_reset replaces, each beside the reset that is without it.

`seed.seed_reset` is that algorithm. What belongs to a fork of Megatron, or needs a GPU, is a stand-in
and says so.
"""

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import seed
import torch
from fakes import plugin
from fused_adam import FusedAdamLike
from seed import seed_reset
from torch.optim import AdamW, Optimizer, Rprop

from miles_reset import (
    Initial,
    Registry,
    StateSchema,
    UndeclaredStateError,
    UnknownOptimizerError,
    UnreachableStateError,
    UnsupportedOptimizerState,
    UnwrapRule,
    clock,
    default_registry,
    history,
    load_registry,
    momentum,
    reset_optimizer_states,
    variance,
)
from miles_reset.testing import Parameters, Trial, sample_parameters, trial_of

UPSTREAM_WARNINGS: tuple[str, ...] = ()
if importlib.util.find_spec("megatron") is not None:
    from megatron_cpu import UPSTREAM_WARNINGS, build, group_holders, megatron_session, trial

Reset = Callable[[Any], object]
BOTH = pytest.mark.parametrize("reset", [seed_reset, reset_optimizer_states], ids=["seed", "miles_reset"])


def over_parameters(make: Callable[[Parameters], Any]) -> Callable[[], Trial]:
    """Return what builds a trial of an optimizer over the sample parameters."""

    def trial_over() -> Trial:
        parameters = sample_parameters()
        return trial_of(make(parameters), parameters)

    return trial_over


def drift(make: Callable[[], Trial], reset: Reset, *, load: bool = False) -> list[int]:
    """Reset after 3 steps, and return those of the next 5 after which weights differ from a fresh twin's."""
    one = make()
    for i in range(3):
        one.step(i)
    if load:
        one.reload()
    reset(one.optimizer)
    twin = twin_of(one, make)
    return [i for i in range(5) if not stay_alike(one, twin, i)]


def twin_of(one: Trial, make: Callable[[], Trial]) -> Trial:
    twin = make()
    for mine, weight in zip(twin.weights(), one.weights(), strict=True):
        mine.data.copy_(weight.data)
    return twin


def stay_alike(one: Trial, twin: Trial, i: int) -> bool:
    one.step(i)
    twin.step(i)
    return all(map(torch.equal, one.weights(), twin.weights()))


def stepped(optimizer: Optimizer) -> Any:
    trial_of(optimizer, [p for group in optimizer.param_groups for p in group["params"]]).step(0)
    return optimizer


def moments(optimizer: Optimizer) -> list[torch.Tensor]:
    return [entry["exp_avg"].clone() for entry in optimizer.state.values()]


def registry_with(*records: StateSchema | UnwrapRule) -> Registry:
    return load_registry(plugins=[plugin("more", *records)])


def named(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def changed(target: str, *records: StateSchema, **options: Any) -> Registry:
    """Return the default registry with another rule for a wrapper that it knows, and further records."""
    was = default_registry().claims[target].record
    assert isinstance(was, UnwrapRule)
    options = {"stale_groups": was.stale_groups, "ready": was.ready} | options
    return registry_with(*records, UnwrapRule(target, was.children, *was.slots, override=True, **options))


def test_amsgrad_is_reset() -> None:
    amsgrad = partial(AdamW, amsgrad=True)
    with pytest.raises(UnsupportedOptimizerState, match="max_exp_avg_sq"):
        seed_reset(stepped(amsgrad(sample_parameters())))
    assert drift(over_parameters(amsgrad), reset_optimizer_states) == []


def test_unknown_class_late_in_the_tree_leaves_what_is_before_it_alone() -> None:
    unknown = SimpleNamespace(state={}, param_groups=[])
    adam = stepped(AdamW(sample_parameters()))
    before = moments(adam)
    with pytest.raises(UnknownOptimizerError, match=r"at list\[1\].SimpleNamespace.*Nothing was changed"):
        reset_optimizer_states([adam, unknown])
    assert all(map(torch.equal, before, moments(adam)))
    with pytest.raises(UnsupportedOptimizerState):
        seed_reset(SimpleNamespace(chained_optimizers=[adam, unknown]))
    assert not any(map(torch.any, moments(adam)))


def test_unknown_key_late_in_a_leaf_leaves_what_is_before_it_alone() -> None:
    adam = stepped(AdamW(sample_parameters()))
    list(adam.state.values())[-1]["z"] = 1
    before = moments(adam)
    with pytest.raises(UndeclaredStateError, match=r"does not declare: 'z'.*Nothing was changed"):
        reset_optimizer_states(adam)
    assert all(map(torch.equal, before, moments(adam)))
    with pytest.raises(UnsupportedOptimizerState, match="'z'"):
        seed_reset(adam)
    assert not any(map(torch.any, moments(adam)[:-1]))


RELEASED = """
import torch
from seed import seed_reset
parameter = torch.nn.Parameter(torch.ones(4))
adam = torch.optim.AdamW([parameter])
parameter.grad = torch.ones(4)
adam.step()
adam.state[parameter]["exp_avg"].untyped_storage().resize_(0)
seed_reset(adam)
"""


def test_released_storage_is_refused_where_the_seed_crashes() -> None:
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    environment = os.environ | {"PYTHONPATH": path}
    python = subprocess.run([sys.executable, "-c", RELEASED], env=environment, check=False)
    assert python.returncode == -signal.SIGSEGV

    adam = stepped(AdamW(sample_parameters()))
    first, second, *_ = adam.state.values()
    second["exp_avg"].untyped_storage().resize_(0)
    with pytest.raises(UnreachableStateError, match=r"the storage of 'exp_avg' was released.*Nothing"):
        reset_optimizer_states(adam)
    assert first["exp_avg"].any()


class Asserting:
    """Hold optimizers in a list, and refuse to be asked for one: Megatron's chains do so."""

    def __init__(self, *inner: Any) -> None:
        self.inner = list(inner)

    @property
    def optimizer(self) -> Any:
        raise AssertionError("more than one optimizer")

    def step(self) -> None:
        for optimizer in self.inner:
            optimizer.step()


def test_property_that_asserts_is_not_asked() -> None:
    registry = registry_with(UnwrapRule(named(Asserting), "inner"))
    trials = over_parameters(lambda params: Asserting(AdamW(params[:1]), AdamW(params[1:])))
    with pytest.raises(AssertionError, match="more than one optimizer"):
        drift(trials, seed_reset)
    assert drift(trials, partial(reset_optimizer_states, registry=registry)) == []


class Boosted(AdamW):
    """Take a first step of double size, and ever smaller ones: a memory that is no state."""

    boost = 2.0

    def step(self) -> None:  # type: ignore[override]  # no closure
        for group in self.param_groups:
            group["lr"] = 0.01 * self.boost
        self.boost *= 0.9
        super().step()


def test_subclass_can_have_a_schema_of_its_own_or_be_refused() -> None:
    adam = (momentum("exp_avg"), variance("exp_avg_sq"), clock("step"))
    own = StateSchema(named(Boosted), *adam, history("boost", Initial.constant(2.0), at="attribute"))
    trials = over_parameters(Boosted)
    assert drift(trials, seed_reset) == [0, 1, 2, 3, 4]
    assert drift(trials, partial(reset_optimizer_states, registry=registry_with(own))) == []

    exact = StateSchema("torch.optim.adamw.AdamW", *adam, exact=True, override=True)
    bare = load_registry(plugins=[plugin("exact", exact)], disabled=["torch", "megatron"], entry_points=True)
    with pytest.raises(UnknownOptimizerError, match="Boosted"):
        reset_optimizer_states(Boosted(sample_parameters()), registry=bare)


class Wrapper:
    """Hold one optimizer, or a wrapper of one."""

    def __init__(self, optimizer: Any = None) -> None:
        self.optimizer = optimizer


def test_cycle_ends_and_is_listed() -> None:
    adam = stepped(AdamW(sample_parameters()))
    cycle = Wrapper()
    cycle.optimizer = [adam, cycle]
    report = reset_optimizer_states(cycle, registry=registry_with(UnwrapRule(named(Wrapper), "optimizer")))
    assert not any(map(torch.any, moments(adam)))
    assert report.left_alone == (("Wrapper[1].Wrapper", "met before, as Wrapper"),)
    cycle.optimizer = cycle
    with pytest.raises(RecursionError):
        seed_reset(cycle)


def test_leaf_on_two_ways_is_reset_once() -> None:
    adam = stepped(AdamW(sample_parameters()))
    report = reset_optimizer_states([adam, adam])
    assert report.changed == 3 * len(adam.state)
    assert report.left_alone == (("list[1].AdamW", "met before, as list[0].AdamW"),)
    with mock.patch.object(seed, "_reset_leaf") as reset_leaf:
        seed_reset(SimpleNamespace(chained_optimizers=[adam, adam]))
    assert reset_leaf.call_count == 2


class Counting(AdamW):
    """Count steps under a name, and steps with a parameter under a number, beside the parameters' state."""

    def step(self) -> None:  # type: ignore[override]  # no closure
        total = self.state.setdefault("total", 0)
        entry = self.state.setdefault(7, {"step": 0})
        for group in self.param_groups:
            group["lr"] = 0.01 / (1 + total + entry["step"])
        self.state["total"] += 1
        entry["step"] += 2
        super().step()


def test_state_under_names_and_numbers_is_reset_or_refused_by_name() -> None:
    adam = (momentum("exp_avg"), variance("exp_avg_sq"), clock("step"))
    counting = StateSchema(named(Counting), *adam, clock("total", at="named"))
    trials = over_parameters(Counting)
    assert drift(trials, partial(reset_optimizer_states, registry=registry_with(counting))) == []
    with pytest.raises(UndeclaredStateError, match="does not declare: 'total'"):
        drift(trials, reset_optimizer_states)
    with pytest.raises(AttributeError, match="'int' object has no attribute"):
        drift(trials, seed_reset)


@BOTH
def test_parameters_without_state_beside_others_are_fresh_already(reset: Reset) -> None:
    parameters = sample_parameters()
    adam = AdamW(parameters)
    trial_of(adam, parameters[1:]).step(0)
    reset(adam)
    one = trial_of(adam, parameters)
    twin = twin_of(one, over_parameters(AdamW))
    assert all(stay_alike(one, twin, i) for i in range(5))


class LettingGo:
    """Keep no parameters in the groups between steps, as DeepSpeed's ZeRO-3 does."""

    def __init__(self, params: Parameters) -> None:
        super().__init__(params)  # type: ignore[call-arg]  # of the optimizer that it is mixed into
        self.param_groups: list[dict[str, Any]]
        self.param_groups[0]["params"] = []
        self.params = params

    def step(self) -> None:
        self.param_groups[0]["params"] = self.params
        super().step()  # type: ignore[misc]
        self.param_groups[0]["params"] = []


class LettingGoAdamW(LettingGo, AdamW):
    pass


class LettingGoRprop(LettingGo, Rprop):
    """Its step sizes start at the group's rate, and no parameter tells the group."""


@BOTH
def test_groups_that_are_empty_between_steps_hide_no_state(reset: Reset) -> None:
    assert drift(over_parameters(LettingGoAdamW), reset) == []


def test_group_of_a_parameter_is_known_also_where_it_is_empty() -> None:
    assert drift(over_parameters(LettingGoRprop), reset_optimizer_states) == []
    with pytest.raises(UnsupportedOptimizerState, match="unknown optimizer"):
        drift(over_parameters(LettingGoRprop), seed_reset)


@pytest.fixture(scope="class")
def session() -> Iterator[None]:
    with megatron_session():
        yield


HYBRID = "megatron.core.optimizer.cpu_offloading.hybrid_optimizer.HybridDeviceOptimizer"


def ratios(reset: Reset) -> list[float]:
    """Return, for each of 5 steps, the size of what FusedAdam adds to its weights over a fresh twin's.

    It is 1.0 where the bits agree.
    """
    make = partial(trial, "distributed_hybrid_aware_fused")
    one = make()
    for i in range(3):
        one.step(i)
    one.reload()
    reset(one.optimizer)
    twin = twin_of(one, make)
    found = []
    for i in range(5):
        mine, fresh = (update(each, i) for each in (one, twin))
        found.append(1.0 if torch.equal(mine, fresh) else (mine.norm() / fresh.norm()).item())
    return found


def update(one: Trial, i: int) -> torch.Tensor:
    (on_gpu,) = (held for held in group_holders(one.optimizer) if isinstance(held, FusedAdamLike))
    params = [param for group in on_gpu.param_groups for param in group["params"]]
    before = [param.detach().clone() for param in params]
    one.step(i)
    return torch.cat([(param - was).flatten() for param, was in zip(params, before, strict=True)])


class NvmeStateStoreLike:
    """Stand in for the store of miles, which streams state to disk: the optimizer is left with none."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.buckets = [SimpleNamespace(adam=SimpleNamespace(state=dict(optimizer.state)))]
        optimizer.state.clear()


class StateOffloaderLike:
    """Stand in for OptimizerStateOffloader of radixark's Megatron: it brings back what it took."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._offloaded = False
        self.optimizer = optimizer

    def offload(self) -> None:
        self._offloaded = True
        self.host = [{key: value.clone() for key, value in state.items()} for state in self.states()]

    def reload(self) -> None:
        self._offloaded = False
        for state, saved in zip(self.states(), self.host, strict=True):
            for key in ("exp_avg", "exp_avg_sq"):
                state[key].copy_(saved[key])

    def states(self) -> list[dict[str, torch.Tensor]]:
        return list(self.optimizer.state.values())


@pytest.mark.skipif(not UPSTREAM_WARNINGS, reason="needs megatron-core")
@pytest.mark.filterwarnings(*UPSTREAM_WARNINGS)
@pytest.mark.usefixtures("session")
class TestThroughMegatron:
    def test_step_in_the_groups_of_a_hybrid_optimizer_does_not_come_back(self) -> None:
        assert ratios(reset_optimizer_states) == [1.0] * 5
        seeds = ratios(seed_reset)
        assert all(ratio != 1.0 for ratio in seeds)
        left = changed(HYBRID, stale_groups=None)
        assert ratios(partial(reset_optimizer_states, registry=left)) == seeds

    def test_step_in_the_groups_of_a_hybrid_optimizer_must_not_be_zero_either(self) -> None:
        moments = (momentum("exp_avg"), variance("exp_avg_sq"), clock("step", Initial.ABSENT))
        to_zero = StateSchema(named(FusedAdamLike), *moments, clock("step", at="group"), override=True)
        pinned = changed(HYBRID, to_zero, stale_groups="set")
        first, *later = ratios(partial(reset_optimizer_states, registry=pinned))
        assert first == 1.0
        assert all(1 < one < other for one, other in pairwise(later))

    def test_one_step_tensor_in_all_states_is_counted_once(self) -> None:
        fixture = build("distributed_bf16")
        fixture.step(0)
        fixture.round_trip()
        (leaf,) = group_holders(fixture.optimizer)
        assert len({id(entry["step"]) for entry in leaf.state.values()}) == 1
        for reset, count in ((seed_reset, 5), (reset_optimizer_states, 1)):
            reset(fixture.optimizer)
            fixture.step(0)
            assert [entry["step"].item() for entry in leaf.state.values()] == [count] * 5

        make = partial(trial, "distributed_bf16")
        assert drift(make, reset_optimizer_states, load=True) == []
        assert drift(make, seed_reset, load=True) == [0, 1, 2, 3, 4]

    @pytest.mark.parametrize("where", ["wrapper", "chain"])
    def test_state_on_disk_is_refused_where_the_seed_passes_over_it(self, where: str) -> None:
        fixture = build("distributed_bf16")
        fixture.step(0)
        chain = fixture.optimizer
        (wrapper,) = chain.chained_optimizers
        store = NvmeStateStoreLike(wrapper.optimizer)
        (chain if where == "chain" else wrapper)._nvme_state_store = store
        streamed = [entry["exp_avg"] for entry in store.buckets[0].adam.state.values()]
        seed_reset(chain)
        assert all(map(torch.any, streamed))
        reason = "streamed to disk by _nvme_state_store.*Nothing was changed"
        with pytest.raises(UnreachableStateError, match=reason) as raised:
            reset_optimizer_states(chain)
        assert raised.value.path == "ChainedOptimizer" + "[0].DistributedOptimizer" * (where == "wrapper")

    def test_offloaded_state_is_refused_where_the_seed_has_it_come_back(self) -> None:
        def offloading(after: Callable[[Any, StateOffloaderLike], None]) -> list[int]:
            def reset(chain: Any) -> None:
                (wrapper,) = chain.chained_optimizers
                wrapper._state_offloader = StateOffloaderLike(wrapper.optimizer)
                wrapper._state_offloader.offload()
                after(chain, wrapper._state_offloader)

            return drift(partial(trial, "bf16"), reset)

        def seeds(chain: Any, offloader: StateOffloaderLike) -> None:
            seed_reset(chain)
            offloader.reload()

        def ours(chain: Any, offloader: StateOffloaderLike) -> None:
            before = moments(offloader.optimizer)
            reason = r"offloaded.*reload\(\) first. Nothing was changed"
            with pytest.raises(UnreachableStateError, match=reason):
                reset_optimizer_states(chain)
            assert all(map(torch.equal, before, moments(offloader.optimizer)))
            offloader.reload()
            reset_optimizer_states(chain)

        assert offloading(seeds) == [0, 1, 2, 3, 4]
        assert offloading(ours) == []

    @pytest.mark.filterwarnings("ignore:`torch.jit.interface:DeprecationWarning")  # on import
    def test_step_in_the_groups_of_a_zero_redundancy_optimizer_does_not_come_back(self) -> None:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        make = over_parameters(partial(ZeroRedundancyOptimizer, optimizer_class=FusedAdamLike, lr=0.1))
        assert drift(make, reset_optimizer_states) == []
        assert drift(make, lambda zero: seed_reset(zero.optim)) == [0, 1, 2, 3, 4]
        with pytest.raises(UnsupportedOptimizerState, match="unknown optimizer ZeroRedundancyOptimizer"):
            drift(make, seed_reset)

    def test_stub_is_no_leaf(self) -> None:
        chain = build("chain_fp32_stub").optimizer
        stub = chain.chained_optimizers[1]
        assert getattr(stub, "optimizer", None) is None
        with pytest.raises(UnsupportedOptimizerState, match="unknown optimizer FP32Optimizer"):
            seed._reset_leaf(stub)
        assert reset_optimizer_states(chain).leaves == 1

    @pytest.mark.parametrize("name", ["chain_fp32_stub", "chain_empty"])
    def test_chain_is_not_asked_for_its_one_optimizer(self, name: str) -> None:
        chain = build(name).optimizer
        with pytest.raises(AssertionError, match="more than one optimizer"):
            hasattr(chain, "optimizer")
        assert reset_optimizer_states(chain).leaves == (name == "chain_fp32_stub")
