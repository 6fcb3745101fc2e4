"""How an optimizer can be built and stepped: over which parameters, with a closure or without."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

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

        def step(i: int) -> None:
            generator = torch.Generator().manual_seed(1000 + i)
            targets = [torch.randn(p.shape, generator=generator).to(p.dtype) for p in parameters]

            def closure() -> torch.Tensor:
                with torch.enable_grad():
                    far = [p - target for p, target in zip(parameters, targets, strict=True)]
                    loss = torch.stack([(0.1 * d**4 + d**2).sum() for d in far]).sum()
                    for p in parameters:
                        p.grad = None
                    loss.backward()  # type: ignore[no-untyped-call]  # as torch has it
                return loss

            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(i)
                optimizer.step(closure)

        return Trial(optimizer, step, lambda: parameters)


def what_runs(factory: Factory, choices: Mapping[str, Maker]) -> tuple[Factory, str]:
    """Return a factory whose optimizer can be stepped, and the name of its parameters.

    Raises:
        DraftError: There is none.
    """
    problems: list[Exception] = []
    for name, make in choices.items():
        for one in (factory, WithClosure(factory)):
            problem = problem_of(one, make)
            if problem is None:
                return one, name
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
        for i in range(3):
            trial.step(i)
        after = trial.weights()
    except Exception as error:  # noqa: BLE001  # it may fail in any way
        return error
    if not all(p.isfinite().all() for p in after):
        return ArithmeticError("after three steps a weight is not finite")
    if all(torch.equal(a, b) for a, b in zip(before, after, strict=True)):
        return ArithmeticError("three steps move no weight")
    return None
