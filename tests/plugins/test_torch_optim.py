"""Hold every optimizer of torch.optim to the law of a reset, in every variant that changes its state."""

import inspect
from itertools import cycle
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.utils import _pytree as pytree
from variants import (
    Case,
    Options,
    Refusal,
    Setting,
    Table,
    as_matrices,
    build,
    cast,
    draw,
    no_gradient,
    not_finite,
    step_some,
    step_with,
)

from miles_reset import default_registry, reset_optimizer_states
from miles_reset.registry import class_name
from miles_reset.testing import WARMUPS, Parameters, Trial, assert_reset_is_fresh, sample_parameters, trial_of

OPTIMIZERS: dict[str, type[Optimizer]] = {
    name: cls
    for name, cls in inspect.getmembers(torch.optim, inspect.isclass)
    if issubclass(cls, Optimizer) and cls is not Optimizer
}
"""Every class of the installed torch."""

VARIANTS: dict[str, list[Options]] = {
    "ASGD": [{}, {"t0": 1, "lambd": 0.01, "weight_decay": 0.1}],
    "Adadelta": [{}],
    "Adafactor": [{}],
    "Adagrad": [{}, {"initial_accumulator_value": 0.25, "lr_decay": 0.1}],
    "Adam": [{}, {"amsgrad": True}],
    "AdamW": [{}, {"amsgrad": True}],
    "Adamax": [{}],
    "LBFGS": [
        {"max_iter": 2},
        {"max_iter": 2, "history_size": 2},
        {"max_iter": 2, "line_search_fn": "strong_wolfe"},
    ],
    "Muon": [{}, {"nesterov": False}],
    "NAdam": [{}, {"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "RAdam": [{}, {"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "RMSprop": [{}, {"momentum": 0.9}, {"centered": True}, {"centered": True, "momentum": 0.9}],
    "Rprop": [{}],
    "SGD": [
        {"momentum": 0.9},
        {"momentum": 0.9, "dampening": 0.3},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ],
    "SparseAdam": [{}],
}
"""The options of each class that change its state. Plain SGD, which has none, is a test of its own."""

NEWER_THAN_2_6 = {"Muon"}


def adapt(name: str, parameters: Parameters) -> Parameters:
    return as_matrices(parameters) if name in ("Muon", "SparseAdam") else parameters


def several_groups(cls: type[Optimizer], parameters: Parameters, options: Options) -> Trial:
    """Give each parameter a group with a learning rate of its own, and the options of the next variant."""
    groups = [
        {**variant, "params": [parameter], "lr": 0.01 * (number + 1)}
        for number, (parameter, variant) in enumerate(zip(parameters, cycle(VARIANTS[cls.__name__])))
    ]
    return step_with(cls(groups, **options), parameters)


def group_added_later(cls: type[Optimizer], parameters: Parameters, options: Options) -> Trial:
    """Add the last parameter before the third step, or before the first one of a twin that starts later."""
    optimizer = cls(parameters[:-1], **options)
    inner = step_with(optimizer, parameters)

    def step(i: int) -> None:
        if i >= 2 and len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": parameters[-1:]})
        inner.step(i)

    return Trial(optimizer, step, inner.weights)


def differentiable(cls: type[Optimizer], leaves: Parameters, options: Options) -> Trial:
    """Step weights that are not leaves, with gradients that one can differentiate through."""
    weights = [leaf.clone() for leaf in leaves]
    optimizer = cls(weights, **options)
    scale = torch.ones((), requires_grad=True)

    def step(i: int) -> None:
        for number, weight in enumerate(weights):
            weight.retain_grad()  # otherwise torch warns when it reads the gradient of what is not a leaf
            weight.grad = scale * draw(weight, 100 * i + number)
        optimizer.step()

    def save_and_load() -> None:
        detached = pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), optimizer.state_dict())
        optimizer.load_state_dict(detached)

    return Trial(optimizer, step, lambda: weights, save_and_load)


def complex_parameters() -> Parameters:
    return [torch.nn.Parameter(torch.complex(p, p.cos()).detach()) for p in sample_parameters()]


SETTINGS = {
    "plain": Setting(law={"warmups": WARMUPS, "further": 12}),
    "maximize": Setting(lambda: {"maximize": True}),
    "foreach": Setting(lambda: {"foreach": True}),
    "fused": Setting(lambda: {"fused": True}),
    "capturable": Setting(lambda: {"capturable": True}),
    "differentiable": Setting(lambda: {"differentiable": True}, build=differentiable),
    "tensor lr": Setting(lambda: {"lr": torch.tensor(0.02)}),
    "lr changed": Setting(law={"hyperparameters": {"lr": 0.05}}),
    "several groups": Setting(build=several_groups, once=True),
    "group added later": Setting(build=group_added_later),
    "no gradient": Setting(build=no_gradient),
    "not finite": Setting(build=not_finite),
    "complex": Setting(parameters=complex_parameters),
    "complex, foreach": Setting(lambda: {"foreach": True}, complex_parameters),
    "bfloat16": Setting(parameters=cast(torch.bfloat16)),
    "bfloat16, foreach": Setting(lambda: {"foreach": True}, cast(torch.bfloat16)),
    "bfloat16, fused": Setting(lambda: {"fused": True}, cast(torch.bfloat16)),
    "bfloat16 and float32": Setting(parameters=cast(torch.bfloat16, torch.float32)),
    "float64 by default": Setting(parameters=cast(torch.float64), default_dtype=torch.float64),
    "float32, float64 by default": Setting(parameters=cast(torch.float32), default_dtype=torch.float64),
}

REFUSED: dict[tuple[str, str], Refusal] = {
    **{(name, "capturable"): (AssertionError, "capturable") for name in OPTIMIZERS},
    ("Adafactor", "complex"): (RuntimeError, "does not support complex"),
    ("Adafactor", "complex, foreach"): (RuntimeError, "does not support complex"),
    ("LBFGS", "bfloat16 and float32"): (RuntimeError, "same dtype"),
    ("LBFGS", "group added later"): (AssertionError, "^$|one param_group"),
    ("LBFGS", "several groups"): (ValueError, "parameter groups"),
    ("Muon", "complex"): (RuntimeError, "does not support complex"),
    ("SparseAdam", "complex"): (ValueError, "does not support complex"),
}
if "defaults" not in inspect.unwrap(Adagrad._init_group).__code__.co_names:  # as in torch 2.6
    REFUSED["Adagrad", "group added later"] = (KeyError, "sum")  # state is made in the constructor alone


def fused_sgd_is_wrong_in_bfloat16() -> bool:
    """Say whether torch's kernel reads memory that nobody wrote, as those of 2.6 and 2.13 do."""
    buffers = []
    for fused in (True, False):
        parameter = torch.nn.Parameter(torch.zeros(64, dtype=torch.bfloat16))
        optimizer = SGD([parameter], momentum=0.9, fused=fused)
        for _ in range(2):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        buffers.append(optimizer.state[parameter]["momentum_buffer"])
    return not torch.allclose(*buffers, rtol=0.1)


WRONG = [("SGD", "bfloat16, fused")] if fused_sgd_is_wrong_in_bfloat16() else []
TABLE = Table(OPTIMIZERS, VARIANTS, SETTINGS, REFUSED, WRONG, adapt)


@pytest.mark.parametrize("case", TABLE.cases())
def test_reset_is_fresh(case: Case, hold: Any) -> None:
    hold(case)


@pytest.mark.parametrize(("case", "error", "match"), TABLE.refusals())
def test_torch_cannot_step_on_a_cpu(case: Case, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        case.step_load_and_step()


def test_plain_sgd_remembers_nothing() -> None:
    assert_reset_is_fresh(SGD, warmups=(4,), has_history=False)


@pytest.mark.parametrize(("dampening", "stays"), [(0.0, True), (0.3, False)])
def test_buffer_of_sgd_stays_in_place_unless_it_starts_as_a_gradient(dampening: float, stays: bool) -> None:
    parameters = sample_parameters()
    optimizer = step_some(build(SGD, parameters, {"momentum": 0.9, "dampening": dampening})).optimizer
    before = [optimizer.state[parameter]["momentum_buffer"] for parameter in parameters]
    reset_optimizer_states(optimizer)
    after = [optimizer.state[parameter].get("momentum_buffer") for parameter in parameters]
    assert [one is other for one, other in zip(before, after, strict=True)] == [stays] * len(parameters)


@pytest.mark.parametrize(
    "options", [{}, {"nesterov": True}, {"maximize": True}, {"foreach": True}, {"fused": True}]
)
def test_buffer_of_sgd_has_the_sign_of_a_zero_gradient(options: Options) -> None:
    def with_zeros(parameters: Parameters) -> Trial:
        optimizer = SGD(parameters, momentum=0.9, **options)
        zero = 0.0 if options.get("maximize") else -0.0

        def step(i: int) -> None:
            for number, parameter in enumerate(parameters):
                gradient = draw(parameter, 100 * i + number)
                parameter.grad = torch.where(gradient > 0.4, zero, gradient)
            optimizer.step()

        return Trial(optimizer, step, lambda: parameters)

    assert_reset_is_fresh(with_zeros, warmups=(4,), further=5)


@pytest.mark.parametrize("cls", OPTIMIZERS.values())
def test_every_class_of_torch_is_claimed_by_its_own_name(cls: type[Optimizer]) -> None:
    assert default_registry().claims[class_name(cls)].provider.plugin == "torch"


def test_every_class_of_torch_has_variants_here() -> None:
    assert sorted(OPTIMIZERS.keys() - VARIANTS.keys()) == []
    assert VARIANTS.keys() - OPTIMIZERS.keys() <= NEWER_THAN_2_6


@pytest.mark.parametrize("cls", [cls for cls in OPTIMIZERS.values() if SETTINGS["differentiable"].fits(cls)])
def test_state_lets_go_of_its_graph_and_weights_keep_theirs(cls: type[Optimizer]) -> None:
    options = VARIANTS[cls.__name__][-1] | {"differentiable": True}
    trial = step_some(differentiable(cls, sample_parameters(), options))

    def grown() -> list[torch.Tensor]:
        return [t for t in pytree.tree_leaves(list(trial.optimizer.state.values())) if t.requires_grad]

    assert grown()
    reset_optimizer_states(trial.optimizer)
    assert not grown()
    assert all(weight.grad_fn is not None for weight in trial.weights())


@pytest.mark.parametrize("cls", [Adam, AdamW])
def test_master_weights_in_the_state_are_kept(cls: type[Optimizer]) -> None:
    def with_masters(parameters: Parameters) -> Trial:
        """Keep them as HybridDeviceOptimizer of megatron-core does: they are the parameters themselves."""
        inner = trial_of(cls(parameters), parameters)

        def step(i: int) -> None:
            inner.step(i)
            for parameter in parameters:
                inner.optimizer.state[parameter]["master_param"] = parameter

        return Trial(inner.optimizer, step, inner.weights)

    assert_reset_is_fresh(with_masters, warmups=(4,))


@pytest.mark.parametrize("cls", [Adam, AdamW])
def test_step_that_a_load_left_in_the_groups_goes(cls: type[Optimizer]) -> None:
    def saved_by_megatron(parameters: Parameters) -> Trial:
        """Save and load as DistributedOptimizer of megatron-core does: with a count in each group."""
        inner = trial_of(cls(parameters), parameters)

        def save_and_load() -> None:
            saved = inner.optimizer.state_dict()
            saved["param_groups"][0]["step"] = 4
            inner.optimizer.load_state_dict(saved)

        return Trial(inner.optimizer, inner.step, inner.weights, save_and_load)

    assert_reset_is_fresh(saved_by_megatron, warmups=(4,))
