"""Count which optimizers a reset makes fresh, how, and what the usual ways of resetting do to them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from variants import Case

from miles_reset import default_registry, reset_optimizer_states
from miles_reset.testing import Trial, build_trial, same_bits
from miles_reset.walk import walk

WARMUP, FURTHER = 7, 12
"""Steps before and after. No usual period divides seven; some faults show late."""

GIVEN_UP = {"replaced", "removed", "removed with its entry"}
"""Outcomes of a reset that give a tensor's storage up."""


@dataclass
class Finding:
    """What was found in one case.

    Attributes:
        package: The distribution.
        version: Its version.
        target: The class, by its dotted name.
        variant: The options.
        setting: The name of the setting.
        rules: What the reset did, by key.
        in_place: Whether each tensor kept its storage.
        naive: What each of the usual ways leads to.
        passed: Whether the law held.
    """

    package: str
    version: str
    target: str
    variant: str
    setting: str
    rules: dict[str, str] = field(default_factory=dict)
    in_place: bool = True
    naive: dict[str, str] = field(default_factory=dict)
    passed: bool = False


# The usual ways


def zero_everything(state: Any, groups: list[dict[str, Any]]) -> None:
    """Zero each tensor and number in the state, and the groups' step."""
    for group in groups:
        if "step" in group:
            group["step"] = 0
    _zero(state)


def clear_state(state: Any, groups: list[dict[str, Any]]) -> None:
    """Empty the state."""
    state.clear()


WAYS: Mapping[str, Callable[[Any, list[dict[str, Any]]], None]] = {
    "zero everything": zero_everything,
    "state.clear()": clear_state,
}


def _zero(held: Any) -> None:
    for key, value in list(held.items() if isinstance(held, dict) else enumerate(held)):
        if isinstance(value, torch.Tensor):
            value.zero_()
        elif isinstance(value, (dict, list)):
            _zero(value)
        elif type(value) in (int, float):
            held[key] = 0


# One case


def begin(case: Case) -> Finding:
    """Return what is known of a case before it ran."""
    return Finding(
        case.package,
        metadata.version(case.package),
        f"{case.cls.__module__}.{case.cls.__qualname__}",
        ", ".join(f"{key}={value}" for key, value in case.options.items()),
        case.title,
    )


def look_into(case: Case, found: Finding) -> None:
    """Reset a warm optimizer in our way and in the usual ones, and note what became of it."""
    report = reset_optimizer_states(_warm(case).optimizer)
    for line in report.lines:
        key = line.key if line.at == "state" else f"{line.key} ({line.at})"
        found.rules[key] = line.fresh or line.role
        found.in_place &= line.outcome not in GIVEN_UP or line.at != "state"
    found.naive = {name: _outcome(case, way) for name, way in WAYS.items()}


def _warm(case: Case) -> Trial:
    trial = build_trial(case.build, case.parameters())
    for i in range(WARMUP):
        trial.step(i)
    return trial


def _outcome(case: Case, way: Callable[[Any, list[dict[str, Any]]], None]) -> str:
    subject = _warm(case)
    fresh = build_trial(case.build, case.parameters(), subject)
    try:
        with torch.no_grad():
            for leaf in walk(subject.optimizer, default_registry()).leaves:
                way(leaf.obj.state, leaf.obj.param_groups)
        for i in range(WARMUP, WARMUP + FURTHER):
            subject.step(i)
            fresh.step(i)
            if not all(map(same_bits, subject.weights(), fresh.weights())):
                return f"wrong from step {i + 1 - WARMUP}"
    except Exception as error:  # noqa: BLE001  # whatever a naive way leads to is its outcome
        return f"raises {type(error).__name__}"
    return "right"


# All cases


class Census:
    """Collects what the tests found, on the process that runs or distributes them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.findings: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            for name, value in report.user_properties:
                if name == "census":
                    self.findings.append({**value, "passed": report.passed})

    def pytest_sessionfinish(self) -> None:
        ordered = sorted(self.findings, key=lambda found: [found[key] for key in ORDER])
        self.path.write_text(json.dumps(ordered, indent=1) + "\n")


ORDER = ("package", "target", "variant", "setting")
