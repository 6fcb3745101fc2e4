"""Hold stand-ins for apex's optimizers to the law of a reset: apex itself needs a GPU."""

import copy
from typing import Any

import pytest
import torch
from torch.optim import Optimizer
from variants import step_some

from miles_reset import UndeclaredStateError, plan_reset, reset_optimizer_states
from miles_reset.testing import Parameters, assert_reset_is_fresh, sample_parameters, trial_of

FROM_SOURCE = {
    name: f"from the source of apex at {commit}, not run here: needs a GPU; a stand-in has its state"
    for name, commit in {
        "apex.contrib.optimizers.distributed_fused_adam.DistributedFusedAdam": "d571f3ee and 00e7ef2e",
        "apex.contrib.optimizers.distributed_fused_adam.DistributedFusedAdam.StateBucket": "d571f3ee",
        "apex.contrib.optimizers.distributed_fused_lamb.DistributedFusedLAMB": "02fd7341",
        "apex.optimizers.fused_lamb.FusedLAMB": "16fadfe7",
        "apex.optimizers.fused_adagrad.FusedAdagrad": "05cec60c",
    }.items()
}
"""What is declared without being held to the law through the library itself, and why."""


def adam(p: torch.Tensor, grad: torch.Tensor, mean: torch.Tensor, square: torch.Tensor, step: int) -> None:
    """Make a step of Adam in place."""
    mean.lerp_(grad, 0.1)
    square.lerp_(grad.square(), 0.01)
    p.sub_(0.1 * (mean / (1 - 0.9**step)) / ((square / (1 - 0.99**step)).sqrt() + 1e-8))


class DistributedAdamLike(Optimizer):
    """Stand in for DistributedFusedAdam: a bucket for each parameter, and a count under a name."""

    __module__ = "apex.contrib.optimizers.distributed_fused_adam"
    __qualname__ = "DistributedFusedAdam"

    class StateBucket:
        """Stand in for its buckets."""

        __module__ = "apex.contrib.optimizers.distributed_fused_adam"
        __qualname__ = "DistributedFusedAdam.StateBucket"

        def __init__(self, parameter: torch.Tensor, remainders: bool) -> None:
            size = parameter.numel()
            self.bucket_size = self.shard_size = self.filled_size = size
            self.contiguous_buffer_offset, self.fragments, self.able_to_fill = 0, [], True
            self.dtype = self.grad_sync_dtype = self.param_sync_dtype = torch.float32
            self.params_shard = None if remainders else parameter.detach().flatten().clone()
            self.param_remainders_shard = torch.ones(size, dtype=torch.int16) if remainders else None
            self.exp_avg_shard, self.exp_avg_sq_shard = torch.zeros(size), torch.zeros(size)

    def __init__(self, parameters: Parameters, remainders: bool = False) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.state["buckets"], self.state["step"] = [], 0
        self._remainders, self._state_scales = remainders, {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        buckets = self.state["buckets"]
        self.state["step"] += 1
        for i, p in enumerate(self.param_groups[0]["params"]):
            if p not in self.state:
                self.state[p]["fragments"] = [(i, 0, p.numel())]
                buckets.append(self.StateBucket(p, self._remainders))
            weight = p.flatten() if self._remainders else buckets[i].params_shard
            adam(
                weight,
                p.grad.flatten(),
                buckets[i].exp_avg_shard,
                buckets[i].exp_avg_sq_shard,
                self.state["step"],
            )
            p.copy_(weight.view_as(p))


class DistributedLambLike(Optimizer):
    """Stand in for DistributedFusedLAMB: flat buffers, which the first step makes."""

    __module__ = "apex.contrib.optimizers.distributed_fused_lamb"
    __qualname__ = "DistributedFusedLAMB"

    def __init__(self, parameters: Parameters) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self._fp32_m = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        parameters = self.param_groups[0]["params"]
        if self._fp32_m is None:
            self._fp32_p = torch.cat([p.flatten() for p in parameters])
            self._fp32_m, self._fp32_v, self._fp32_u = (torch.zeros_like(self._fp32_p) for _ in range(3))
            self._step = torch.zeros(1, dtype=torch.int)
        self._step += 1
        grads = torch.cat([p.grad.flatten() for p in parameters])
        self._fp32_u.copy_(grads)
        adam(self._fp32_p, grads, self._fp32_m, self._fp32_v, int(self._step))
        for p, new in zip(parameters, self._fp32_p.split([p.numel() for p in parameters]), strict=True):
            p.copy_(new.view_as(p))


class FlatAdamLike(DistributedLambLike):
    """Stand in for the DistributedFusedAdam of old, which has its moments where LAMB has them."""

    __module__ = "apex.contrib.optimizers.distributed_fused_adam"
    __qualname__ = "DistributedFusedAdam"


class LambLike(Optimizer):
    """Stand in for FusedLAMB: moments by parameter, a count by group."""

    __module__ = "apex.optimizers.fused_lamb"
    __qualname__ = "FusedLAMB"

    def __init__(self, parameters: Parameters) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if not self.state[p]:
                    self.state[p] = {key: torch.zeros_like(p) for key in ("exp_avg", "exp_avg_sq")}
                adam(p, p.grad, *self.state[p].values(), group["step"])


class AdagradLike(Optimizer):
    """Stand in for FusedAdagrad: sums, and no count."""

    __module__ = "apex.optimizers.fused_adagrad"
    __qualname__ = "FusedAdagrad"

    def __init__(self, parameters: Parameters) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for p in self.param_groups[0]["params"]:
            total = self.state[p].setdefault("sum", torch.zeros_like(p)).add_(p.grad.square())
            p.sub_(0.1 * p.grad / (total.sqrt() + 1e-10))


LAW = {"warmups": (3,), "further": 4}


@pytest.mark.parametrize("cls", [LambLike, AdagradLike])
def test_a_reset_of_a_stand_in_is_fresh(cls: Any) -> None:
    assert_reset_is_fresh(cls, **LAW)


def masters(optimizer: Any) -> list[torch.Tensor]:
    if isinstance(optimizer, DistributedLambLike):
        return [optimizer._fp32_p] if optimizer._fp32_m is not None else []
    return [b.params_shard for b in optimizer.state["buckets"] if b.params_shard is not None]


@pytest.mark.parametrize("cls", [DistributedAdamLike, DistributedLambLike, FlatAdamLike])
def test_a_reset_of_sharded_state_is_fresh(cls: Any) -> None:
    """Compare with a twin whose master weights, made at its first step, are those of the reset one."""
    parameters = sample_parameters()
    subject = step_some(trial_of(cls(parameters), parameters))
    before = [copy.deepcopy(master) for master in masters(subject.optimizer)]
    assert before
    reset_optimizer_states(subject.optimizer)
    assert all(map(torch.equal, before, masters(subject.optimizer)))
    copies = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    twin = trial_of(cls(copies), copies)
    for i in range(3, 7):
        subject.step(i)
        twin.step(i)
        assert all(map(torch.equal, parameters, copies))


def test_what_16_bit_weights_lack_of_float32_is_kept() -> None:
    parameters = sample_parameters()
    optimizer = DistributedAdamLike(parameters, remainders=True)
    step_some(trial_of(optimizer, parameters))
    reset_optimizer_states(optimizer)
    buckets = optimizer.state["buckets"]
    assert all(bucket.param_remainders_shard.all() for bucket in buckets)
    assert not any(bucket.exp_avg_shard.any() or bucket.exp_avg_sq_shard.any() for bucket in buckets)
    assert optimizer.state["step"] == 0
    assert all(optimizer.state[p]["fragments"] for p in parameters)


def test_a_bucket_of_another_shape_is_refused() -> None:
    parameters = sample_parameters()
    optimizer = DistributedAdamLike(parameters)
    step_some(trial_of(optimizer, parameters))
    optimizer.state["buckets"][0].max_exp_avg_sq_shard = torch.ones(3)
    with pytest.raises(UndeclaredStateError, match="max_exp_avg_sq_shard"):
        plan_reset(optimizer)
