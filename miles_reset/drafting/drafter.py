"""From an optimizer's class to a draft of its schema."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from miles_reset.drafting.deciding import KEPT, depends_on
from miles_reset.drafting.drafted import Decision, Drafted
from miles_reset.drafting.exams import Exam, Progress, exams_for, installed, registry_of, with_rate
from miles_reset.drafting.probing import Spot
from miles_reset.drafting.searching import Answer, Search, casts_of, gather, other_options
from miles_reset.drafting.stepping import (
    SETTINGS,
    WAYS,
    Maker,
    in_bfloat16,
    large,
    name_of,
    problem_of,
    problem_of_loading,
    what_runs,
)
from miles_reset.errors import DraftError
from miles_reset.registry import class_name
from miles_reset.schema import Initial, Kind, Place, Role, Slot, StateSchema
from miles_reset.testing import Factory, Parameters, build_trial


def draft_schema(
    factory: Factory,
    *,
    parameters: Callable[[], Parameters] | None = None,
    variants: Mapping[str, Factory] | None = None,
    disabled: Sequence[str] = (),
    limit: int = 150,
) -> Drafted:
    """Work out what an optimizer remembers, and what a fresh one holds instead.

    The optimizer is built and stepped many times. What is found passes
    :func:`miles_reset.testing.assert_reset_is_fresh` in every variant; where nothing does, the slots in
    question are ``Initial.refused("undecided: ...")``, never a guess.

    Args:
        factory: Builds the optimizer over the parameters that it is handed: its class, a partial of
            that, or a function. As for the law, it may also return a :class:`~miles_reset.testing.Trial`.
        parameters: Makes the parameters. By default matrices, a vector and a scalar; matrices alone where
            the optimizer fails on those.
        variants: Further ways to build it, by title: the options that change what is held.
        disabled: Installed plugins that are not asked about the objects in the state.
        limit: How many schemas are held to the law at most.

    Raises:
        DraftError: The optimizer cannot be built, or not be stepped.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _draft(factory, parameters, dict(variants or {}), disabled, limit)


def _draft(
    factory: Factory,
    parameters: Callable[[], Parameters] | None,
    variants: dict[str, Factory],
    disabled: Sequence[str],
    limit: int,
) -> Drafted:
    choices = {"given": parameters} if parameters else SETTINGS
    first = factory
    factory, setting, way = what_runs(first, choices)
    make = choices[setting]
    _refuse_wrappers(build_trial(factory, make()).optimizer)
    given = {"as given": first, **variants}
    ways = {"as given": factory}
    for title, one in variants.items():
        ways[title] = WAYS[way](one)
        if problem := problem_of(ways[title], make):
            raise DraftError(f"{name_of(one)} ({title})", repr(problem)) from problem
    evidence = {
        title: gather(one, make, other_options(given[title], make(), WAYS[way]))
        for title, one in ways.items()
    }
    base = next(iter(evidence.values())).base
    target = class_name(base.cls)
    notes: list[str] = []
    others = {}
    if setting == "sample" and problem_of(factory, large) is None:
        others["large"] = large
        evidence["large"] = gather(factory, large, None)
    low = in_bfloat16(make)
    runs_low = problem_of(factory, low) is None
    casts = casts_of(factory, low) if runs_low else {}
    exams = with_rate(exams_for(ways, make, others), factory, make, base.group.get("lr"))
    unsaved = next(filter(None, (problem_of_loading(factory, one) for one in (make, *others.values()))), None)
    if unsaved is not None:
        exams = [replace(exam, loads=False) for exam in exams]
        notes.append(
            f"Without a save and load of its state, which fails in any case: {_short(repr(unsaved))}"
        )
    search = Search(target, evidence, exams, installed(disabled), casts, limit)
    answer, progress = search.go()
    if not progress.failure and runs_low:
        exam = Exam("bfloat16", factory, low, {"warmups": (4,)}, unsaved is None)
        if failure := exam.failure(registry_of(search.schemas(answer), search.base)):
            notes.append(f"With bfloat16 parameters it does not hold: {_short(failure)}")
    schemas, decisions = _decisions(search, answer, progress.failure)
    forgetful = [
        title
        for title, one in ways.items()
        if not progress.failure and _forgets(search, answer, one, make, unsaved is None)
    ]
    return Drafted(
        schemas, decisions, progress.failure, tuple(notes), tuple(ways), tuple(forgetful),
        setting, way, unsaved is None, search.tried,
    )  # fmt: skip


def _refuse_wrappers(optimizer: Any) -> None:
    """Refuse what holds another optimizer.

    Raises:
        DraftError: It does.
    """
    for key, value in vars(optimizer).items():
        if isinstance(value, torch.optim.Optimizer):
            name = class_name(type(optimizer))
            rule = f"UnwrapRule({name!r}, {key!r}, ...)"
            raise DraftError(name, f"it is a wrapper, with an optimizer under {key!r}: write {rule}")


def _forgets(search: Search, answer: Answer, factory: Factory, make: Maker, loads: bool) -> bool:
    """Say whether an optimizer remembers nothing."""
    exam = Exam("", factory, make, {"has_history": False, "warmups": (4,), "further": 3}, loads)
    return not exam.failure(registry_of(search.schemas(answer), search.base))


def _decisions(
    search: Search, answer: Answer, failure: str
) -> tuple[tuple[StateSchema, ...], tuple[Decision, ...]]:
    """Return the schemas, with what is in question refused, and what was decided."""
    schemas = search.schemas(answer)
    if failure:
        named = [
            spot for spot in search.suspects(Progress(0, 0, failure)) if search._is_said(spot, answer[spot])
        ]
        blamed = (
            named or [spot for spot in answer if spot.place in (Place.STATE, Place.NAMED)] or list(answer)
        )
        reason = Initial.refused(f"undecided: {_short(failure)}")
        slots = [
            Slot(spot.key, Role.HISTORY, reason, spot.place) if spot in blamed else search.slot(spot, word)
            for spot, word in answer.items()
            if spot in blamed or search._is_said(spot, word)
        ]
        ready = None if slots else Undecided(_short(failure))
        schemas = (StateSchema(search.target, *slots, ready=ready), *schemas[1:])
    slots_by_spot = {Spot(slot.at, slot.key): slot for slot in schemas[0].slots}
    decisions = [
        Decision(slot, _seen(search, spot), _evidence(search, spot, slot))
        for spot, slot in slots_by_spot.items()
    ]
    return schemas, tuple(decisions)


class Undecided:
    """Says of every optimizer that its memory was not found."""

    def __init__(self, why: str) -> None:
        self.why = why

    def __call__(self, optimizer: Any) -> str | None:
        """Return why it cannot be reset."""
        return f"it remembers something in a place that was not found: {self.why}."


def _short(failure: str) -> str:
    return failure.split("Nothing was changed")[0].strip().rstrip(".")[:300]


def _seen(search: Search, spot: Spot) -> str:
    found = [seen for e in search.evidence.values() for seen in e.base.seen.get(spot, {}).values()]
    first = next((seen.first for seen in found if seen.first is not None), None)
    if isinstance(first, torch.Tensor):
        kind = type(first).__name__.replace("Parameter", "Tensor")
        what = f"{kind} {str(first.dtype).removeprefix('torch.')} {tuple(first.shape)}"
    else:
        what = (
            f"{type(first).__name__} {first!r}"[:40]
            if isinstance(first, (int, float, str, type(None)))
            else type(first).__name__
        )
    return f"{what}, {'at start' if found and found[0].built else 'made by a step'}"


def _evidence(search: Search, spot: Spot, slot: Slot) -> str:
    evidence = next(e for e in search.evidence.values() if spot in e.base.seen)
    changed = any(seen.changed for seen in evidence.base.seen[spot].values())
    if slot.initial is KEPT:
        return "never changes" if not changed else "the law holds without it"
    if slot.initial.kind is Kind.REFUSED:
        return "no word that was tried passes the law"
    on = depends_on(evidence, spot)
    how = {
        "gradients": "its first value follows the gradients",
        "weights": "its first value follows the weights",
        "": "its first value is the same whatever the data",
    }[on]
    if slot.initial.kind in (Kind.GROUP, Kind.DEFAULT):
        how = f"its first value follows {slot.initial}"
    return f"{how}; the law holds"
