"""How learning-rate schedulers come back: what they own in param groups, and what they cannot save."""

from __future__ import annotations

import copy
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from types import SimpleNamespace
from typing import Any

import torch

from miles_reset.errors import CheckpointError, PolicyError

Group = MutableMapping[str, Any]


@dataclass(frozen=True)
class SchedulerRule:
    """What a plugin declares about one class of schedulers.

    Attributes:
        target: The dotted name of the class. The rule holds for subclasses too.
        owns: The entries of param groups that it owns, or a function from the scheduler to them.
            ``momentum`` means the first of ``betas`` in groups that have those instead.
        restore: ``restore(scheduler, state)`` brings it to a saved state; ``load_state_dict`` by default.
        settle: ``settle(scheduler)`` writes what it owns into the groups, from its own state: for where
            no groups were saved.
        rebase: ``rebase(scheduler, rate)`` makes its schedule one that starts from another rate, and writes
            the rate that it would have now; None if ``lr`` cannot be overridden under it.
        settings: Its attributes that may be overridden; it is stepped by nothing after that.
        forgets: ``forgets(scheduler, state)`` returns what the state lacks, and the live one gives.
        override: Whether it takes the place of another plugin's rule for the class.
    """

    target: str
    owns: Sequence[str] | Callable[[Any], Sequence[str]] = ("lr", "initial_lr")
    restore: Callable[[Any, Any], None] | None = None
    settle: Callable[[Any], None] | None = None
    rebase: Callable[[Any, float], None] | None = None
    settings: Sequence[str] = ()
    forgets: Callable[[Any, Any], Sequence[str]] | None = None
    override: bool = False


DEFAULT = SchedulerRule("builtins.object")


def rule_of(scheduler: object, rules: Mapping[str, Any]) -> SchedulerRule:
    """Return the rule of the scheduler's class, or of the nearest base that has one."""
    names = (f"{cls.__module__}.{cls.__qualname__}" for cls in type(scheduler).__mro__)
    found = next((rules[name].record for name in names if name in rules), DEFAULT)
    assert isinstance(found, SchedulerRule)
    return found


@dataclass(frozen=True)
class Schedule:
    """A scheduler, the schedulers inside it, and the groups that they write to.

    Attributes:
        scheduler: The scheduler.
        rules: The claims of scheduler rules, by dotted class name.
    """

    scheduler: Any
    rules: Mapping[str, Any]

    def all(self) -> Iterator[Any]:
        """Yield the scheduler, and those inside it."""
        waiting = [self.scheduler]
        while waiting:
            one = waiting.pop()
            yield one
            waiting += getattr(one, "_schedulers", ())

    def active(self) -> Iterator[Any]:
        """Yield the scheduler, and those inside it whose turn it is."""
        waiting = [self.scheduler]
        while waiting:
            one = waiting.pop()
            yield one
            inner = getattr(one, "_schedulers", ())
            if hasattr(one, "_milestones"):
                inner = [inner[bisect_right(one._milestones, one.last_epoch)]]
            waiting += inner

    @property
    def groups(self) -> list[Group]:
        """The param groups that it writes to."""
        groups: list[Group] = _optimizer_of(self.scheduler).param_groups
        return groups

    @property
    def owns(self) -> tuple[str, ...]:
        """The entries of param groups that it, or one inside it, owns."""
        owned: dict[str, None] = {}
        for one in self.all():
            rule = rule_of(one, self.rules)
            owned.update(dict.fromkeys(rule.owns(one) if callable(rule.owns) else rule.owns))
        return tuple(owned)

    def owned(self, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return copies of what it owns, group by group."""
        return [{key: _get(group, key) for key in self.owns if _has(group, key)} for group in groups]

    def put(self, owned: Sequence[Mapping[str, Any]]) -> None:
        """Write what it owns into its groups."""
        for group, values in zip(self.groups, owned, strict=True):
            for key, value in values.items():
                put(group, key, value)

    def restore(self, state: Any, saved_groups: Sequence[Mapping[str, Any]] | None) -> None:
        """Bring it to a saved state, and the groups to what it owned then.

        Args:
            state: Its saved state. It is copied.
            saved_groups: The param groups that were saved with it, if they were.
        """
        rule = rule_of(self.scheduler, self.rules)
        if saved_groups is not None:
            self.put(self.owned(saved_groups))
        state = copy.deepcopy(state)
        if rule.restore is not None:
            rule.restore(self.scheduler, state)
        else:
            self.scheduler.load_state_dict(state)
        if saved_groups is None:
            for one in reversed(list(self.active())):  # those inside first
                if (settle := rule_of(one, self.rules).settle) is not None:
                    settle(one)

    @property
    def settings(self) -> tuple[str, ...]:
        """Its attributes that may be overridden."""
        return tuple(rule_of(self.scheduler, self.rules).settings)

    @property
    def stepped(self) -> bool:
        """Whether it is further than one that was just built."""
        counts = (getattr(self.scheduler, key, 0) for key in ("last_epoch", "num_steps"))
        return any(isinstance(count, int) and count > 0 for count in counts)

    def rebase(self, rate: float) -> None:
        """Make it a schedule that starts from another rate.

        Raises:
            PolicyError: It takes its rates from settings of its own.
        """
        rebase = rule_of(self.scheduler, self.rules).rebase
        if rebase is None:
            name, other = type(self.scheduler).__name__, ", ".join(self.settings)
            hint = (
                f"override {other}"
                if other
                else 'build it with the rates that you want, and scheduler = "fresh"'
            )
            raise PolicyError("overrides", f"'lr' is not what {name} starts from; {hint}.")
        rebase(self.scheduler, rate)

    def check(self, state: Any, where: str) -> None:
        """Refuse a saved state that is not one of this scheduler's.

        Raises:
            CheckpointError: Keys are missing or unknown, or it is about another number of groups.
        """
        live = self.scheduler.state_dict()
        if rule_of(self.scheduler, self.rules).restore is None:
            _check_keys(live, state, where, type(self.scheduler).__name__)
        elif not isinstance(state, Mapping):
            raise CheckpointError(where, "scheduler", f"is a {type(state).__name__}, not a mapping.")

    def forgotten(self, state: Any, saved_groups: Sequence[Any] | None) -> list[str]:
        """Return what was not saved, and is what the live scheduler or its groups give."""
        found: list[str] = []
        if saved_groups is None and rule_of(self.scheduler, self.rules) is DEFAULT:
            name = type(self.scheduler).__name__
            found.append(f"no plugin has a rule for {name}: the rate is what its load_state_dict leaves")
        for one, saved in _paired(self.scheduler, state):
            rule = rule_of(one, self.rules)
            if rule.forgets is not None:
                found += rule.forgets(one, saved)
        return found

    def rehearsal(self) -> Schedule:
        """Return a copy that writes to copies of the groups: to try on it what may fail."""
        live = _optimizer_of(self.scheduler)
        groups = copies_of(live.param_groups)
        functions = (getattr(one, "lr_lambdas", ()) for one in self.all())
        shared = [owner for each in functions for fn in each if (owner := getattr(fn, "__self__", None))]
        stand_in = SimpleNamespace(param_groups=groups, step=None, defaults=getattr(live, "defaults", {}))
        memo = {id(live): stand_in, **{id(owner): owner for owner in shared}}  # a trainer's method, say
        return Schedule(copy.deepcopy(self.scheduler, memo), self.rules)


def copies_of(groups: Sequence[Mapping[str, Any]]) -> list[Group]:
    """Return copies of param groups, without the parameters."""
    return [
        {key: copy.deepcopy(value) for key, value in group.items() if key != "params"} for group in groups
    ]


def override(values: Mapping[str, Any], groups: Sequence[Group], schedule: Schedule | None) -> None:
    """Write values into the groups that have them, and into the settings of a scheduler.

    ``lr`` is the rate that a schedule starts from, so that it goes on from the rate that it would have now.

    Raises:
        PolicyError: A value is in no group and no setting, or its scheduler would overwrite it.
    """
    settings = schedule.settings if schedule is not None else ()
    held = {key for group in groups for key in group if key not in ("params", "param_names")} | {*settings}
    for key, given in values.items():
        if key not in held:
            near = get_close_matches(key, sorted(held), n=1)
            hint = f"the nearest is {near[0]!r}" if near else f"there are {', '.join(sorted(held)) or 'none'}"
            problem = f"{key!r} is in no param group and no setting of a scheduler; {hint}."
            raise PolicyError("overrides", problem)
        now = [group[key] for group in groups if key in group]
        now += [getattr(schedule.scheduler, key)] if schedule is not None and key in settings else []
        value = _of_kind(key, given, now)
        if key == "lr" and len({float(rate) for rate in _first_rates(groups)}) > 1:
            raise PolicyError("overrides", "'lr' would give one rate to groups that have different ones.")
        if key == "lr" and schedule is not None:
            schedule.rebase(value)
            continue
        if schedule is not None and key not in settings and _is_owned(key, schedule, groups):
            name = type(schedule.scheduler).__name__
            raise PolicyError(
                "overrides",
                f'{key!r} is {name}\'s, which sets it: build it with the value, and scheduler = "fresh".',
            )
        if schedule is not None and key in settings:
            setattr(schedule.scheduler, key, value)
        for group in groups:
            if key in group:
                put(group, key, value)
    if schedule is not None and {*settings} & values.keys():
        schedule.scheduler.step(0)


def _first_rates(groups: Sequence[Group]) -> list[Any]:
    return [group.get("initial_lr", group["lr"]) for group in groups if "lr" in group]


def _is_owned(key: str, schedule: Schedule, groups: Sequence[Group]) -> bool:
    momentum_in_betas = key == "betas" and "momentum" in schedule.owns
    return key in schedule.owns or (momentum_in_betas and not any("momentum" in group for group in groups))


def _of_kind(key: str, given: Any, now: Sequence[Any]) -> Any:
    """Return a value of the kind that is there now.

    Raises:
        PolicyError: It is of another kind.
    """
    value: Any = tuple(given) if isinstance(given, list) else given
    for there in now:
        if isinstance(there, (int, float, torch.Tensor)) and not isinstance(there, bool):
            fits = type(value) in (int, float) and math.isfinite(value) and not (key == "lr" and value < 0)
        elif isinstance(there, tuple):
            fits = isinstance(value, tuple) and len(value) == len(there)
        else:
            fits = there is None or type(value) is type(there)
        if not fits:
            raise PolicyError("overrides", f"{key!r} is {given!r}, and takes the place of {there!r}.")
    return value


def _optimizer_of(scheduler: Any) -> Any:
    inner = getattr(scheduler, "_schedulers", None)
    found = getattr(scheduler, "optimizer", None)
    return found if found is not None or not inner else _optimizer_of(inner[0])


def _paired(scheduler: Any, state: Any) -> Iterator[tuple[Any, Any]]:
    yield scheduler, state
    inner = state.get("_schedulers", ()) if isinstance(state, Mapping) else ()
    for one, saved in zip(getattr(scheduler, "_schedulers", ()), inner, strict=False):
        yield from _paired(one, saved)


_PER_GROUP = ("base_lrs", "_last_lr", "min_lrs", "max_lrs", "lr_lambdas")
_OPTIONAL = ("verbose", "_get_lr_called_within_step", "_is_initial", "_scale_fn_custom", "_scale_fn_ref")
"""What some versions of torch save, and others do not."""


def _check_keys(live: Any, saved: Any, where: str, name: str) -> None:
    if not isinstance(saved, Mapping):
        raise CheckpointError(where, "scheduler", f"is a {type(saved).__name__}, not a mapping.")
    wrong = sorted(str(key) for key in live.keys() ^ saved.keys() if key not in _OPTIONAL)
    if wrong:
        raise CheckpointError(
            where,
            "scheduler",
            f"is not of the live scheduler's class, {name}: they differ in {', '.join(wrong)}.",
        )
    for key in _PER_GROUP:
        one, two = live.get(key), saved.get(key)
        if isinstance(one, list) and (not isinstance(two, list) or len(one) != len(two)):
            count = len(two) if isinstance(two, list) else type(two).__name__
            raise CheckpointError(
                where,
                "scheduler",
                f"is about other param groups: {key} has {count}, the live one {len(one)}.",
            )
    inner, saved_inner = live.get("_schedulers", ()), saved.get("_schedulers", ())
    if len(inner) != len(saved_inner):
        raise CheckpointError(where, "scheduler", f"holds {len(saved_inner)} schedulers, not {len(inner)}.")
    for one, two in zip(inner, saved_inner, strict=True):
        _check_keys(one, two, where, name)


def _has(group: Mapping[str, Any], key: str) -> bool:
    return key in group or (key == "momentum" and "betas" in group)


def _get(group: Mapping[str, Any], key: str) -> Any:
    value = group[key] if key in group else group["betas"][0]
    return value.clone() if isinstance(value, torch.Tensor) else copy.copy(value)


def put(group: Group, key: str, value: Any) -> None:
    """Write one entry of a param group; a tensor there keeps its place."""
    if key == "momentum" and "momentum" not in group and "betas" in group:
        group["betas"] = (value, *group["betas"][1:])
    elif isinstance(group.get(key), torch.Tensor):
        group[key].fill_(value)  # in place: captured graphs and compiled steps hold on to it
    elif isinstance(value, torch.Tensor):
        group[key] = value.item() if isinstance(group.get(key), (int, float)) else value.clone()
    else:
        group[key] = copy.copy(value)
