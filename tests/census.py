"""Count which optimizers a reset makes fresh, how, and what the usual ways of resetting do to them.

``pytest --census FILE`` runs all variants of all classes and writes what it found, class by class.
As a script::

    python tests/census.py page FILE             print it as a page
    python tests/census.py compare OLD NEW       name the classes and keys that are new, gone or changed
"""

from __future__ import annotations

import importlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import torch

from miles_reset import UnwrapRule, default_registry, reset_optimizer_states
from miles_reset.lines import place
from miles_reset.schema import Place
from miles_reset.testing import Trial, build_trial, same_bits
from miles_reset.walk import walk

if TYPE_CHECKING:
    from variants import Case

WARMUP, FURTHER = 7, 12
"""Steps before and after. No usual period divides seven; some faults show late."""

GIVEN_UP = {"replaced", "removed", "removed with its entry"}
"""Outcomes of a reset that give a tensor's storage up."""

SHOWN = 6
"""More keys of one rule than this are counted, not named."""


# One case


@dataclass
class Finding:
    """What was found in one case.

    Attributes:
        package: The distribution.
        version: Its version.
        target: The class, by its dotted name.
        rules: What a fresh optimizer holds, by key.
        in_place: Whether each tensor kept its storage.
        naive: What each of the usual ways leads to.
    """

    package: str
    version: str
    target: str
    rules: dict[str, str] = field(default_factory=dict)
    in_place: bool = True
    naive: dict[str, str] = field(default_factory=dict)


def begin(case: Case) -> Finding:
    """Return what is known of a case before it ran."""
    target = f"{case.cls.__module__}.{case.cls.__qualname__}"
    return Finding(case.package, metadata.version(case.package), target)


def look_into(case: Case, found: Finding) -> None:
    """Reset a warm optimizer in our way and in the usual ones, and note what became of it."""
    for row in reset_optimizer_states(_warm(case).optimizer).rows:
        slot = row.slot
        found.rules[place(slot)] = str(slot.initial or slot.role)
        found.in_place &= row.outcome not in GIVEN_UP or slot.at is not Place.STATE
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
                return "wrong"
    except Exception:  # noqa: BLE001  # whatever a naive way leads to is its outcome
        return "raises"
    return "right"


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


# All cases


class Census:
    """Collects what the tests found, on the process that runs or distributes them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.classes: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add one case to its class."""
        found = dict(report.user_properties).get("census") if report.when == "call" else None
        if found is None:
            return
        of_class = self.classes.setdefault(
            found["target"],
            {"package": found["package"], "version": found["version"], "variants": 0, "passed": 0}
            | {"in_place": 0, "rules": {}, "naive": {name: {} for name in WAYS}, "failed": []},
        )
        of_class["variants"] += 1
        of_class["passed"] += report.passed
        of_class["in_place"] += report.passed and found["in_place"]
        of_class["rules"].update(found["rules"])
        for name, outcome in found["naive"].items():
            counts = of_class["naive"][name]
            counts[outcome] = counts.get(outcome, 0) + 1
        if not report.passed:
            of_class["failed"].append(f"{report.nodeid}: {str(report.longrepr).splitlines()[-1]}")

    def pytest_sessionfinish(self) -> None:
        """Write what was found."""
        said = partial(json.dumps, sort_keys=True)  # cases come in any order
        lines = [f"{said(name)}: {said(found)}" for name, found in sorted(self.classes.items())]
        self.path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


# The page

HEAD = """# Supported optimizers

What `make census` found; nothing here is written by hand. Each class is stepped in the variants that change
its state, reset, and compared with a freshly built one over the same weights, bit for bit, state included,
with and without a save and load. *In place* is the number of variants in which every tensor of the state
kept its storage; in the others a fresh optimizer holds something that cannot be written into what is there.
The last two columns are what usual ways of resetting do in the same variants over 12 steps: setting every
tensor and count in the state to zero, and emptying the state. *Wrong* is without an error.
"""
ALL = ["package", "classes", "variants", "fresh after a reset", "in place", *WAYS]
EACH = ["class", "variants", "fresh", "in place", "what a fresh one holds", *WAYS]


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def page(classes: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    """Yield the page, line by line."""
    yield from tables(classes)
    yield from _wrappers()
    yield from _left_out()


def tables(classes: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    """Yield the tables of classes."""
    yield HEAD
    packages: dict[str, dict[str, dict[str, Any]]] = {}
    for target, found in classes.items():
        packages.setdefault(f"{found['package']} {found['version']}", {})[target] = found
    yield _row(*ALL)
    yield _row(*["---"] * len(ALL))
    for package, members in packages.items():
        yield _summary(f"[{package}](#{_anchor(package)})", members.values())
    yield _summary("**all**", classes.values())
    for package, members in packages.items():
        yield f"\n## {package}\n"
        yield _row(*EACH)
        yield _row(*["---"] * len(EACH))
        for target, found in members.items():
            numbers = [found[key] for key in ("variants", "passed", "in_place")]
            naive = [_counts(found["naive"][name]) for name in WAYS]
            yield _row(f"`{target}`", *numbers, _rules(found["rules"]), *naive)


def _summary(title: str, members: Iterable[dict[str, Any]]) -> str:
    members = list(members)
    variants, passed, in_place = (
        sum(one[key] for one in members) for key in ("variants", "passed", "in_place")
    )
    naive = []
    for name in WAYS:
        total: Counter[str] = Counter()
        for one in members:
            total.update(one["naive"][name])
        naive.append(_counts(total))
    return _row(title, len(members), variants, passed, in_place, *naive)


def _counts(counts: Mapping[str, int]) -> str:
    said = [f"{counts[word]} {word}" for word in ("right", "wrong", "raises") if counts.get(word)]
    return ", ".join(said)


def _rules(rules: Mapping[str, str]) -> str:
    by_value: dict[str, list[str]] = {}
    for key, value in rules.items():
        by_value.setdefault(value, []).append(f"`{key}`")
    said = []
    for value, keys in by_value.items():
        named = ", ".join(keys[:SHOWN]) + (f" and {len(keys) - SHOWN} more" if len(keys) > SHOWN else "")
        said.append(f"{named}: {value}".replace("|", "/"))
    return "; ".join(said) or "nothing"


def _anchor(title: str) -> str:
    return "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c in "-_")


def _wrappers() -> Iterator[str]:
    yield "\n## Wrappers\n"
    yield "Each is held to the same law through the real one where its library is installed, or as it says.\n"
    yield "| wrapper | plugin | what it owns itself | tested |"
    yield "|---|---|---|---|"
    from_source = _collected("FROM_SOURCE")
    for target, claim in sorted(default_registry().claims.items()):
        if isinstance(claim.record, UnwrapRule):
            own = {slot.key: str(slot.initial or slot.role) for slot in claim.record.slots}
            how = from_source.get(target, "through the real one")
            yield f"| `{target}` | {claim.provider.plugin} | {_rules(own)} | {how} |"


def _left_out() -> Iterator[str]:
    yield "\n## Left out\n"
    yield "| class | why |"
    yield "|---|---|"
    of_classes = {
        target: why
        for target, why in _collected("FROM_SOURCE").items()
        if target in default_registry().claims
        and not isinstance(default_registry().claims[target].record, UnwrapRule)
    }
    for name, why in sorted({**_collected("LEFT_OUT", True), **of_classes}.items()):
        if not why.startswith("a wrapper"):
            yield _row(f"`{name}`", why)


def _collected(name: str, prefixed: bool = False) -> dict[str, str]:
    """Return what the test modules of the plugins say under a name."""
    said: dict[str, str] = {}
    for module in _test_modules():
        prefix = f"{module.__name__.removeprefix('test_')}: " if prefixed else ""
        said |= {f"{prefix}{key}": value for key, value in getattr(module, name, {}).items()}
    return said


@cache
def _test_modules() -> list[ModuleType]:
    """Import the test modules of the plugins whose libraries are installed."""
    found: list[ModuleType] = []
    folder = Path(__file__).parent
    sys.path[:0] = [str(folder), str(folder / "plugins")]
    for path in sorted(folder.glob("plugins/test_*.py")):
        try:
            found.append(importlib.import_module(path.stem))
        except pytest.skip.Exception as skipped:
            print(f"{path.name}: {skipped}", file=sys.stderr)
    return found


# Drift


def compare(old: Mapping[str, dict[str, Any]], new: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    """Yield what is new, gone or changed, a line each."""
    versions = [{one["package"]: one["version"] for one in found.values()} for found in (old, new)]
    for package in sorted(versions[0].keys() | versions[1].keys()):
        was, now = (held.get(package, "none") for held in versions)
        if was != now:
            yield f"{package}: {was} -> {now}"
    for target in sorted(old.keys() | new.keys()):
        if target not in new or target not in old:
            yield f"{target}: {'gone' if target not in new else 'new'}"
            continue
        was, now = old[target]["rules"], new[target]["rules"]
        for key in sorted(was.keys() | now.keys()):
            if was.get(key) != now.get(key):
                yield f"{target}: {key!r} is {now.get(key, 'gone')}, and was {was.get(key, 'not there')}"
        yield from (f"{target}: {line}" for line in new[target]["failed"])


def main(command: str, *paths: str) -> int:
    """Print a page, or what changed; return 1 if something did."""
    found = [json.loads(Path(path).read_text()) for path in paths]
    lines = list(page(*found) if command == "page" else compare(*found))
    print("\n".join(lines))
    return int(command == "compare" and bool(lines))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
