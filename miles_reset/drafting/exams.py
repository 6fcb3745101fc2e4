"""The law, as a row of exams from quick to thorough, that a draft has to pass."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from miles_reset.discovery import load_registry
from miles_reset.drafting.stepping import Maker
from miles_reset.registry import Claim, Provider, Registry
from miles_reset.schema import StateSchema
from miles_reset.testing import WARMUPS, Factory, assert_reset_is_fresh

_NOTHING_DIFFERS = "Without a reset nothing differs"


@dataclass(frozen=True)
class Exam:
    """One call of the law.

    Attributes:
        title: What is tried, in a few words.
        factory: Builds the optimizer.
        parameters: Makes the parameters.
        law: Further arguments of the law.
        loads: Whether the state can be saved and loaded at all.
    """

    title: str
    factory: Factory
    parameters: Maker
    law: Mapping[str, Any] = field(default_factory=dict)
    loads: bool = True

    def failure(self, registry: Registry) -> str:
        """Return what is wrong, or nothing."""
        law = {
            "warmups": (1, 4),
            "further": 6,
            **({} if self.loads else {"round_trips": (False,)}),
            **self.law,
        }
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert_reset_is_fresh(self.factory, parameters=self.parameters, registry=registry, **law)
        except Exception as error:  # noqa: BLE001  # an optimizer may fail in any way
            if str(error).startswith(_NOTHING_DIFFERS) and "has_history" not in law:
                return replace(self, law={**law, "has_history": False}).failure(registry)
            return str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
        return ""


@dataclass(frozen=True, order=True)
class Progress:
    """How far a draft came: exams passed, and steps that were right in the next one."""

    passed: int
    steps: int = 0
    failure: str = field(default="", compare=False)


def sit(exams: Sequence[Exam], registry: Registry) -> Progress:
    """Take exams in their order until one fails."""
    for i, exam in enumerate(exams):
        if failure := exam.failure(registry):
            step = re.search(r"step (\d+) of", failure)
            # A reset that is carried out is further than one that is refused.
            steps = int(step[1]) + 1 if step else 1 if failure.startswith("after the reset") else 0
            return Progress(i, steps, f"{exam.title}: {failure}")
    return Progress(len(exams))


def exams_for(variants: Mapping[str, Factory], parameters: Maker, others: Mapping[str, Maker]) -> list[Exam]:
    """Return the exams: first all variants quickly, then each thoroughly.

    Args:
        variants: What builds the optimizer, by title.
        parameters: Makes its parameters.
        others: Makes others, for the first variant alone, by title.
    """
    exams = [Exam(title, factory, parameters) for title, factory in variants.items()]
    title, factory = next(iter(variants.items()))
    exams += [Exam(f"{title}, {what}", factory, make) for what, make in others.items()]
    for title, factory in variants.items():
        thorough = {"warmups": WARMUPS, "further": 12}
        exams.append(Exam(title, factory, parameters, thorough))
    return exams


def with_rate(exams: Sequence[Exam], factory: Factory, parameters: Maker, rate: Any) -> list[Exam]:
    """Add an exam with another learning rate than the one that the optimizer was built with."""
    if not isinstance(rate, (int, float)) or isinstance(rate, bool) or not rate:
        return [*exams]
    law = {"hyperparameters": {"lr": 0.5 * rate}}
    return [*exams, Exam("another lr", factory, parameters, law)]


def registry_of(schemas: Sequence[StateSchema], base: Registry) -> Registry:
    """Return a registry in which a draft wins over what is installed."""
    provider = Provider("draft")
    claims = {**base.claims, **{schema.target: Claim(schema, provider) for schema in schemas}}
    return Registry(dict(sorted(claims.items())), (*base.providers, provider), base.tables)


def installed(disabled: Sequence[str] = ()) -> Registry:
    """Return the registry of the installed plugins but for some."""
    return load_registry(disabled=disabled)
