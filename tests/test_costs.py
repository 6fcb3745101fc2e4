"""What a reset, a walk and an import cost, in counts: of kernels, tensors, lookups and modules."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from itertools import chain
from threading import Barrier, get_ident
from typing import Any

import pytest
import torch
from large import HybridStandIn, InventedPlugin, leaves_of, state_tensors, stepped_adamw
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from miles_reset import Registry, load_registry, plan_reset, reset, reset_optimizer_states
from miles_reset.walk import walk

SLOTS = 3
"""Of an AdamW: exp_avg, exp_avg_sq and step."""

BUILDERS = [pytest.param(stepped_adamw, id="parameters"), pytest.param(HybridStandIn, id="leaves")]


class Operations(TorchDispatchMode):
    """Notes each operation on some tensors: it launches one kernel at least, where they are on a GPU."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.watched = set(map(id, tensors))
        self.seen: list[tuple[str, list[torch.Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if touched := [leaf for leaf in tree_leaves((args, kwargs)) if id(leaf) in self.watched]:
            self.seen.append((str(func.overloadpacket), touched))
        return func(*args, **(kwargs or {}))


def operations_of_a_reset(optimizers: list[Any]) -> list[tuple[str, list[torch.Tensor]]]:
    parameters = (p for optimizer in optimizers for g in optimizer.param_groups for p in g["params"])
    with Operations([*parameters, *chain.from_iterable(map(state_tensors, optimizers))]) as operations:
        reset_optimizer_states(optimizers)
    return operations.seen


@pytest.mark.parametrize("build", BUILDERS)
def test_a_reset_zeroes_all_tensors_of_a_slot_in_one_operation(build: Any) -> None:
    optimizer = build(500)
    seen = operations_of_a_reset([optimizer])
    assert {name for name, _ in seen} == {"aten._foreach_zero_"}
    assert len(seen) <= SLOTS
    assert sum(len(tensors) for _, tensors in seen) == SLOTS * 500
    assert not any(tensor.any() for tensor in state_tensors(optimizer))


def test_two_threads_fill_many_tensors_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits until the other has begun, so a lone thread would wait in vain."""
    optimizer, both = stepped_adamw(2_000), Barrier(2, timeout=60)
    fill, begun = reset._fill, set()

    def fill_in_company(tensors: list[torch.Tensor], value: float) -> None:
        if get_ident() not in begun:
            begun.add(get_ident())
            both.wait()
        fill(tensors, value)

    monkeypatch.setattr(reset, "_fill", fill_in_company)
    reset_optimizer_states(optimizer)
    assert len(begun) == 2
    assert not any(tensor.any() for tensor in state_tensors(optimizer))


def test_off_the_cpu_each_operation_is_about_one_dtype_and_device() -> None:
    """Kernels over many tensors want them alike. The meta device stands in for one that has kernels."""
    on_the_cpu = stepped_adamw(100)
    float32, bfloat16 = (
        stepped_adamw(100, device="meta", dtype=dtype, foreach=True)
        for dtype in (torch.float32, torch.bfloat16)
    )
    seen = operations_of_a_reset([float32, on_the_cpu, bfloat16])
    assert {name for name, _ in seen} == {"aten._foreach_zero_"}
    assert len(seen) <= SLOTS * 3
    for _, tensors in seen:
        assert len({(tensor.device, tensor.dtype) for tensor in tensors}) == 1


def test_a_plan_touches_no_tensor() -> None:
    optimizer = stepped_adamw(10)
    with Operations(state_tensors(optimizer)) as operations:
        plan_reset(optimizer)
    assert not operations.seen


def largest_allocation_of_a_reset(optimizer: Any) -> int:
    """Return the bytes of the largest tensor that a reset makes."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        reset_optimizer_states(optimizer)
    return max(event.self_cpu_memory_usage for event in found.events())


@pytest.mark.parametrize("build", BUILDERS)
def test_a_reset_of_zeros_allocates_no_tensor_of_a_parameters_size(build: Any) -> None:
    elements = 100_000
    optimizer = build(10, elements)
    assert largest_allocation_of_a_reset(optimizer) < elements
    shared = torch.tensor(1.0)
    for entry in chain.from_iterable(leaf.state.values() for leaf in leaves_of(optimizer)):
        entry["step"] = shared  # to tell them apart takes new tensors, as small as this one
    assert largest_allocation_of_a_reset(optimizer) < elements


def test_a_class_is_looked_up_once_in_a_walk_and_searched_for_once_in_a_registry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: dict[str, Counter[type]] = {"find": Counter(), "_search": Counter()}
    for name, counter in calls.items():
        original = getattr(Registry, name)

        def counting(self: Registry, cls: type, original: Any = original, counter: Any = counter) -> Any:
            counter[cls] += 1
            return original(self, cls)

        monkeypatch.setattr(Registry, name, counting)
    hybrid, registry = HybridStandIn(100), load_registry()
    for walks in (1, 2):
        assert len(walk(hybrid, registry).leaves) == 100
        assert calls["find"] == {HybridStandIn: walks, torch.optim.AdamW: walks}
        assert calls["_search"] == {HybridStandIn: 1, torch.optim.AdamW: 1}


def test_more_plugins_do_not_lead_to_more_lookups() -> None:
    looked_at: list[int] = []
    for plugins in ([], [InventedPlugin(number, schemas=15) for number in range(30)]):
        registry = load_registry(plugins=plugins)
        names: list[str] = []

        class Claims(dict[str, Any]):
            def get(self, name: str, default: Any = None, names: list[str] = names) -> Any:
                names.append(name)
                return super().get(name, default)

        counted = Registry(Claims(registry.claims), registry.providers)
        assert len(walk(HybridStandIn(10), counted).leaves) == 10
        looked_at.append(len(names))
    assert looked_at[0] == looked_at[1] == 2


IMPORTED = """
import json, sys
import torch
before = set(sys.modules)
import miles_reset
core = set(sys.modules) - before
miles_reset.default_registry()
print(json.dumps([sorted(core), sorted(set(sys.modules) - before - core)]))
"""


def test_the_import_loads_the_core_alone_and_the_registry_the_plugins_alone() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=True)
    core, plugins = (
        {name.partition(".")[0] for name in names} - sys.stdlib_module_names
        for names in json.loads(done.stdout)
    )
    assert core == {"miles_reset", "pluggy"}
    assert plugins
    assert all(module.startswith("miles_reset_") for module in plugins), plugins
