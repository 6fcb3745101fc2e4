"""Hold the optimizers and wrappers of heavyball to the law of a reset."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from variants import Options, Setting, Table, loss_of, no_gradient, optimizers_in, step_some

from miles_reset import UndeclaredStateError, reset_optimizer_states
from miles_reset.testing import Parameters, Trial, assert_reset_is_fresh, sample_parameters, trial_of

heavyball = pytest.importorskip("heavyball")

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    pytest.mark.usefixtures("nothing_is_compiled"),
]

BASES = ["StatefulOptimizer", "ChainOpt", "BaseOpt", "ScheduleFree", "MSAM", "SOAPBase", "PSGDBase"]
LEFT_OUT = {
    **dict.fromkeys(BASES, "a base without a chain"),
    **dict.fromkeys(["SplitOpt", "SAMWrapper"], "a wrapper: held to the law below"),
}
CLASSES = {name: cls for name, cls in optimizers_in(heavyball).items() if name not in LEFT_OUT}

COMMON: list[Options] = [{}, {"storage_dtype": "bfloat16"}, {"ecc": "bf16+8"}, {"mars": True}]
ADAM: list[Options] = [*COMMON, {"palm": True}, {"multi_tensor": False}, {"warmup_steps": 3, "caution": True}]
SOAP: list[Options] = [
    {},
    {"mars": True},
    {"merge_dims": False, "precondition_1d": True},
    {"split": True, "max_precond_dim": 4},
    {"precond_grad_accum": True},
]
PSGD: list[Options] = [
    {},
    {"storage_dtype": "bfloat16"},
    {"preconditioner_update_probability": 0.4, "precond_grad_accum": True},
]
KRON: list[Options] = [*PSGD, {"memory_save_mode": "one_diag"}, {"merge_dims": True, "split": True}]
VARIANTS: dict[str, list[Options]] = {
    **dict.fromkeys(CLASSES, ADAM),
    **{name: SOAP for name in CLASSES if "SOAP" in name or "SOLP" in name or "Shampoo" in name},
    "SGD": [{}, {"storage_dtype": "bfloat16"}, {"ecc": "bf16+8"}, {"mars": True}, {"weight_decay": 0.05}],
    "NAdam": [*ADAM, {"decoupled_weight_decay": True, "weight_decay": 0.05}],
    "AdEMAMix": [*COMMON, {"beta3_warmup": 3, "alpha_warmup": 3}],
    "Scion": COMMON,
    "MuonAdamW": [*ADAM, {"nesterov": False}],
    "Muon": [*ADAM, {"nesterov": False}, {"heavyball_momentum": True}],
    "PSGDKron": [*KRON, {"store_triu_as_line": False}, {"delayed": True}],
    "LATHER": [*KRON, {"store_triu_as_line": False}],
    "PSGDPRO": KRON,
    "QSGD": KRON,
    "PSGDLRA": [*PSGD, {"delayed": True}, {"multi_tensor": False}],
}
"""The options of each class that change its state, or how it is used.

A cache of preconditioners, with ``cached``, is memory that nobody has written for some thousand steps.
"""


def few() -> Parameters:
    """Return a small matrix and a vector: some of heavyball's take their time, and take no scalars."""
    generator = torch.Generator().manual_seed(7)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in [(6, 4), (4,)]]


def without_scalars() -> Parameters:
    return [torch.nn.Parameter(p.detach().reshape(p.shape or (1,))) for p in sample_parameters()]


def low() -> Parameters:
    return [torch.nn.Parameter(p.detach().bfloat16()) for p in few()]


SETTINGS = {
    "plain": Setting(parameters=few, law={"warmups": (3,), "further": 3}),
    "more steps": Setting(parameters=without_scalars, once=True),
    "no gradient": Setting(parameters=without_scalars, build=no_gradient, once=True),
    "bfloat16": Setting(parameters=low, law={"warmups": (3,), "further": 3}, once=True),
}
REFUSED = {
    (name, "bfloat16"): (RuntimeError, "expected scalar type BFloat16") for name in ("PSGDPRO", "QSGD")
}
TABLE = Table(CLASSES, VARIANTS, SETTINGS, REFUSED, package="heavyball", sample=40)


@pytest.mark.parametrize("case", TABLE.cases())
def test_a_reset_is_fresh(case: Any, hold: Any) -> None:
    hold(case)


@pytest.mark.parametrize(("case", "error", "match"), TABLE.refusals())
def test_what_heavyball_cannot_step(case: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        case.step_load_and_step()


def test_heavyball_cannot_step_with_a_schedule_of_preconditioners() -> None:
    parameters = few()
    with pytest.raises(AttributeError, match="clamp"):
        step_some(trial_of(heavyball.SOAP(parameters, use_precond_schedule=True), parameters))


def with_closure(cls: Any, parameters: Parameters, **options: Any) -> Trial:
    optimizer = cls(parameters, **options)

    def step(i: int) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(i)
            optimizer.step(loss_of(parameters, i))

    return Trial(optimizer, step, lambda: parameters)


def split(parameters: Parameters) -> Any:
    matrices, others = ([p for p in parameters if (p.ndim == 2) is wanted] for wanted in (True, False))
    specs = [
        {"params": matrices, "optimizer": heavyball.Muon},
        {"params": others, "optimizer": heavyball.AdamW},
    ]
    return heavyball.SplitOpt(specs)


def averaged(parameters: Parameters) -> Any:
    optimizer = heavyball.AdamW(parameters)
    optimizer.use_ema = True
    return optimizer


BUILDS = {
    "SplitOpt": split,
    "SAMWrapper": partial(with_closure, heavyball.SAMWrapper),
    "SAMWrapper over SFAdamW": partial(
        with_closure, heavyball.SAMWrapper, wrapped_optimizer=heavyball.SFAdamW
    ),
    "second derivatives": partial(with_closure, heavyball.PSGDKron, hessian_approx=True, hvp_interval=2),
    "finite differences": partial(
        with_closure, heavyball.PSGDLRA, hessian_approx=True, finite_differences=True
    ),
    "averaged weights": averaged,
}


@pytest.mark.parametrize("name", BUILDS)
def test_what_cannot_be_said_with_options_alone(name: str) -> None:
    assert_reset_is_fresh(BUILDS[name], parameters=few, warmups=(4,), further=3)


def test_a_reset_between_two_updates_of_a_preconditioner_is_fresh() -> None:
    options = {"preconditioner_update_probability": 0.4, "precond_grad_accum": True}
    kron = partial(heavyball.PSGDKron, **options)
    assert_reset_is_fresh(kron, parameters=few, warmups=(2,), further=4)


@pytest.mark.parametrize("mode", ["bf16+8", "bf16+16"])
def test_the_lower_bits_of_weights_are_weights(mode: str) -> None:
    def compensated(parameters: Parameters) -> Trial:
        own = parameters[:2]  # a twin is also handed the lower bits
        inner = trial_of(heavyball.AdamW(own, param_ecc=mode), own)

        def weights() -> list[torch.Tensor]:
            return [*own, *(inner.optimizer.state[p][0]["param::ecc"] for p in own)]

        return Trial(inner.optimizer, inner.step, weights)

    assert any(tensor.any() for tensor in step_some(compensated(few())).weights()[2:])
    assert_reset_is_fresh(compensated, parameters=few, warmups=(3,), further=3)


@pytest.mark.parametrize("name", ["AdamW", "SFAdamW", "ADOPT", "SOAP", "PSGDKron"])
def test_a_reset_is_fresh_where_a_gradient_comes_late(name: str) -> None:
    case = next(case.values[0] for case in TABLE.first_cases() if case.id == f"{name}-plain")
    case.assert_late_gradients_are_fresh()


@pytest.mark.parametrize("name", ["SFAdamW", "MSAMLaProp"])
def test_a_reset_in_evaluation_mode_moves_no_weight(name: str) -> None:
    parameters = few()
    trial = step_some(trial_of(CLASSES[name](parameters, lr=0.1), parameters))
    trial.optimizer.eval()
    before = [parameter.detach().clone() for parameter in parameters]
    reset_optimizer_states(trial.optimizer)
    trial.optimizer.train()
    assert all(map(torch.equal, parameters, before))


def test_a_key_that_nobody_declared_is_refused_inside_of_a_part_too() -> None:
    parameters = few()
    trial = step_some(trial_of(heavyball.AdamW(parameters), parameters))
    trial.optimizer.state[parameters[0]][0]["param::more"] = torch.ones(3)
    with pytest.raises(UndeclaredStateError, match="'param::more'"):
        reset_optimizer_states(trial.optimizer)


def test_every_class_of_heavyball_is_here() -> None:
    assert optimizers_in(heavyball).keys() == VARIANTS.keys() | LEFT_OUT.keys()
