"""Hold the optimizers of torch-optimizer, and of pytorch-ranger, to the law of a reset."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from variants import (
    Options,
    Setting,
    Table,
    cast,
    no_gradient,
    not_finite,
    optimizers_in,
    over,
    step_some,
    step_with_curvature,
)

from miles_reset import UnreachableStateError, reset_optimizer_states
from miles_reset.testing import WARMUPS, Parameters, Trial, assert_reset_is_fresh, sample_parameters, trial_of

torch_optimizer = pytest.importorskip("torch_optimizer")
pytorch_ranger = pytest.importorskip("pytorch_ranger")

pytestmark = pytest.mark.filterwarnings("ignore:This overload of add")  # both call torch as it was long ago

CLASSES = optimizers_in(torch_optimizer) | optimizers_in(pytorch_ranger)

DECAY: list[Options] = [{}, {"weight_decay": 0.05}]
BUFFER: list[Options] = [
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.3},
    {"momentum": 0.9, "weight_decay": 0.05},
    {},
]
VARIANTS: dict[str, list[Options]] = {
    "A2GradExp": [{}, {"rho": 0.9}],
    "A2GradInc": [{}, {"beta": 1.0}],
    "A2GradUni": [{}, {"beta": 1.0}],
    "AccSGD": DECAY,
    "AdaBelief": [{}, {"amsgrad": True}, {"rectify": True, "betas": (0.9, 0.9)}, {"weight_decouple": True}],
    "AdaBound": [{}, {"amsbound": True}],
    "AdaMod": [*DECAY, {"beta3": 0.9}],
    "Adafactor": [{}, {"beta1": 0.9}, {"warmup_init": True}, {"lr": 0.01, "relative_step": False}],
    "Adahessian": [{}, {"hessian_power": 1.0, "weight_decay": 0.05}, {"seed": 3}],
    "AdamP": [*DECAY, {"nesterov": True}],
    "AggMo": [*DECAY, {"betas": [0.5, 0.9]}],
    "Apollo": [{}, {"warmup": 6}],
    "DiffGrad": DECAY,
    "LARS": [*BUFFER, {"momentum": 0.9, "nesterov": True}],
    "Lamb": [*DECAY, {"adam": True}, {"debias": True}],
    "MADGRAD": [*DECAY, {"momentum": 0.0}],
    "NovoGrad": [{"amsgrad": True, "betas": (0.95, 0.98)}, {"betas": (0.95, 0.98)}, {"grad_averaging": True}],
    "PID": BUFFER,
    "QHAdam": [*DECAY, {"nus": (0.7, 0.9)}, {"decouple_weight_decay": True, "weight_decay": 0.05}],
    "QHM": [{"momentum": 0.9}, {"momentum": 0.9, "weight_decay": 0.05}],
    "RAdam": [*DECAY, {"betas": (0.9, 0.9)}],
    "SGDP": [*BUFFER, {"momentum": 0.9, "nesterov": True}],
    "SGDW": BUFFER,
    "SWATS": [*DECAY, {"amsgrad": True}, {"nesterov": True}],
    "Shampoo": [{"momentum": 0.9}, {}, {"update_freq": 3}, {"weight_decay": 0.05}],
    "Yogi": [*DECAY, {"initial_accumulator": 0.1}],
    "Ranger": [*DECAY, {"k": 3}, {"betas": (0.9, 0.9)}],
    "RangerQH": [*DECAY, {"k": 3}, {"decouple_weight_decay": True, "weight_decay": 0.05}],
    "RangerVA": [{}, {"k": 3}, {"amsgrad": False}, {"transformer": "relu"}],
}
"""The options of each class that change its state, or how it is used."""

LEFT_OUT = {"Lookahead": "a wrapper: held to the law below"}


def build(cls: type[Any], parameters: Parameters, options: Options) -> Trial:
    step_with = step_with_curvature if cls.__name__ == "Adahessian" else trial_of
    return step_with(cls(parameters, **options), parameters)


def spoiled(cls: type[Any], parameters: Parameters, options: Options) -> Trial:
    if cls.__name__ == "Shampoo":  # whose own step fails on what is not finite
        return build(cls, parameters, options)
    return not_finite(cls, parameters, options, build)


def adapt(name: str, parameters: Parameters) -> Parameters:
    """Give SWATS float32: in bfloat16 it goes over to SGD at once, as is tested below."""
    return [torch.nn.Parameter(p.detach().float()) for p in parameters] if name == "SWATS" else parameters


SETTINGS = {
    "plain": Setting(build=build),
    "many steps": Setting(build=build, law={"warmups": WARMUPS, "further": 12}, once=True),
    "no gradient": Setting(build=no_gradient, once=True),
    "bfloat16": Setting(build=build, parameters=cast(torch.bfloat16), once=True),
    "not finite": Setting(build=spoiled, once=True),
}
REFUSED = {
    ("Adahessian", "no gradient"): (RuntimeError, "does not have grad_fn"),
    ("Shampoo", "bfloat16"): (NotImplementedError, "not implemented for 'BFloat16'"),
}
TABLE = Table(
    {name: CLASSES[name] for name in VARIANTS},
    VARIANTS,
    SETTINGS,
    REFUSED,
    adapt=adapt,
    has_history=lambda name, options: name not in ("PID", "SGDP", "SGDW", "LARS") or "momentum" in options,
    package="torch-optimizer",
    sample=6,
)


# With torch 2 it cannot be saved.
UNSAVED = {"round_trips": [False], "warmups": (1, 4, 6)}
WRAPPERS = Table(
    {"Lookahead": torch_optimizer.Lookahead},
    {"Lookahead": [{}, {"k": 3, "alpha": 0.8}]},
    {
        "over AdamW": Setting(build=over(torch.optim.AdamW), law=UNSAVED),
        "over SGD": Setting(build=over(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.3), law=UNSAVED),
        "over plain SGD": Setting(build=over(torch.optim.SGD, lr=0.1), law=UNSAVED),
        "over Yogi": Setting(build=over(torch_optimizer.Yogi), law=UNSAVED),
    },
    {},
    package="torch-optimizer",
)


@pytest.mark.parametrize("case", TABLE.cases() + WRAPPERS.cases())
def test_a_reset_is_fresh(case: Any, hold: Any) -> None:
    hold(case)


@pytest.mark.parametrize("case", TABLE.first_cases())
def test_a_reset_is_fresh_where_a_gradient_comes_late(case: Any) -> None:
    case.assert_late_gradients_are_fresh()


@pytest.mark.parametrize(("case", "error", "match"), TABLE.refusals())
def test_what_torch_optimizer_cannot_step(case: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        case.step_load_and_step()


def test_every_class_of_torch_optimizer_is_here() -> None:
    assert CLASSES.keys() == VARIANTS.keys() | LEFT_OUT.keys()


def test_a_wrapper_cannot_be_saved() -> None:
    wrapper = torch_optimizer.Lookahead(torch.optim.SGD(sample_parameters(), lr=0.1))
    with pytest.raises(AttributeError, match="hooks"):
        wrapper.state_dict()


def test_state_of_apollo_that_grew_a_graph_is_reset_too() -> None:
    """With weight decay it steps under autograd, and its state can be neither copied nor saved."""

    def apollo(parameters: Parameters) -> Any:
        return torch_optimizer.Apollo(parameters, weight_decay=0.05)

    assert_reset_is_fresh(apollo, warmups=(4,), further=5, round_trips=[False])


def test_swats_that_went_over_to_sgd_is_refused_until_it_is_told_its_rate() -> None:
    def swats(parameters: Parameters) -> Trial:
        inner = trial_of(torch_optimizer.SWATS(parameters), parameters)
        group = inner.optimizer.param_groups[0]

        def step(i: int) -> None:
            group.update(phase="SGD" if i == 2 else "ADAM", lr=0.5 if i == 2 else 1e-3)
            inner.step(i)

        return Trial(inner.optimizer, step, inner.weights)

    trial = step_some(swats(sample_parameters()))
    assert "momentum_buffer" in trial.optimizer.state[trial.weights()[0]]
    with pytest.raises(UnreachableStateError, match="'phase' to 'ADAM' and 'lr'"):
        reset_optimizer_states(trial.optimizer)
    assert_reset_is_fresh(swats, warmups=(4,), further=5)


@pytest.mark.parametrize("name", ["AdaBelief", "RAdam", "Ranger"])
def test_what_was_found_for_other_options_is_forgotten(name: str) -> None:
    changed = {"betas": (0.9, 0.95), "lr": 0.01}
    assert_reset_is_fresh(
        lambda parameters: CLASSES[name](parameters, betas=(0.9, 0.9)), warmups=(4,), hyperparameters=changed
    )
