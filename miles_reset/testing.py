"""The laws of a reset as functions, for the tests of every plugin.

::

    from miles_reset.testing import assert_reset_is_fresh

    def test_lion():
        assert_reset_is_fresh(lambda params: Lion(params, lr=1e-3))

The first law: after a reset, the next steps are bit-identical to those of a freshly built
optimizer over the same weights and hyper-parameters. "The moments are zero" is not the law: that
holds too where the next update is three times too large.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from miles_reset.discovery import default_registry
from miles_reset.registry import Registry
from miles_reset.reset import plan_reset, reset_optimizer_states
from miles_reset.values import How, local
from miles_reset.walk import walk

WARMUPS = (1, 3, 4, 5, 12)
"""Steps before the reset. A period that divides one of them hides a fault; no period divides all."""

Parameters = list[torch.nn.Parameter]
Factory = Callable[[Parameters], Any]


@dataclass
class Trial:
    """An optimizer, or a tree of them, that a law can step.

    Attributes:
        optimizer: What is handed to ``reset_optimizer_states``.
        step: ``step(i)`` makes one step with gradients that depend on ``i`` alone.
        weights: Returns every tensor that holds weights, master weights included, in a fixed
            order. It is called anew each time: a load may put other tensors in their place.
        round_trip: Saves the optimizer's state and loads it back; by default
            ``load_state_dict(state_dict())``, with a copy between.
    """

    optimizer: Any
    step: Callable[[int], object]
    weights: Callable[[], Sequence[torch.Tensor]]
    round_trip: Callable[[], object] | None = None

    def reload(self) -> None:
        """Save the optimizer's state and load it back."""
        if self.round_trip is not None:
            self.round_trip()
        else:
            self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))


def sample_parameters() -> Parameters:
    """Return parameters on which state shows: two matrices, a vector and a scalar, float32, on the CPU."""
    generator = torch.Generator().manual_seed(7)
    shapes = [(8, 6), (6, 6), (6,), ()]
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def trial_of(optimizer: Any, parameters: Parameters) -> Trial:
    """Make a trial of an optimizer over parameters.

    Each step sets gradients of the parameters' own shape, dtype and device, drawn from a normal
    distribution. Torch's and Python's global random numbers are seeded for the step.
    """

    def step(i: int) -> None:
        generator = torch.Generator().manual_seed(1000 + i)
        for parameter in parameters:
            gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            if parameter.dtype.is_complex:
                imaginary = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
                gradient = torch.complex(gradient, imaginary)
            parameter.grad = gradient.to(parameter.device, parameter.dtype)
        before = random.getstate()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(i)  # torch.manual_seed is slow in a CUDA build
            if torch.cuda.is_available():
                torch.cuda.manual_seed_all(i)
            random.seed(i)
            optimizer.step()
        random.setstate(before)

    return Trial(optimizer, step, lambda: parameters)


def assert_reset_is_fresh(
    factory: Factory,
    *,
    parameters: Callable[[], Parameters] = sample_parameters,
    warmups: Sequence[int] = WARMUPS,
    further: int = 12,
    round_trips: Sequence[bool] = (False, True),
    hyperparameters: Mapping[str, Any] | None = None,
    has_history: bool = True,
    registry: Registry | None = None,
) -> None:
    """Assert that a reset optimizer steps on like a freshly built one, bit for bit.

    For each number of warm-up steps, without and with a save and load of its state: build, step,
    reset; build a twin over the same weights; step both on and compare all weights and all state
    after each step. Also asserted: the reset moves no weight; each tensor that survives keeps its
    storage, dtype and device; a second reset changes nothing; and without the reset the two
    differ, for a law that cannot fail says nothing.

    Args:
        factory: Builds the optimizer over the parameters that it is handed, and nothing else: a
            twin gets copies of the current ones. Or returns a :class:`Trial` of its own; the
            twin's weights are then overwritten with the current ones.
        parameters: Makes the parameters, the same at each call.
        warmups: Numbers of steps before the reset.
        further: The number of steps after it. Some faults show late: Ranger's at step 6,
            AdaShift's at step 11.
        round_trips: Whether the state is saved and loaded before the reset; both by default.
        hyperparameters: Entries to set in all param groups before the reset, such as ``{"lr": 0.5}``,
            and in the twin before its first step.
        has_history: Whether the optimizer remembers anything. Plain SGD does not: it is asserted
            then that the two do not differ.
        registry: Where classes are looked up; the installed plugins by default.

    Raises:
        AssertionError: With the step, the parameter, the key and by how much.
    """
    registry = registry or default_registry()
    hyperparameters = hyperparameters or {}
    differed = False
    for warmup in warmups:
        for round_trip in round_trips:
            build = partial(build_trial, factory, parameters())
            what = f"{warmup} warm-up steps{', state saved and loaded' if round_trip else ''}"
            subject, control = build(), build()
            for trial in (subject, control):
                _warm_up(trial, warmup, round_trip)
                _set(trial, hyperparameters, registry)
            _assert_reset_keeps(subject, registry, what)
            twin, second = build(subject), build(control)
            for trial in (twin, second):
                _set(trial, hyperparameters, registry)
            _assert_alike(subject, twin, warmup, further, registry, what)
            differed |= bool(_first_difference(control, second, warmup, further, registry))
    if differed != has_history:
        raise AssertionError(
            "Without a reset nothing differs from a fresh optimizer, so this law cannot fail here. "
            "Take more warm-up steps, or pass has_history=False if the optimizer remembers nothing."
            if has_history
            else "has_history=False, yet without a reset the optimizer differs from a fresh one."
        )


def build_trial(factory: Factory, first: Parameters, like: Trial | None = None) -> Trial:
    """Build a trial over copies of parameters, or a twin over copies of another trial's current weights.

    Args:
        factory: As for :func:`assert_reset_is_fresh`.
        first: The parameters.
        like: The other trial.
    """
    source = first if like is None else like.weights()
    copies = [torch.nn.Parameter(p.detach().clone(), p.requires_grad) for p in source]
    built = factory(copies)
    if not isinstance(built, Trial):
        return trial_of(built, copies)
    if like is not None:
        mine, theirs = built.weights(), like.weights()
        assert len(mine) == len(theirs), f"a twin has {len(mine)} tensors of weights, not {len(theirs)}"
        with torch.no_grad():
            for to, source_tensor in zip(mine, theirs, strict=True):
                to.data.copy_(source_tensor.data)
    return built


def _warm_up(trial: Trial, steps: int, round_trip: bool) -> None:
    for i in range(steps):
        trial.step(i)
    if round_trip:
        trial.reload()


def _set(trial: Trial, hyperparameters: Mapping[str, Any], registry: Registry) -> None:
    for leaf in walk(trial.optimizer, registry).leaves:
        for group in leaf.obj.param_groups:
            group.update(copy.deepcopy(dict(hyperparameters)))


def _assert_reset_keeps(trial: Trial, registry: Registry, what: str) -> None:
    weights = [tensor.detach().clone() for tensor in trial.weights()]
    before = {held.name: (held.value, _kind(held.value)) for held in _state(trial, registry)}
    plan = plan_reset(trial.optimizer, registry=registry)
    replaced = {
        (id(container), write.key)
        for write in plan._draft.writes
        if write.how is How.REPLACE
        for container in write.containers
    }
    plan.apply()
    for i, (was, now) in enumerate(zip(weights, trial.weights(), strict=True)):
        assert same_bits(was, now), f"the reset moved weight {i} by {_gap(was, now)} ({what})"
    fresh = {}
    for held in _state(trial, registry):
        value = held.value
        fresh[held.name] = value.detach().clone() if isinstance(value, torch.Tensor) else value
        was, kind = before.get(held.name, (None, None))
        if isinstance(was, torch.Tensor) and (id(held.container), held.key) not in replaced:
            same = held.value is was and _kind(held.value) == kind
            assert same, (
                f"the reset put another tensor at {held.name} ({what}): {kind} became {_kind(held.value)}. "
                "Only a write that the plan calls 'replaced' may do so."
            )
    reset_optimizer_states(trial.optimizer, registry=registry)
    again = {held.name: held.value for held in _state(trial, registry)}
    assert fresh.keys() == again.keys(), f"a second reset changed {fresh.keys() ^ again.keys()} ({what})"
    for name, value in again.items():
        assert same_bits(fresh[name], value), f"a second reset changed {name} ({what})"


def _assert_alike(trial: Trial, twin: Trial, first: int, further: int, registry: Registry, what: str) -> None:
    try:
        difference = _first_difference(trial, twin, first, further, registry)
    except Exception as error:
        given_up = "Is a slot given up (ABSENT, NONE) that step() does not make again?"
        raise AssertionError(f"after the reset ({what}), a step raises {error!r}. {given_up}") from error
    assert not difference, f"after the reset ({what}), {difference}"


def _first_difference(trial: Trial, twin: Trial, first: int, further: int, registry: Registry) -> str:
    """Step both on and say where they first differ: a weight, or a value of the state."""
    for i in range(further):
        for one in (trial, twin):
            one.step(first + i)
        step = f"step {i + 1} of {further} leaves"
        state = list(_differences_in_state(trial, twin, registry))
        for number, (mine, fresh) in enumerate(zip(trial.weights(), twin.weights(), strict=True)):
            if not same_bits(mine, fresh):
                beside = (
                    f"and {state[0]}"
                    if state
                    else "but no state differs: look for a memory in attributes, or in a wrapper"
                )
                return f"{step} {_off(f'weight {number}', mine, fresh)}, {beside}"
        if state:
            return f"{step} {state[0]}"
    return ""


def _differences_in_state(trial: Trial, twin: Trial, registry: Registry) -> Iterator[str]:
    mine, fresh = ({held.name: held.value for held in _state(one, registry)} for one in (trial, twin))
    for name in [*mine, *(fresh.keys() - mine.keys())]:
        if name not in fresh or name not in mine:
            yield f"{name} in {'the reset' if name in mine else 'a fresh'} optimizer only"
        elif not same_bits(mine[name], fresh[name]):
            yield _off(name, mine[name], fresh[name])


def _off(name: str, mine: Any, fresh: Any) -> str:
    return f"{name} off by {_gap(mine, fresh)} from a fresh optimizer's"


@dataclass(frozen=True)
class _Held:
    """A tensor or a number in the state or a param group of a leaf."""

    name: str
    container: Any
    key: Any
    value: Any


def _state(trial: Trial, registry: Registry) -> Iterator[_Held]:
    for leaf in walk(trial.optimizer, registry).leaves:
        order = [p for group in leaf.obj.param_groups for p in group["params"]]
        numbers = {id(parameter): f"parameter {i}" for i, parameter in enumerate(order)}
        for at, (key, entry) in enumerate(leaf.obj.state.items()):
            name = numbers.get(id(key), f"entry {at}" if isinstance(key, torch.Tensor) else repr(key))
            yield from _held(f"{leaf.path}, {name}", leaf.obj.state, key, entry)
        for i, group in enumerate(leaf.obj.param_groups):
            for key in group.keys() - {"params"}:
                yield from _held(f"{leaf.path}, group {i}, {key!r}", group, key, group[key])


def _held(name: str, container: Any, key: Any, value: Any) -> Iterator[_Held]:
    if isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _held(f"{name}[{i}]", value, i, item)
    elif isinstance(value, Mapping):
        for inner, item in value.items():
            yield from _held(f"{name}, {inner!r}", value, inner, item)
    elif isinstance(value, torch.Tensor) and hasattr(type(local(value)), "__tensor_flatten__"):
        tensor: Any = local(value)
        for part in tensor.__tensor_flatten__()[0]:
            yield from _held(f"{name}, {part!r}", value, part, getattr(tensor, part))
    elif isinstance(value, (torch.Tensor, int, float, complex)):
        yield _Held(name, container, key, value)


def _kind(value: Any) -> tuple[int, torch.dtype, torch.device] | None:
    if not isinstance(value, torch.Tensor):
        return None
    return local(value).data_ptr(), value.dtype, value.device


def same_bits(mine: Any, fresh: Any) -> bool:
    """Say whether two tensors, or two numbers, are the same to the last bit."""
    if not (isinstance(mine, torch.Tensor) and isinstance(fresh, torch.Tensor)):
        return type(mine) is type(fresh) and bool(mine == fresh or mine != mine)
    if mine.shape != fresh.shape or mine.dtype != fresh.dtype:
        return False
    return torch.equal(_bits(mine), _bits(fresh))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    flat = local(tensor).detach().cpu().reshape(-1)
    return flat.clone(memory_format=torch.contiguous_format).view(
        torch.uint8
    )  # one alone may have any stride


def _gap(mine: Any, fresh: Any) -> str:
    if not (isinstance(mine, torch.Tensor) and isinstance(fresh, torch.Tensor)):
        return f"{mine!r} against {fresh!r}"
    if mine.shape != fresh.shape or mine.dtype != fresh.dtype:
        return f"{tuple(mine.shape)} {mine.dtype} against {tuple(fresh.shape)} {fresh.dtype}"
    wide = torch.complex128 if mine.is_complex() else torch.float64
    a, b = (local(tensor).detach().to(wide) for tensor in (mine, fresh))
    far = (a - b).abs().flatten()
    return f"{far.max().item():.3g} (fresh: {b.flatten()[far.argmax()].item():.3g})"
