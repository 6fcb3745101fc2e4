"""Try words, key by key, until the law holds."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from miles_reset.drafting.deciding import (
    KEPT,
    Evidence,
    Word,
    depends_on,
    holds_in,
    objects_in,
    parts_of,
    role_of,
    value_in_all,
    words_for,
)
from miles_reset.drafting.exams import Exam, Progress, registry_of, sit
from miles_reset.drafting.probing import Run, Seen, Spot, plain, run
from miles_reset.drafting.recording import copy_of, same
from miles_reset.registry import Registry, class_name
from miles_reset.schema import Initial, Kind, Place, Slot, StateSchema
from miles_reset.testing import Factory, Parameters, build_trial

Answer = dict[Spot, Word]
_GIVES_UP = (Initial.ABSENT, Initial.ABSENT_ENTRY)
_WITH_DTYPE = (Kind.CONSTANT, Kind.GROUP, Kind.DEFAULT, Kind.IDENTITY)


def gather(factory: Factory, parameters: Callable[[], Parameters], rebuilt: Factory | None) -> Evidence:
    """Run the twins that are compared.

    Args:
        factory: Builds the optimizer.
        parameters: Makes its parameters.
        rebuilt: Builds it with other numbers, if that can be done.
    """
    first = parameters()
    generator = torch.Generator().manual_seed(3)
    others = [
        torch.nn.Parameter(torch.randn(p.shape, generator=generator).to(p.dtype), p.requires_grad)
        for p in first
    ]
    return Evidence(
        run(factory, first),
        run(factory, first, data=1),
        run(factory, others),
        _attempt(lambda: run(factory, first, steps=3, change=_other_numbers)),
        _attempt(lambda: run(rebuilt, first, steps=3)) if rebuilt else None,
    )


def _attempt(go: Callable[[], Run]) -> Run | None:
    try:
        return go()
    except Exception:  # noqa: BLE001  # some numbers do not go together
        return None


def _other_numbers(group: dict[str, Any]) -> None:
    """Change each number of a group by a factor of its own."""
    for i, key in enumerate(sorted(set(group) - {"params"})):
        if isinstance(group[key], float):
            group[key] *= 0.5 + 0.013 * (i + 1)


def other_options(
    factory: Factory, parameters: Sequence[torch.Tensor], around: Callable[[Factory], Factory]
) -> Factory | None:
    """Return what builds an optimizer with other numbers, where it is a class, or a partial of one.

    Args:
        factory: Builds the optimizer.
        parameters: Over these.
        around: What is to be put around a factory so that it can be stepped.
    """
    cls = factory.func if isinstance(factory, partial) else factory
    given = dict(factory.keywords) if isinstance(factory, partial) else {}
    if not isinstance(cls, type):
        return None
    optimizer = build_trial(factory, list(map(torch.nn.Parameter, parameters))).optimizer
    known = {**plain(optimizer.param_groups[0]), **plain(getattr(optimizer, "defaults", {})), **given}
    taken = {key: value for key, value in known.items() if type(value) is float and value}
    changed = dict(given)
    for i, (key, value) in enumerate(sorted(taken.items())):
        one = {**changed, key: value * (0.5 + 0.013 * (i + 1))}
        try:
            build_trial(partial(cls, **one), list(map(torch.nn.Parameter, parameters)))
        except Exception:  # noqa: BLE001  # no option of the constructor, or out of its range
            continue
        changed = one
    return around(partial(cls, **changed)) if changed != given else None


@dataclass
class Search:
    """The words that are possible at each place, and the exams that a choice of them has to pass.

    Attributes:
        target: The class.
        evidence: What was seen, by variant.
        exams: What has to be passed.
        base: Where other classes are looked up.
        casts: The dtype that a key keeps whatever the parameter's, by key.
        limit: How many choices may be tried.
    """

    target: str
    evidence: Mapping[str, Evidence]
    exams: Sequence[Exam]
    base: Registry
    casts: Mapping[str, str] = field(default_factory=dict)
    limit: int = 150
    tried: int = 0

    def __post_init__(self) -> None:
        """Gather the words that are possible."""
        self.options: dict[Spot, list[Word]] = {}
        self.objects: dict[str, list[Any]] = {}
        for evidence in self.evidence.values():
            for spot, found in evidence.base.seen.items():
                if words := words_for(evidence, spot):
                    held = self.options.setdefault(spot, [])
                    held += [word for word in words if word not in held]
                for item in objects_in(seen.first for seen in found.values()):
                    self.objects.setdefault(class_name(type(item)), []).append(item)
        for spot, words in self.options.items():
            met = [evidence for evidence in self.evidence.values() if spot in evidence.base.seen]
            everywhere = [word for word in words if word not in _GIVES_UP and _in_all(word, met, spot)]
            ordered = [*everywhere, *(word for word in words if word not in everywhere)]
            self.options[spot] = [*_with_conditions(spot, ordered, met, bool(everywhere))]

    def schemas(self, answer: Answer) -> tuple[StateSchema, ...]:
        """Return the schema of an answer, and those of the objects in the state."""
        slots = [self.slot(spot, word) for spot, word in answer.items() if self._is_said(spot, word)]
        objects = [_schema_of(name, found) for name, found in self.objects.items()]
        used = any(word == Initial.ZEROS for spot, word in answer.items() if self._holds_objects(spot))
        return (StateSchema(self.target, *slots), *(objects if used else ()))

    def _is_said(self, spot: Spot, word: Word) -> bool:
        return word is not KEPT or spot.place in (Place.STATE, Place.NAMED)

    def _holds_objects(self, spot: Spot) -> bool:
        runs = [evidence.base.seen.get(spot, {}) for evidence in self.evidence.values()]
        return any(True for of in runs for _ in objects_in(seen.first for seen in of.values()))

    def slot(self, spot: Spot, word: Word) -> Slot:
        """Return the slot that says a word at a place."""
        run = next(e.base for e in self.evidence.values() if spot in e.base.seen)
        casts = self.casts if spot.place is Place.STATE else {}
        if word is not None and spot.key in casts and word.kind in _WITH_DTYPE:
            word = word.as_dtype(casts[spot.key])
        return Slot(spot.key, role_of(spot, run, word), word, spot.place)

    def judge(self, answer: Answer) -> Progress:
        """Take the exams with an answer."""
        self.tried += 1
        return sit(self.exams, registry_of(self.schemas(answer), self.base))

    def go(self) -> tuple[Answer, Progress]:
        """Return the best answer, and how far it came."""
        answer: Answer = {spot: words[0] for spot, words in self.options.items()}
        progress = self.judge(answer)
        while progress.failure and self.tried < self.limit:
            for better in self._neighbours(answer, progress):
                further = self.judge(better)
                if further > progress:
                    answer, progress = better, further
                    break
                if self.tried >= self.limit:
                    break
            else:
                break
        return answer, progress

    def _neighbours(self, answer: Answer, progress: Progress) -> Iterator[Answer]:
        """Yield answers that differ in a word: at the suspects first, then elsewhere, then in all."""
        suspects = self.suspects(progress)
        moved = [
            spot for spot in answer if any(self._from_gradients(e, spot) for e in self.evidence.values())
        ]
        likeliest = [spot for spot in suspects if spot in moved]
        for spot in dict.fromkeys([*likeliest, *moved, *suspects, *answer]):
            for word in self.options[spot]:
                if word != answer[spot]:
                    yield {**answer, spot: word}
        made = [spot for spot in answer if spot.place is Place.STATE]
        for spots in ([spot for spot in made if spot in moved], made):
            for word in (Initial.ABSENT, Initial.ABSENT_ENTRY):
                if spots:
                    yield {**answer, **dict.fromkeys(spots, word)}
                    named = [spot for spot in answer if spot.place is Place.NAMED]
                    yield {
                        **answer,
                        **dict.fromkeys([*spots, *named], word),
                        **dict.fromkeys(named, Initial.ABSENT),
                    }

    def _from_gradients(self, evidence: Evidence, spot: Spot) -> bool:
        return spot in evidence.base.seen and depends_on(evidence, spot) == "gradients"

    def suspects(self, progress: Progress) -> list[Spot]:
        """Return the places that a failure names."""
        return [spot for spot in self.options if repr(spot.key) in progress.failure]


def _in_all(word: Word, met: Sequence[Evidence], spot: Spot) -> bool:
    return all(holds_in(word, evidence, spot) for evidence in met)


def _with_conditions(spot: Spot, words: list[Word], met: Sequence[Evidence], settled: bool) -> list[Word]:
    """Add words that hold if an option is true, where the variants that have a key differ in it."""
    uncertain = any(depends_on(evidence, spot) == "gradients" for evidence in met)
    if spot.place is Place.ATTRIBUTE or (settled and not uncertain):
        return words
    groups = [evidence.base.group for evidence in met]
    flags = [key for key in groups[0] if len({_truth(group.get(key)) for group in groups}) > 1]
    at = next((i for i, word in enumerate(words) if word == Initial.ABSENT), len(words))
    plain_ones = [word for word in words[: at + 1] if word is not None][:3]
    pairs = [(a, b) for a in plain_ones for b in plain_ones if a != b]
    either = [Initial.either(flag, a, b) for flag in flags[:4] for a, b in pairs]
    return [*words[:at], *either, *words[at:]]


def _truth(value: Any) -> bool:
    try:
        return bool(value)
    except Exception:  # noqa: BLE001  # a tensor of several elements
        return True


def _schema_of(name: str, found: Sequence[Any]) -> StateSchema:
    """Return the schema of an object in the state, from how it was when it came there."""
    parts: dict[str, list[Any]] = {}
    for item in found:
        for key, value in parts_of(item).items():
            parts.setdefault(key, []).append(value)
    slots = []
    for key, values in parts.items():
        numbers = [value_in_all(value) for value in values]
        word: Word = KEPT
        if numbers[0] is not None and all(number == numbers[0] for number in numbers):
            word = Initial.ZEROS if numbers[0] == 0 else Initial.constant(numbers[0])
        elif all(value is None for value in values):
            word = Initial.NONE
        spot = Spot(Place.ATTRIBUTE, key)
        one = Run({spot: {0: Seen(values[0])}}, {}, {}, object)
        slots.append(Slot(key, role_of(spot, one, word), word, Place.ATTRIBUTE))
    return StateSchema(name, *slots)


def casts_of(factory: Factory, parameters: Callable[[], Parameters]) -> dict[str, str]:
    """Return the dtypes of what ``load_state_dict`` casts: state that is not of the parameters' dtype."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trial = build_trial(factory, parameters())
            trial.step(0)
            before = {key: copy_of(value) for _, key, value in _tensors(trial.optimizer)}
            trial.reload()
            after = {key: value for _, key, value in _tensors(trial.optimizer)}
    except Exception:  # noqa: BLE001  # it knows no such dtype
        return {}
    return {
        key: str(before[key].dtype).removeprefix("torch.")
        for key in before
        if key in after and after[key].dtype != before[key].dtype and before[key].is_floating_point()
    }


def _tensors(optimizer: Any) -> Iterator[tuple[Any, str, torch.Tensor]]:
    for parameter, entry in optimizer.state.items():
        for key, value in entry.items() if isinstance(entry, Mapping) else ():
            items = value if isinstance(value, (list, tuple)) else [value]
            if items and type(items[0]) is torch.Tensor:
                yield parameter, key, items[0]


__all__ = ["Answer", "Search", "casts_of", "gather", "other_options", "same"]
