"""Hold many optimizer classes to the law of a reset: each in its variants, each variant in every setting."""

import contextlib
import importlib
import inspect
import pkgutil
import warnings
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, product
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.optim import LBFGS, Optimizer, SparseAdam
from torch.utils import _pytree as pytree

from miles_reset import reset_optimizer_states
from miles_reset.testing import (
    Parameters,
    Trial,
    assert_reset_is_fresh,
    build_trial,
    same_bits,
    sample_parameters,
    trial_of,
)

Options = dict[str, Any]
Refusal = tuple[type[Exception], str]
Build = Callable[[type[Optimizer], Parameters, Options], Trial]


# Parameters


def cast(*dtypes: torch.dtype) -> Callable[[], Parameters]:
    """Return what makes the sample parameters in these dtypes by turns."""

    def parameters() -> Parameters:
        pairs = zip(sample_parameters(), cycle(dtypes))
        return [torch.nn.Parameter(parameter.detach().to(dtype)) for parameter, dtype in pairs]

    return parameters


def as_matrices(parameters: Parameters) -> Parameters:
    """Give a vector a second dimension, and a scalar two."""
    return [torch.nn.Parameter(p.detach().reshape(len(p) if p.ndim else 1, -1)) for p in parameters]


# How to step


def step_with(optimizer: Optimizer, parameters: Parameters) -> Trial:
    """Make a trial that steps with the kind of gradients that the optimizer takes."""
    if isinstance(optimizer, LBFGS):
        return Trial(optimizer, lambda i: optimizer.step(loss_of(parameters, i)), lambda: parameters)
    if isinstance(optimizer, SparseAdam):
        return Trial(optimizer, lambda i: optimizer.step(lookup_in(parameters, i)), lambda: parameters)
    return trial_of(optimizer, parameters)


def loss_of(parameters: Parameters, i: int) -> Callable[[], torch.Tensor]:
    """Return a closure over a loss that is not quadratic, and flat in every fourth step."""
    targets = [draw(parameter, i) for parameter in parameters]

    def closure() -> torch.Tensor:
        far = [(parameter - target).abs() for parameter, target in zip(parameters, targets, strict=True)]
        loss = sum((0.1 * distance**4 + distance**2).sum() for distance in far) * (i % 4 != 3)
        for parameter in parameters:
            parameter.grad = None
        loss.backward()
        return loss

    return closure


def step_with_curvature(optimizer: Optimizer, parameters: Parameters) -> Trial:
    """Make a trial for an optimizer that differentiates the gradients: the Hessian is not diagonal."""

    def step(i: int) -> None:
        far = [parameter - draw(parameter, i) for parameter in parameters]
        loss = sum((0.1 * distance**4 + distance**2).sum() + distance.sum() ** 2 for distance in far)
        for parameter in parameters:
            parameter.grad = None
        grads = torch.autograd.grad(loss, parameters, create_graph=True)
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(i)
            optimizer.step()

    return Trial(optimizer, step, lambda: parameters)


def lookup_in(parameters: Parameters, i: int) -> Callable[[], None]:
    """Return a closure that gives each parameter the sparse gradient of an embedding."""

    def closure() -> None:
        for parameter in parameters:
            parameter.grad = None
            rows = torch.tensor([i, 2 * i, 5]) % len(parameter)
            embedded = torch.nn.functional.embedding(rows, parameter, sparse=True)
            (embedded * draw(embedded, i)).sum().backward()
            assert parameter.grad.is_sparse

    return closure


def draw(like: torch.Tensor, seed: int) -> torch.Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed), dtype=like.dtype)


def step_some(trial: Trial) -> Trial:
    for i in range(3):
        trial.step(i)
    return trial


# How to build


def build(cls: type[Optimizer], parameters: Parameters, options: Options) -> Trial:
    return step_with(cls(parameters, **options), parameters)


def no_gradient(cls: type[Optimizer], parameters: Parameters, options: Options) -> Trial:
    """Leave one parameter without a gradient for ever, and one for the first six steps."""
    optimizer = cls(parameters, **options)
    early, late = (step_with(optimizer, parameters[first:]) for first in (2, 1))
    parameters[0].requires_grad_(False)
    return Trial(optimizer, lambda i: (early if i < 6 else late).step(i), lambda: parameters)


def not_finite(cls: type[Optimizer], parameters: Parameters, options: Options, build: Build = build) -> Trial:
    """Spoil all state after the fourth step, as a gradient that overflows would."""
    inner = build(cls, parameters, options)

    def step(i: int) -> None:
        inner.step(i)
        if i == 3:
            for value in pytree.tree_leaves(list(inner.optimizer.state.values())):
                if isinstance(value, torch.Tensor):
                    value.fill_(torch.nan)

    return Trial(inner.optimizer, step, inner.weights)


def over(base: type[Any], **options: Any) -> Callable[..., Trial]:
    """Return what builds a wrapper over this optimizer."""

    def build_wrapper(cls: type[Any], parameters: Parameters, own: Options) -> Trial:
        return trial_of(cls(base(parameters, **options), **own), parameters)

    return build_wrapper


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Be the only rank of a process group."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# What there is


def optimizers_in(package: ModuleType) -> dict[str, type[Optimizer]]:
    """Return the optimizers that a package, or a module of one, defines, by name."""
    modules = [package]
    for found in pkgutil.walk_packages(getattr(package, "__path__", ()), f"{package.__name__}."):
        with contextlib.suppress(ImportError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some are deprecated, some are for what is not installed here
            modules.append(importlib.import_module(found.name))
    classes = [cls for module in modules for cls in vars(module).values() if isinstance(cls, type)]
    mine = (package.__name__, f"{package.__name__}.")
    return {
        cls.__name__: cls
        for cls in classes
        if issubclass(cls, Optimizer) and (cls.__module__ == mine[0] or cls.__module__.startswith(mine[1]))
    }


# What is held to the law


@dataclass(frozen=True)
class Setting:
    """What can be done with any class.

    Attributes:
        options: Makes what the constructor is given besides the options of the variant.
        parameters: Makes the parameters.
        build: Builds the optimizer over them.
        law: Arguments of the law. By default a case is short: there are many.
        default_dtype: Torch's default dtype.
        once: Whether the first variant of a class is enough.
    """

    options: Callable[[], Options] = dict
    parameters: Callable[[], Parameters] = sample_parameters
    build: Build = build
    law: Mapping[str, Any] = field(default_factory=dict)
    default_dtype: torch.dtype = torch.float32
    once: bool = False

    def fits(self, cls: type[Optimizer]) -> bool:
        """Say whether the constructor takes the options."""
        taken = inspect.signature(cls).parameters
        return "kwargs" in taken or self.options().keys() <= taken.keys()


@dataclass(frozen=True)
class Case:
    """One class in one variant and one setting.

    Attributes:
        cls: The class.
        options: The options of the variant.
        setting: The setting.
        title: The setting's name.
        package: The distribution that the class comes in.
        adapt: Makes parameters ones that the class takes.
        has_history: Whether the variant remembers anything.
    """

    cls: type[Optimizer]
    options: Options
    setting: Setting
    title: str
    package: str
    adapt: Callable[[Parameters], Parameters]
    has_history: bool

    def build(self, parameters: Parameters) -> Trial:
        return self.setting.build(self.cls, parameters, self.options | self.setting.options())

    def parameters(self) -> Parameters:
        return self.adapt(self.setting.parameters())

    def assert_reset_is_fresh(self) -> None:
        law = {"warmups": (4,), "further": 5, "has_history": self.has_history, **self.setting.law}
        with default_dtype(self.setting.default_dtype):
            assert_reset_is_fresh(self.build, parameters=self.parameters, **law)

    def assert_late_gradients_are_fresh(self) -> None:
        """Assert the law, on weights, where the first has no gradient in the two steps after the reset.

        A count that is kept for all is then no longer at the start when its gradient comes.
        """
        with default_dtype(self.setting.default_dtype):
            subject = build_trial(self.build, self.parameters())
            for i in range(4):
                subject.step(i)
            reset_optimizer_states(subject.optimizer)
            twin = build_trial(self.build, self.parameters(), subject)
            for trial in (subject, twin):
                first = trial.weights()[0]
                late = trial.optimizer.register_step_pre_hook(
                    lambda *_, first=first: setattr(first, "grad", None)
                )
                for i in range(4, 9):
                    if i == 6:
                        late.remove()
                    trial.step(i)
            assert all(map(same_bits, subject.weights(), twin.weights()))

    def step_load_and_step(self) -> None:
        with default_dtype(self.setting.default_dtype):
            trial = step_some(self.build(self.parameters()))
            trial.reload()
            trial.step(4)


@dataclass(frozen=True)
class Table:
    """Classes by name, their variants, and the settings of all of them.

    Attributes:
        classes: The classes.
        variants: The options of each class that decide what it keeps, or how it uses that.
        settings: The settings.
        refused: The names of class and setting where upstream fails, and how it does.
        wrong: Those where upstream runs, and computes what no law can hold of.
        adapt: Makes parameters ones that a class takes, given its name.
        has_history: Whether a variant remembers anything, given name and options.
        package: The distribution that the classes come in, as its index spells it.
        sample: One case in how many is run where it is not a census: the first of each class always is.
    """

    classes: Mapping[str, type[Optimizer]]
    variants: Mapping[str, Sequence[Options]]
    settings: Mapping[str, Setting]
    refused: Mapping[tuple[str, str], Refusal]
    wrong: Collection[tuple[str, str]] = ()
    adapt: Callable[[str, Parameters], Parameters] = lambda name, parameters: parameters
    has_history: Callable[[str, Options], bool] = lambda name, options: True
    package: str = "torch"
    sample: int = 1

    def cases(self) -> list[Any]:
        """List what is held to the law."""
        wrong = pytest.mark.skip(reason="upstream runs it, and computes it wrong")
        held, seen = [], set()
        for title, key, case in self._cases():
            if key in self.refused:
                continue
            marks = [wrong] if key in self.wrong else []
            if case.cls in seen and zlib.crc32(title.encode()) % self.sample:
                marks.append(pytest.mark.census)
            seen.add(case.cls)
            held.append(pytest.param(case, id=title, marks=marks))
        return held

    def first_cases(self) -> list[Any]:
        """List the first case of each class."""
        first: dict[str, Any] = {}
        for title, (name, _), case in self._cases():
            first.setdefault(name, pytest.param(case, id=title))
        return list(first.values())

    def refusals(self) -> list[Any]:
        """List what upstream cannot step, each with its error and a pattern of the message."""
        return [
            pytest.param(case, *self.refused[key], id=title)
            for title, key, case in self._cases()
            if key in self.refused
        ]

    def _cases(self) -> Iterator[tuple[str, tuple[str, str], Case]]:
        for name, cls in self.classes.items():
            variants = self.variants.get(name, [])
            for options, (title, setting) in product(variants, self.settings.items()):
                if setting.fits(cls) and not (setting.once and options is not variants[0]):
                    words = [name, *(f"{key}={_said(value)}" for key, value in options.items()), title]
                    remembers = self.has_history(name, options)
                    adapt = partial(self.adapt, name)
                    case = Case(cls, options, setting, title, self.package, adapt, remembers)
                    yield "-".join(words), (name, title), case


def _said(value: object) -> str:
    """Name a function, whose representation has an address that each process has otherwise."""
    return getattr(value, "__name__", None) or str(value)
