"""Hold torchrec's wrappers to the law of a reset."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fakes import plugin
from fused_adam import FusedAdamLike
from torch.optim import AdamW, Optimizer
from variants import as_matrices, optimizers_in, step_some

from miles_reset import (
    UnknownOptimizerError,
    UnreachableStateError,
    UnwrapRule,
    load_registry,
    plan_reset,
    reset_optimizer_states,
)
from miles_reset.registry import class_name
from miles_reset.testing import Parameters, Trial, assert_reset_is_fresh, sample_parameters, trial_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    optim = pytest.importorskip("torchrec.optim")

LAW = {"warmups": (3, 6), "further": 5}
Wrap = Callable[[Any], Any]

FROM_SOURCE = {
    "torchrec.optim.fused.FusedOptimizer": (
        "from the source of torchrec 1.9, not run here: it needs embeddings of fbgemm's; it is refused"
    ),
    "torchrec.optim.semi_sync.SemisyncOptimizer": (
        "from the source of torchrec 1.9, not run here: needs replicas of a sharded model; it is refused"
    ),
}
"""What is declared without being held to the law through the library itself, and why."""

LEFT_OUT = {
    "DummyKeyedOptimizer": "of torchrec's own tests",
    "KeyedOptimizer": "a base class; one that is handed its state has no slots to name, and is refused",
    "EmptyFusedOptimizer": "holds nothing; see test_what_holds_nothing_is_passed_over",
    "FusedOptimizer": FROM_SOURCE["torchrec.optim.fused.FusedOptimizer"],
    "SemisyncOptimizer": FROM_SOURCE["torchrec.optim.semi_sync.SemisyncOptimizer"],
    **dict.fromkeys(
        ["SGD", "LarsSGD", "LAMB", "PartialRowWiseLAMB", "Adam", "PartialRowWiseAdam", "Adagrad"],
        "stands for a fused kernel: it has no state, and its step() raises",
    ),
}


def keyed(parameters: Parameters, leaf: Callable[[Any], Optimizer], first: int = 0) -> Any:
    named = {f"p{first + i}": parameter for i, parameter in enumerate(parameters)}
    return optim.KeyedOptimizerWrapper(named, leaf)


def wrapped(wrap: Wrap, leaf: Callable[[Any], Optimizer]) -> Callable[[Parameters], Trial]:
    return lambda parameters: trial_of(wrap(keyed(parameters, leaf)), parameters)


def adamw(parameters: Any) -> Optimizer:
    return AdamW(parameters, lr=0.1)


STAGES = [
    optim.WarmupStage(optim.WarmupPolicy.LINEAR, max_iters=4, value=0.1),
    optim.WarmupStage(optim.WarmupPolicy.CONSTANT, max_iters=10, value=0.5),
]
WRAPPERS: dict[str, Wrap] = {
    "KeyedOptimizerWrapper": lambda inner: inner,
    "OptimizerWrapper": optim.OptimizerWrapper,
    "GradientClippingOptimizer": lambda inner: optim.GradientClippingOptimizer(
        inner, optim.GradientClipping.NORM, 0.5
    ),
    "WarmupOptimizer": lambda inner: optim.WarmupOptimizer(inner, list(STAGES)),
    "both": lambda inner: optim.WarmupOptimizer(
        optim.GradientClippingOptimizer(inner, optim.GradientClipping.VALUE, 0.5), list(STAGES)
    ),
}


@pytest.mark.parametrize("leaf", [adamw, FusedAdamLike], ids=["AdamW", "FusedAdam"])
@pytest.mark.parametrize("wrap", WRAPPERS)
def test_a_reset_is_fresh(wrap: str, leaf: Callable[[Any], Optimizer]) -> None:
    assert_reset_is_fresh(wrapped(WRAPPERS[wrap], leaf), **LAW)


def test_a_reset_is_fresh_below_a_combination() -> None:
    def build(parameters: Parameters) -> Trial:
        parts = [
            ("a", keyed(parameters[:2], adamw)),
            WRAPPERS["WarmupOptimizer"](keyed(parameters[2:], adamw, 2)),
        ]
        return trial_of(optim.CombinedOptimizer(parts), parameters)

    assert_reset_is_fresh(build, **LAW)
    trial = step_some(build(sample_parameters()))
    paths = {line.path for line in plan_reset(trial.optimizer).lines}
    assert "CombinedOptimizer[a].KeyedOptimizerWrapper.AdamW" in paths


@pytest.mark.parametrize("options", [{}, {"initial_accumulator_value": 0.1, "lr_decay": 0.2}], ids=str)
def test_a_reset_of_rowwise_adagrad_is_fresh(options: dict[str, float]) -> None:
    assert_reset_is_fresh(
        lambda parameters: optim.RowWiseAdagrad(parameters, **options),
        parameters=lambda: as_matrices(sample_parameters()),
        **LAW,
    )


def test_a_warmup_that_the_rule_does_not_name_is_seen() -> None:
    target = class_name(optim.WarmupOptimizer)
    registry = load_registry(plugins=[plugin("fault", UnwrapRule(target, "_optimizer", override=True))])
    trial = step_some(wrapped(WRAPPERS["WarmupOptimizer"], adamw)(sample_parameters()))
    with pytest.raises(Exception, match="'warmup'"):
        plan_reset(trial.optimizer, registry=registry)


def test_a_warmup_of_another_entry_is_refused() -> None:
    optimizer = optim.WarmupOptimizer(keyed(sample_parameters(), adamw), list(STAGES), lr_param="eps")
    with pytest.raises(UnreachableStateError, match="warms 'eps' up"):
        reset_optimizer_states(optimizer)


def test_what_holds_nothing_is_passed_over() -> None:
    from torchrec.optim.fused import EmptyFusedOptimizer

    report = reset_optimizer_states(EmptyFusedOptimizer())
    assert report.left_alone == (("EmptyFusedOptimizer", "holds no optimizers"),)


def test_kernels_semi_synchronous_training_and_bare_bases_are_refused() -> None:
    from torchrec.optim.fused import FusedOptimizer

    class Fused(FusedOptimizer):
        def __init__(self) -> None:
            self.state, self.param_groups, self.params = {}, [], {}

        def step(self, closure: Any = None) -> None: ...

        def zero_grad(self, set_to_none: bool = False) -> None: ...

    with pytest.raises(UnreachableStateError, match="buffers of the embeddings' kernels"):
        reset_optimizer_states(Fused())
    semi = optim.SemisyncOptimizer.__new__(optim.SemisyncOptimizer)
    with pytest.raises(UnreachableStateError, match="averages models at intervals"):
        reset_optimizer_states(semi)
    parameter = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(UnknownOptimizerError):
        reset_optimizer_states(optim.KeyedOptimizer({"p": parameter}, {parameter: {}}, []))


def test_no_optimizer_is_left_out() -> None:
    known = {*WRAPPERS, "CombinedOptimizer", "RowWiseAdagrad", *LEFT_OUT} - {"both"}
    assert {name.rpartition(".")[2] for name in optimizers_in(optim)} == known
