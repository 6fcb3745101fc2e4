"""Hold the wrappers of pytorch-optimizer to the law of a reset, with real optimizers inside."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_cuda import fake_cuda
from variants import cast, draw, loss_of, step_some

from miles_reset import default_registry, plan_reset, reset_optimizer_states
from miles_reset.errors import UnreachableStateError
from miles_reset.resume import refresh_masters
from miles_reset.testing import WARMUPS, Parameters, Trial, assert_reset_is_fresh, sample_parameters, trial_of

library = pytest.importorskip("pytorch_optimizer")

# What they hold

INSIDE: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}),
    "SGD": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}),
    "SGD, dampened": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "dampening": 0.5}),
    "AdaBelief": (library.AdaBelief, {"lr": 0.01}),  # which counts its steps in the group
    "Prodigy": (library.Prodigy, {"d0": 1e-3}),  # which learns in the group
}
"""By name, a class and options: one counts its steps in its state, one nowhere, and two in the group."""


def inside(name: str, parameters: Parameters) -> torch.optim.Optimizer:
    cls, options = INSIDE[name]
    optimizer: torch.optim.Optimizer = cls(parameters, **options)
    return optimizer


# The wrappers over an optimizer

OVER: dict[str, Callable[[Any], Any]] = {
    "Lookahead": lambda inner: library.Lookahead(inner, k=3),
    "Lookahead, pullback": lambda inner: library.Lookahead(inner, k=3, pullback_momentum="pullback"),
    "Lookahead, reset": lambda inner: library.Lookahead(inner, k=3, pullback_momentum="reset"),
    "ScheduleFreeWrapper": lambda inner: library.ScheduleFreeWrapper(inner, r=0.5),
    "ScheduleFreeWrapper, decayed": lambda inner: library.ScheduleFreeWrapper(inner, weight_decay=0.05),
    "TRAC": lambda inner: library.TRAC(inner, s_prev=0.1),
    "OrthoGrad": lambda inner: library.OrthoGrad(inner),
    "PCGrad": lambda inner: library.PCGrad(inner),
    "Magma": lambda inner: library.Magma(inner, mask_prob=0.7),
    "Magma, without a moment": lambda inner: library.Magma(inner, moment_key=None),
}


def wrapped(over: str, name: str) -> Callable[[Parameters], Trial]:
    def build(parameters: Parameters) -> Trial:
        wrapper = OVER[over](inside(name, parameters))
        if over.startswith("ScheduleFreeWrapper"):
            wrapper.train()
        return trial_of(wrapper, parameters)

    return build


TOO_LATE = {"ScheduleFreeWrapper, decayed", "WSAM", "WSAM, coupled", "GSAM"}
"""Those that move the weights before what is inside looks at them for the first time."""
OUT_OF_PHASE: dict[str, Any] = {"warmups": (4,), "further": 5}
"""The wrappers here have a period of three, or none."""


def no_scalar() -> Parameters:
    """TRAC takes none."""
    return [parameter for parameter in sample_parameters() if parameter.ndim]


def pairs(overs: Any) -> list[Any]:
    """Pair each wrapper with each that it can hold; two are always held, all in a census."""
    return [
        pytest.param(over, name, marks=() if name in {"AdamW", "AdaBelief"} else pytest.mark.census)
        for over in overs
        for name in INSIDE
        if not (over in TOO_LATE and name == "Prodigy")
    ]


@pytest.mark.parametrize(("over", "name"), pairs(OVER))
def test_a_reset_through_a_wrapper_is_fresh(over: str, name: str) -> None:
    assert_reset_is_fresh(wrapped(over, name), parameters=no_scalar, **OUT_OF_PHASE)


def test_a_reset_through_two_wrappers_is_fresh() -> None:
    def twice(parameters: Parameters) -> Trial:
        inner = library.Lookahead(inside("AdaBelief", parameters), k=3)
        return trial_of(library.Magma(inner), parameters)

    assert_reset_is_fresh(twice, **OUT_OF_PHASE)


def test_averaged_weights_in_evaluation_mode_are_fresh_too() -> None:
    def evaluated(parameters: Parameters) -> Trial:
        wrapper = OVER["ScheduleFreeWrapper"](inside("AdamW", parameters))
        plain = trial_of(wrapper, parameters).step

        def step(i: int) -> None:
            wrapper.train()
            plain(i)
            wrapper.eval()

        return Trial(wrapper, step, lambda: parameters)

    assert_reset_is_fresh(evaluated, **OUT_OF_PHASE)


def test_the_largest_rate_so_far_is_forgotten() -> None:
    build = wrapped("ScheduleFreeWrapper", "SGD")
    assert_reset_is_fresh(build, hyperparameters={"lr": 0.001}, **OUT_OF_PHASE)


def test_slow_weights_that_are_loaded_are_refused() -> None:
    parameters = sample_parameters()
    wrapper = step_some(wrapped("Lookahead", "AdamW")(parameters)).optimizer
    wrapper.backup_and_load_cache()
    with pytest.raises(UnreachableStateError, match=r"Call its clear_and_load_backup\(\) first"):
        plan_reset(wrapper)
    wrapper.clear_and_load_backup()
    reset_optimizer_states(wrapper)


def test_momentum_that_an_optimizer_calls_its_own_stays_in_place() -> None:
    parameters = sample_parameters()
    wrapper = step_some(wrapped("Lookahead, pullback", "SGD")(parameters)).optimizer
    inner = wrapper.optimizer.state
    before = [inner[p]["momentum_buffer"] for p in parameters]
    reset_optimizer_states(wrapper)
    assert all(inner[p]["momentum_buffer"] is buffer for p, buffer in zip(parameters, before, strict=True))


# Those that look for a sharper gradient, with a closure


def rising(optimizer: Any) -> Any:
    """Return what gives GSAM its radius: a share of the rate."""
    rate = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    return library.ProportionScheduler(rate, max_lr=0.1, max_value=0.5, min_value=0.05)


SHARP: dict[str, Callable[[Parameters, Any, dict[str, Any]], Any]] = {
    "SAM": lambda ps, cls, options: library.SAM(ps, cls, **options),
    "SAM, adaptive": lambda ps, cls, options: library.SAM(ps, cls, adaptive=True, use_gc=True, **options),
    "WSAM": lambda ps, cls, options: library.WSAM(torch.nn.ParameterList(ps), ps, cls, **options),
    "WSAM, coupled": lambda ps, cls, options: library.WSAM(
        torch.nn.ParameterList(ps), ps, cls, decouple=False, max_norm=1.0, **options
    ),
    "LookSAM": lambda ps, cls, options: library.LookSAM(ps, cls, k=3, **options),
    "FriendlySAM": lambda ps, cls, options: library.FriendlySAM(ps, cls, **options),
    "GSAM": lambda ps, cls, options: (
        lambda inner: library.GSAM(ps, inner, torch.nn.ParameterList(ps), rising(inner))
    )(cls(ps, **options)),
}


def sharp(over: str, name: str, foreach: bool | None = None) -> Callable[[Parameters], Trial]:
    def build(parameters: Parameters) -> Trial:
        cls, options = INSIDE[name]
        wrapper = SHARP[over](parameters, cls, options | ({} if foreach is None else {"foreach": foreach}))

        def step(i: int) -> None:
            closure = loss_of(parameters, i)
            closure()
            wrapper.step(lambda: (None, torch.enable_grad()(closure)()) if over == "GSAM" else closure())

        return Trial(wrapper, step, lambda: parameters)

    return build


@pytest.mark.parametrize(("over", "name"), pairs(SHARP))
def test_a_reset_of_a_sharpness_aware_one_is_fresh(over: str, name: str) -> None:
    assert_reset_is_fresh(sharp(over, name), **OUT_OF_PHASE)


@pytest.mark.parametrize("over", SHARP)
def test_a_reset_of_a_sharpness_aware_one_by_lists_is_fresh(over: str) -> None:
    assert_reset_is_fresh(sharp(over, "AdamW", foreach=True), **OUT_OF_PHASE)


@pytest.mark.parametrize("over", ["SAM", "WSAM", "LookSAM", "FriendlySAM"])
def test_weights_between_two_half_steps_are_refused(over: str) -> None:
    parameters = sample_parameters()
    trial = sharp(over, "AdamW")(parameters)
    for i in range(3):  # LookSAM moves its weights at each third step only.
        trial.step(i)
    loss_of(parameters, 0)()
    trial.optimizer.first_step(zero_grad=False)
    with pytest.raises(UnreachableStateError, match=r"Call its second_step\(\) first"):
        plan_reset(trial.optimizer)
    trial.optimizer.second_step()
    reset_optimizer_states(trial.optimizer)


@pytest.mark.parametrize("over", sorted(TOO_LATE))
def test_copies_that_are_made_of_moved_weights_are_refused(over: str) -> None:
    build = wrapped if over in OVER else sharp
    trial = build(over, "Prodigy")(sample_parameters())
    plan_reset(trial.optimizer)
    step_some(trial)
    with pytest.raises(UnreachableStateError, match="moves the weights before Prodigy copies them"):
        plan_reset(trial.optimizer)


# Those that hold the weights twice


@pytest.mark.parametrize("name", ["AdamW", "SGD", "AdaBelief"])
def test_a_reset_below_float32_weights_is_fresh(name: str) -> None:
    def half(parameters: Parameters) -> Trial:
        halves = [p for p in parameters if p.dtype == torch.float16]
        wrapper = library.optimizer.fp16.SafeFP16Optimizer(inside(name, halves))

        def step(i: int) -> None:
            for parameter in halves:
                parameter.grad = draw(parameter, i) * wrapper.loss_scale / 1024
            wrapper.needs_sync = True
            wrapper.step()

        return Trial(wrapper, step, lambda: [*halves, *wrapper.fp32_params])

    assert_reset_is_fresh(half, parameters=cast(torch.float16), warmups=(4,), further=5)


def test_float32_weights_are_refreshed_from_halves() -> None:
    halves = cast(torch.float16)()
    wrapper = library.optimizer.fp16.SafeFP16Optimizer(torch.optim.SGD(halves))
    for half in halves:
        half.data.fill_(3.0)
    assert refresh_masters(wrapper) == 1
    assert all((whole == 3.0).all() for whole in wrapper.fp32_params)


def test_a_reset_of_an_optimizer_on_the_host_is_fresh() -> None:
    """On a GPU that is not there: what the wrapper is told of its tensors is not true."""
    offload = library.optimizer.utils.offload

    def offloaded(parameters: Parameters) -> Trial:
        parameters = parameters[: len(sample_parameters())]
        with fake_cuda():
            wrapper = offload.CPUOffloadOptimizer(parameters, torch.optim.AdamW, fused=False, lr=0.01)

        def step(i: int) -> None:
            with fake_cuda():
                loss_of(parameters, i)().detach()
                wrapper.step()

        return Trial(wrapper, step, lambda: [*parameters, *wrapper.param_cuda2cpu_map.values()])

    assert_reset_is_fresh(offloaded, warmups=(4,), further=5)
    trial = offloaded(sample_parameters())
    for parameter in trial.weights()[:4]:
        parameter.data.fill_(3.0)
    assert refresh_masters(trial.optimizer) == 1
    assert all((weight == 3.0).all() for weight in trial.weights())


# All of them


@pytest.mark.census
@pytest.mark.parametrize("over", [*OVER, *SHARP])
def test_a_reset_is_fresh_after_any_number_of_steps(over: str) -> None:
    build = wrapped if over in OVER else sharp
    assert_reset_is_fresh(build(over, "AdaBelief"), parameters=no_scalar, warmups=WARMUPS)


def test_every_wrapper_is_held_to_the_law() -> None:
    held = {title.split(",")[0] for title in itertools.chain(OVER, SHARP)}
    rules = {
        target.rpartition(".")[2]
        for target, claim in default_registry().claims.items()
        if target.startswith("pytorch_optimizer.") and hasattr(claim.record, "children")
    }
    assert rules - held == {"SafeFP16Optimizer", "CPUOffloadOptimizer"}
