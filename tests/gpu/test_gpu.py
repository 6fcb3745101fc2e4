"""What only a GPU can show: captured graphs, state on two devices, launches and bandwidth."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from large import state_tensors, stepped_adamw
from torch.autograd import DeviceType
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.profiler import ProfilerActivity, profile

from miles_reset import reset_optimizer_states
from miles_reset.testing import Parameters, Trial, assert_reset_is_fresh, trial_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # what the libraries of such a machine warn of is not ours
]


def parameters_on_the_gpu(dtype: torch.dtype = torch.float32) -> Parameters:
    generator = torch.Generator().manual_seed(7)
    shapes = [(64, 32), (32, 32), (32,), (1,)]
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to("cuda", dtype)) for shape in shapes]


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
def test_half_offloaded_hybrid_device_optimizer_is_fresh_after_a_reset(overlap: bool) -> None:
    """The real wrapper. It tells its children apart by class when it loads: Adam is no AdamW."""
    offloading = pytest.importorskip("megatron.core.optimizer.cpu_offloading")

    def build(_: Parameters) -> Trial:
        parameters = parameters_on_the_gpu(torch.bfloat16)
        optimizer = offloading.HybridDeviceOptimizer(
            parameters,
            offload_fraction=0.5,
            cpu_optimizer_cls=AdamW,
            gpu_optimizer_cls=Adam,
            param_update_in_fp32=True,
            overlap_cpu_optimizer_d2h_h2d=overlap,
            lr=1e-2,
        )

        def weights() -> Parameters:
            """Find the model's weights and the children's: master weights, and copies on the CPU."""
            groups = [group for child in optimizer.sub_optimizers for group in child.param_groups]
            return parameters + [parameter for group in groups for parameter in group["params"]]

        assert {weight.is_cuda for weight in weights()} == {False, True}
        return Trial(optimizer, trial_of(optimizer, parameters).step, weights)

    assert_reset_is_fresh(build)


class Captured:
    """An optimizer whose step is a captured graph, which reads and writes at fixed addresses."""

    def __init__(self, build: Callable[[Parameters], Optimizer]) -> None:
        self.parameters = parameters_on_the_gpu()
        self.optimizer = build(self.parameters)
        set_gradients(self.parameters, 0)
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # the state has to be there before the capture
            for _ in range(3):
                self.optimizer.step()
        torch.cuda.current_stream().wait_stream(aside)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.optimizer.step()

    def step(self, i: int) -> None:
        set_gradients(self.parameters, i)
        self.graph.replay()


def set_gradients(parameters: Parameters, i: int) -> None:
    """Write gradients that depend on i alone, in place once they are there."""
    generator = torch.Generator().manual_seed(1000 + i)
    for parameter in parameters:
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.device)
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad.copy_(gradient)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


def adamw(parameters: Parameters, **options: Any) -> Optimizer:
    return AdamW(parameters, capturable=True, **{"lr": 1e-2, **options})


def sgd(parameters: Parameters, **options: Any) -> Optimizer:
    return SGD(parameters, momentum=0.9, **{"lr": 1e-2, **options})


CAPTURED = {
    "adamw": adamw,
    "adamw amsgrad": lambda parameters: adamw(parameters, amsgrad=True),
    "adamw fused": lambda parameters: adamw(parameters, fused=True),
    "adamw one by one": lambda parameters: adamw(parameters, foreach=False),
    "adamw tensor lr": lambda parameters: adamw(parameters, lr=torch.tensor(1e-2, device="cuda")),
    "sgd": sgd,
    "sgd nesterov": lambda parameters: sgd(parameters, nesterov=True),
    "sgd fused": lambda parameters: sgd(parameters, fused=True),
    "sgd fused tensor lr": lambda parameters: sgd(
        parameters, fused=True, lr=torch.tensor(1e-2, device="cuda")
    ),
}


@pytest.mark.parametrize("reset", [True, False], ids=["reset", "no reset"])
@pytest.mark.parametrize("name", CAPTURED)
def test_replayed_graph_steps_like_a_fresh_optimizer_after_a_reset_alone(name: str, reset: bool) -> None:
    captured = Captured(CAPTURED[name])
    for i in range(4):
        captured.step(i)
    if reset:
        reset_optimizer_states(captured.optimizer)
    fresh = [torch.nn.Parameter(weight.detach().clone()) for weight in captured.parameters]
    twin = CAPTURED[name](fresh)
    equal = True
    for i in range(4, 10):
        captured.step(i)
        set_gradients(fresh, i)
        twin.step()
        equal &= all(map(same_bits, captured.parameters, fresh))
    assert equal == reset


PER_LAUNCH = 110
"""So many small tensors does torch zero in one launch; 770 where it is built for CUDA 13."""


def test_a_reset_of_10_000_tensors_launches_what_one_operation_for_each_slot_takes() -> None:
    optimizer = stepped_adamw(3_334, device="cuda", capturable=True)
    tensors = list(state_tensors(optimizer))
    assert len(tensors) == 10_002
    assert all(tensor.is_cuda for tensor in tensors)
    reset_optimizer_states(optimizer)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        reset_optimizer_states(optimizer)
        torch.cuda.synchronize()
    zeroing = {"aten::_foreach_zero_", "aten::zero_", "aten::fill_"}
    operations = [event.name for event in found.events() if event.name in zeroing]
    launched = [event.name for event in found.events() if event.device_type == DeviceType.CUDA]
    assert set(operations) == {"aten::_foreach_zero_"}
    assert len(operations) <= 3
    assert 0 < len(launched) <= 3 * math.ceil(3_334 / PER_LAUNCH)


def milliseconds(function: Callable[[], object]) -> float:
    """Time a function on the device, from an idle device on."""
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    function()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def test_a_reset_of_large_tensors_takes_the_time_of_a_memset() -> None:
    free, _ = torch.cuda.mem_get_info()
    parameters = 8
    elements = min(2**28, free // (parameters * 40))  # weights, gradients, state, the memset's: 32 bytes each
    optimizer = stepped_adamw(parameters, elements, device="cuda", fused=True)
    flat = torch.empty(parameters * 2 * elements, device="cuda")

    def resets_and_memsets() -> Iterator[tuple[float, float]]:
        for _ in range(15):
            yield milliseconds(lambda: reset_optimizer_states(optimizer)), milliseconds(flat.zero_)

    _warm_up, *rounds = resets_and_memsets()
    reset, memset = map(statistics.median, zip(*rounds, strict=True))
    assert reset <= 1.15 * memset
