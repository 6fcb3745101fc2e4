"""From what was seen at one place to the words that could be true of it, the likeliest first."""

from __future__ import annotations

import ast
import random
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import torch

from miles_reset.drafting.probing import Run, Seen, Spot
from miles_reset.drafting.recording import Opaque, inside, same
from miles_reset.schema import Initial, Kind, Place, Role

KEPT = None
"""Stands for no word: the slot is kept."""

Word = Initial | None


@dataclass(frozen=True)
class Formula:
    """A computed value that can be written down.

    Attributes:
        name: What to call the function.
        expression: What it returns, from ``parameter``, ``group`` and ``optimizer``.
    """

    name: str
    expression: str

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, parameter: Any, group: Any, optimizer: Any) -> Any:
        """Work the value out."""
        names = {"parameter": parameter, "group": group, "optimizer": optimizer}
        return eval(self.expression, names)  # of this module's own expressions


@dataclass(frozen=True)
class Evidence:
    """The runs that are compared, of one way to build an optimizer.

    Attributes:
        base: The first.
        again: With other gradients and other random numbers, over the same weights.
        weights: Over other weights.
        groups: With other numbers in the groups; None where that fails.
        options: With other numbers given to the constructor; None where that fails or cannot be done.
    """

    base: Run
    again: Run
    weights: Run
    groups: Run | None = None
    options: Run | None = None


def _first(run: Run | None, spot: Spot) -> list[Any]:
    return [seen.first for seen in run.seen.get(spot, {}).values()] if run else []


def depends_on(evidence: Evidence, spot: Spot) -> str:
    """Say on what the first value depends: the gradients, the weights, or nothing of these."""
    base = _first(evidence.base, spot)
    if not same(base, _first(evidence.again, spot)):
        return "gradients"
    return "" if same(base, _first(evidence.weights, spot)) else "weights"


def words_for(evidence: Evidence, spot: Spot) -> list[Word]:
    """Return the words that fit what was seen, the likeliest first, and then those worth a try."""
    found = list(evidence.base.seen[spot].values())
    changed = any(seen.changed for seen in found)
    built = all(seen.built for seen in found)
    fitting = list(dict.fromkeys(_fitting(evidence, spot, found)))
    if spot.place in (Place.GROUP, Place.ATTRIBUTE):
        if not changed and built:
            return []
        if built:
            return [*(fitting or [KEPT])]
        return [Initial.ABSENT] if depends_on(evidence, spot) else [*fitting, Initial.ABSENT]
    absent = [Initial.ABSENT] if spot.place is Place.NAMED else [Initial.ABSENT, Initial.ABSENT_ENTRY]
    if not changed and depends_on(evidence, spot) == "" and Initial.ZEROS not in fitting:
        is_table = not all(
            isinstance(item, float) or _is_float(item) for seen in found for item in inside(seen.first)
        )
        return [*([KEPT] if is_table else []), *fitting, *([] if is_table else [KEPT]), *absent]
    if depends_on(evidence, spot) == "gradients":
        can_be_zero = all(
            isinstance(item, (torch.Tensor, int, float)) for seen in found for item in inside(seen.last)
        )
        return [*([Initial.ZEROS] if can_be_zero else []), *absent, *fitting]
    zero = [] if built or not fitting else [Initial.ZEROS]
    return list(dict.fromkeys([*fitting, *zero, *absent]))


def _fitting(evidence: Evidence, spot: Spot, found: Sequence[Seen]) -> Iterator[Word]:
    firsts = [seen.first for seen in found]
    kinds = {type(first) for first in firsts}
    if kinds == {type(None)}:
        yield Initial.NONE
        return
    if all(isinstance(first, (list, dict, set, deque)) and not first for first in firsts):
        yield Initial.EMPTY
        return
    if all(isinstance(first, (torch.Generator, random.Random)) for first in firsts):
        seeds = [_seed(first) for first in firsts]
        if len(set(seeds)) == 1 and seeds[0] is not None:
            yield Initial.seeded(seeds[0])
        return
    if any(_has_parts(item) for first in firsts for item in inside(first)):
        yield Initial.ZEROS  # by a schema of its own
        return
    if all(_is_data(first) for first in firsts):
        yield from _fits_items(evidence, spot, found)
    if spot.place is not Place.STATE and len(firsts) == 1 and not _is_number(firsts[0]):
        yield from _literal(spot, firsts[0])


def holds_in(word: Word, evidence: Evidence, spot: Spot) -> bool:
    """Say whether a word that was found elsewhere is also true of what was seen here."""
    if word is KEPT or word.kind not in (Kind.GROUP, Kind.DEFAULT, Kind.CONSTANT, Kind.COMPUTED):
        return word in words_for(evidence, spot)
    for seen in evidence.base.seen[spot].values():
        if word.kind is Kind.COMPUTED:
            if word not in words_for(evidence, spot):
                return False
            continue
        held = seen.group or evidence.base.group
        held = evidence.base.defaults if word.kind is Kind.DEFAULT else held
        value = word.value if word.kind is Kind.CONSTANT else held.get(word.value)
        for item in inside(seen.first):
            if value is None or not _is_number(value) or value_in_all(item) != _as_held(value, item):
                return False
    return True


def _fits_items(evidence: Evidence, spot: Spot, found: Sequence[Seen]) -> Iterator[Word]:
    per_value = [
        list(chain(_numbers(item, evidence, spot, seen), _copies(item, seen)))
        for seen in found
        if seen.first is not None
        for item in inside(seen.first)
    ]
    if per_value:
        yield from (word for word in per_value[0] if all(word in words for words in per_value[1:]))


def _numbers(item: Any, evidence: Evidence, spot: Spot, seen: Seen) -> Iterator[Word]:
    """Yield the words for one number in all elements, or on the diagonal."""
    constant, scale = value_in_all(item), _on_diagonal(item)
    if constant is not None:
        if constant not in (0, 1) or spot.place is Place.GROUP:
            yield from _tracked(constant, evidence, spot, seen, item)
        yield (
            Initial.ZEROS if constant == 0 else Initial.ONES if constant == 1 else Initial.constant(constant)
        )
    if scale is not None:
        names = [
            word.value
            for word in _tracked(scale, evidence, spot, seen, item)
            if word and word.kind is Kind.GROUP
        ]
        yield from (Initial.identity(name) for name in names)
        yield Initial.identity(scale if scale != 1 else 1.0)


def _tracked(number: float, evidence: Evidence, spot: Spot, seen: Seen, item: Any) -> Iterator[Word]:
    """Yield the group entries and the constructor's defaults that a number follows when they change."""
    group = seen.group or evidence.base.group
    for kind, run, held, word in (
        (Kind.GROUP, evidence.groups, group, Initial.group),
        (Kind.DEFAULT, evidence.options, evidence.base.defaults, Initial.default),
        (Kind.GROUP, evidence.options, group, Initial.group),
    ):
        if run is None or not run.seen.get(spot):
            continue
        now = run.group if kind is Kind.GROUP else run.defaults
        firsts = [
            one
            for one in map(value_in_all, chain.from_iterable(map(inside, _first(run, spot))))
            if one is not None
        ]
        diagonals = [
            one
            for one in map(_on_diagonal, chain.from_iterable(map(inside, _first(run, spot))))
            if one is not None
        ]
        for key, value in held.items():
            if key == spot.key and spot.place is Place.GROUP and kind is Kind.GROUP:
                continue
            if (
                not _is_number(value)
                or not _is_number(now.get(key))
                or isinstance(value, bool)
                or value == now[key]
            ):
                continue
            if _as_held(value, item) == number and _as_held(now[key], item) in (firsts or diagonals):
                yield word(key)


def _as_held(value: float, item: Any) -> float:
    if isinstance(item, torch.Tensor) and item.is_floating_point():
        return float(torch.full((), value, dtype=item.dtype))
    return float(value)


def _copies(item: Any, seen: Seen) -> Iterator[Word]:
    weight = seen.weight
    if weight is None or type(item) is not torch.Tensor or item.numel() == 0:
        return
    if item.shape == weight.shape and same(item, weight.to(item.dtype)):
        yield Initial.COPY
    steps = [key for key, value in seen.group.items() if type(value) is int and value > 0]
    formulas = [
        Formula("_norm", "parameter.detach().norm()"),
        Formula("_flat", "parameter.detach().flatten()"),
        *(Formula("_slice", f"parameter.detach().flatten()[:: group[{key!r}]]") for key in steps),
        Formula("_largest", "parameter.detach().abs().max()"),
        Formula("_root_mean_square", "parameter.detach().square().mean().sqrt()"),
    ]
    for formula in formulas:
        try:
            made = formula(weight, seen.group, None)
        except Exception:  # noqa: BLE001  # it does not fit, then
            continue
        if same(made, item):
            yield Initial.computed(formula)


def _literal(spot: Spot, value: Any) -> Iterator[Word]:
    """Yield a value that can be written down as it is."""
    try:
        if ast.literal_eval(repr(value)) == value:
            name = "_fresh_" + re.sub(r"\W", "_", spot.key).lower().strip("_")
            yield Initial.computed(Formula(name, repr(value)))
    except (ValueError, SyntaxError, TypeError, MemoryError):
        return


def _seed(generator: Any) -> int | None:
    if isinstance(generator, torch.Generator):
        seed = generator.initial_seed()
        twin = torch.Generator(generator.device).manual_seed(seed)
        return seed if torch.equal(twin.get_state(), generator.get_state()) else None
    usual = (
        seed
        for seed in (42, *range(3000), 12345, 31337)
        if random.Random(seed).getstate() == generator.getstate()
    )
    return next(usual, None)


def value_in_all(item: Any) -> float | None:
    """Return the number that a value is, or holds in each element."""
    if _is_number(item):
        return item if type(item) is int else float(item)
    if type(item) is not torch.Tensor or not item.numel() or item.is_complex():
        return None
    one = item.flatten()[0]
    return one.item() if bool((item == one).all()) else None


def _on_diagonal(item: Any) -> float | None:
    """Return the number on the diagonal of an otherwise empty matrix, or throughout a vector."""
    if type(item) is not torch.Tensor or item.ndim > 2 or not item.is_floating_point() or not item.numel():
        return None
    if item.ndim < 2:
        return value_in_all(item) or None
    scale = item[0, 0].item()
    return scale if scale and same(item, torch.zeros_like(item).fill_diagonal_(scale)) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float))


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _is_data(value: Any) -> bool:
    return all(item is None or _is_number(item) or type(item) is torch.Tensor for item in inside(value))


def _has_parts(value: Any) -> bool:
    """Say whether a value is an object, or a tensor made of tensors, that needs a schema of its own."""
    if hasattr(type(value), "__tensor_flatten__"):
        return True
    plain = isinstance(
        value,
        (torch.Tensor, Mapping, torch.Generator, random.Random, type, Opaque, str, set, torch.nn.Module),
    )
    return hasattr(value, "__dict__") and not plain and not callable(value)


def parts_of(value: Any) -> dict[str, Any]:
    """Return what such a value is made of."""
    if hasattr(type(value), "__tensor_flatten__"):
        return {name: getattr(value, name) for name in value.__tensor_flatten__()[0]}
    return dict(vars(value))


def objects_in(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the values that need schemas of their own."""
    return (item for value in values for item in inside(value) if _has_parts(item))


def role_of(spot: Spot, run: Run, word: Word) -> Role:
    """Guess from the key, and from how its value goes on, what a slot is for."""
    seen = list(run.seen[spot].values()) if spot in run.seen else []
    if word is KEPT:
        return Role.KEPT
    trails = [one.trail for one in seen if len(one.trail) > 1]
    if trails and all(b - a == 1 for trail in trails for a, b in pairwise(trail)):
        return Role.CLOCK
    key = spot.key.lower()
    if re.search(r"(^|_)(steps?|count(er)?|iter)(_|$)", key) and trails:
        return Role.CLOCK
    if word.kind in (Kind.COPY, Kind.COMPUTED):
        return Role.HISTORY
    if re.search(r"sq|var|second|square|(^|_)v(_|$)|sum$|state2|row|col|inf", key) and not re.search(
        "weight|grad", key
    ):
        return Role.VARIANCE
    if re.search(r"exp_avg$|momentum|(^|_)m(_|$)|first|mean|state1|(^|_)mu?(_|$)", key):
        return Role.MOMENTUM
    return Role.HISTORY
