"""How an optimizer can be built and stepped: over which parameters, with a closure or without."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from miles_reset.errors import DraftError
from miles_reset.testing import Factory, Parameters, Trial, build_trial, sample_parameters

Maker = Callable[[], Parameters]


def matrices() -> Parameters:
    """Return parameters for optimizers that take matrices only."""
    return sample_parameters()[:2]


def large() -> Parameters:
    """Return a matrix large enough for what quantizes its state."""
    return [torch.nn.Parameter(torch.randn(64, 80, generator=torch.Generator().manual_seed(11)))]


def in_bfloat16(make: Maker) -> Maker:
    """Return what makes the same parameters in bfloat16."""
    return lambda: [torch.nn.Parameter(p.detach().to(torch.bfloat16)) for p in make()]


SETTINGS: dict[str, Maker] = {"sample": sample_parameters, "matrices": matrices, "large": large}
"""The parameters that are tried in turn until the optimizer can be built and stepped."""


@dataclass(frozen=True)
class InTrainMode:
    """Builds an optimizer and calls its ``train()``, as those of schedulefree need.

    Attributes:
        factory: Builds the optimizer itself.
    """

    factory: Factory

    def __call__(self, parameters: Parameters) -> Any:
        """Build the optimizer."""
        optimizer = self.factory(parameters)
        optimizer.train()
        return optimizer


@dataclass(frozen=True)
class WithClosure:
    """Builds an optimizer whose ``step`` is handed a closure, as L-BFGS needs.

    The loss is not quadratic, has its minimum elsewhere at each step, and is computed anew at each call.

    Attributes:
        factory: Builds the optimizer itself.
    """

    factory: Factory

    def __call__(self, parameters: Parameters) -> Trial:
        """Build a trial that steps with a closure."""
        optimizer = self.factory(parameters)
        return Trial(optimizer, _seeded(lambda i: optimizer.step(_loss(parameters, i))), lambda: parameters)


@dataclass(frozen=True)
class WithGraph:
    """Builds an optimizer that differentiates the gradients once more, as AdaHessian does.

    Attributes:
        factory: Builds the optimizer itself.
    """

    factory: Factory

    def __call__(self, parameters: Parameters) -> Trial:
        """Build a trial whose gradients keep their graph."""
        optimizer = self.factory(parameters)

        def step(i: int) -> None:
            _loss(parameters, i, create_graph=True)()
            optimizer.step()
            for p in parameters:
                p.grad = None

        return Trial(optimizer, _seeded(step), lambda: parameters)


def _loss(parameters: Parameters, i: int, create_graph: bool = False) -> Callable[[], torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + i)
    targets = [torch.randn(p.shape, generator=generator).to(p.dtype) for p in parameters]

    def closure() -> torch.Tensor:
        with torch.enable_grad():
            far = [p - target for p, target in zip(parameters, targets, strict=True)]
            loss = torch.stack([(0.1 * d**4 + d**2).sum() for d in far]).sum()
            for p in parameters:
                p.grad = None
            loss.backward(create_graph=create_graph)  # type: ignore[no-untyped-call]  # as torch has it
        return loss

    return closure


def _seeded(step: Callable[[int], object]) -> Callable[[int], None]:
    def seeded(i: int) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(i)
            step(i)

    return seeded


WAYS: dict[str, Callable[[Factory], Factory]] = {
    "": lambda factory: factory,
    "InTrainMode": InTrainMode,
    "WithClosure": WithClosure,
    "WithGraph": WithGraph,
    "WithClosure, InTrainMode": lambda factory: WithClosure(InTrainMode(factory)),
}
"""The ways to step that are tried in turn, by the names of what is put around a factory."""


def what_runs(factory: Factory, choices: Mapping[str, Maker]) -> tuple[Factory, str, str]:
    """Return a factory whose optimizer can be stepped, the name of its parameters, and that of the way.

    Raises:
        DraftError: There is none.
    """
    problems: list[Exception] = []
    for name, make in choices.items():
        for way, around in WAYS.items():
            one = around(factory)
            problem = problem_of(one, make)
            if problem is None:
                return one, name, way
            problems.append(problem)
    raise DraftError(name_of(factory), repr(problems[0])) from problems[0]


def name_of(factory: object) -> str:
    """Name a factory for an error."""
    inner = getattr(factory, "func", factory)
    return getattr(inner, "__name__", type(inner).__name__)


def problem_of(factory: Factory, parameters: Maker) -> Exception | None:
    """Build and step an optimizer, and return what is wrong with it, if anything."""
    try:
        trial = build_trial(factory, parameters())
        before = [p.detach().clone() for p in trial.weights()]
        for i in range(12):
            trial.step(i)
            after = trial.weights()
            moved = not all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
            if moved and i >= 2:
                break
    except Exception as error:  # noqa: BLE001  # it may fail in any way
        return error
    if not all(p.isfinite().all() for p in after):
        return ArithmeticError("after some steps a weight is not finite")
    return None if moved else ArithmeticError("twelve steps move no weight")


def problem_of_loading(factory: Factory, parameters: Maker) -> Exception | None:
    """Step an optimizer, save and load its state, step on, and return what is wrong with that."""
    try:
        trial = build_trial(factory, parameters())
        trial.step(0)
        trial.reload()
        trial.step(1)
    except Exception as error:  # noqa: BLE001  # some state cannot be copied
        return error
    return None
