"""Whether a saved optimizer fits the live one, and the saved state in the live one's order."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from miles_reset.checkpoint.saved import check_sizes
from miles_reset.errors import CheckpointError

Groups = Sequence[Mapping[str, Any]]


def saved_groups(content: Any) -> list[Mapping[str, Any]]:
    """Return all param groups in a saved optimizer, whatever wrapped it when it was saved."""
    found: list[Mapping[str, Any]] = []
    waiting, met = [content], set()
    while waiting:
        item = waiting.pop()
        if not isinstance(item, (Mapping, list, tuple)) or id(item) in met:
            continue
        met.add(id(item))
        groups = item.get("param_groups") if isinstance(item, Mapping) else None
        if isinstance(groups, list) and all(isinstance(group, Mapping) for group in groups):
            found += groups
        elif isinstance(item, Mapping):
            waiting += [value for key, value in item.items() if key != "state"][::-1]
        else:
            waiting += [*item][::-1]
    return found


def is_plain(optimizer: object) -> bool:
    """Say whether an optimizer is torch's own kind, which keeps its state and groups itself."""
    load = getattr(type(optimizer), "load_state_dict", None)
    return isinstance(optimizer, torch.optim.Optimizer) and load is torch.optim.Optimizer.load_state_dict


class Fitted(NamedTuple):
    """A saved optimizer in the order of the live parameters.

    Attributes:
        content: ``state`` and ``param_groups``.
        cast: The entries that take the dtype that they would have in a fresh optimizer.
        notes: What had to be filled in, or cast.
    """

    content: dict[str, Any]
    cast: frozenset[tuple[Any, str]]
    notes: list[str]


def fitted(optimizer: torch.optim.Optimizer, saved: Any, where: str, names: Mapping[int, str]) -> Fitted:
    """Bring a saved state into the order of the live parameters.

    Parameters are matched by name where both sides have names, else by position.

    Args:
        optimizer: The live optimizer.
        saved: Its saved state.
        where: What to call it in an error.
        names: The names of parameters, by id, for where the live groups have none.

    Raises:
        CheckpointError: Groups, names, shapes or keys do not fit.
    """
    if not isinstance(saved, Mapping) or not {"state", "param_groups"} <= saved.keys():
        raise _misfit(where, "is no optimizer's state: it lacks 'state' or 'param_groups'.")
    state, groups = saved["state"], saved["param_groups"]
    if not isinstance(state, Mapping) or not isinstance(groups, list):
        raise _misfit(where, "is no optimizer's state: 'state' or 'param_groups' is no such.")
    check_sizes(saved, where, "optimizer")
    matched = match(groups, optimizer.param_groups, names, where)
    notes: list[str] = []
    ordered: list[dict[str, Any]] = []
    entries: dict[Any, Any] = {}
    for i, (group, own, ids) in enumerate(zip(groups, optimizer.param_groups, matched, strict=True)):
        used = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        lacking = {key: copy.deepcopy(value) for key, value in own.items() if key not in group}
        lacking = {key: value for key, value in lacking.items() if key not in ("params", "param_names")}
        if lacking:
            notes.append(f"group {i} lacks {', '.join(lacking)}: the live values stay")
        own_names = {"param_names": own["param_names"]} if "param_names" in own else {}
        ordered.append({**used, **lacking, **own_names, "params": ids})
        entries |= dict(zip(ids, own["params"], strict=True))
    if sum(map(len, matched)) != len(entries):
        raise _misfit(where, "lists a parameter twice.")
    if unknown := [key for key, entry in state.items() if isinstance(entry, Mapping) and key not in entries]:
        raise _misfit(where, f"has state of parameters that no group lists: {unknown[:5]}.")
    cast: set[tuple[Any, str]] = set()
    for i, group in enumerate(ordered):
        for key in group["params"]:
            if key in state:
                example = optimizer.state.get(entries[key]) or _example(optimizer, group, entries[key])
                cast |= _check_entry(state[key], example, f"parameter {key} of group {i}", key, where)
    if without := [key for key in entries if key not in state]:
        notes.append(f"no state was saved of {len(without)} of {len(entries)} parameters")
    notes += [f"{slot} is cast to the dtype of a fresh one" for slot in sorted({slot for _, slot in cast})]
    return Fitted({"state": state, "param_groups": ordered}, frozenset(cast), notes)


def match(groups: Any, live: Groups, names: Mapping[int, str], where: str) -> list[list[Any]]:
    """Return, for each live group, the saved ids of its parameters in their order.

    Raises:
        CheckpointError: The groups are not about the same parameters, as far as can be told.
    """
    if len(groups) != len(live):
        raise _misfit(where, f"has {len(groups)} param groups, the live one {len(live)}.")
    pairs = enumerate(zip(groups, live, strict=True))
    return [_matched(group, own, names, i, where) for i, (group, own) in pairs]


def _matched(group: Any, own: Mapping[str, Any], known: Mapping[int, str], i: int, where: str) -> list[Any]:
    ids = group.get("params") if isinstance(group, Mapping) else None
    if not isinstance(ids, list) or not all(isinstance(one, (int, str)) for one in ids):
        raise _misfit(where, f"has no list of params in group {i}.")
    names = group.get("param_names") or (ids if ids and all(isinstance(one, str) for one in ids) else None)
    if names is not None and (not isinstance(names, (list, tuple)) or len(names) != len(ids)):
        raise _misfit(where, f"has names for another number of parameters in group {i}.")
    live = own.get("param_names") or [known.get(id(parameter)) for parameter in own["params"]]
    if names and all(live):
        by_name = dict(zip(names, ids, strict=True))
        missing, extra = [n for n in live if n not in by_name], [n for n in names if n not in set(live)]
        if missing or extra:
            lists = f"missing are {missing or 'none'}, too many are {extra or 'none'}."
            raise _misfit(where, f"does not fit group {i}: {lists}")
        return [by_name[name] for name in live]
    if len(ids) != len(own["params"]):
        named = f" Saved: {names}." if names else f" Live: {live}." if all(live) else " Names were not saved."
        problem = f"has {len(ids)} parameters in group {i}, the live one {len(own['params'])}.{named}"
        raise _misfit(where, problem)
    return list(ids)


def _check_entry(
    entry: Any, example: Mapping[str, Any], name: str, key: Any, where: str
) -> set[tuple[Any, str]]:
    """Refuse an entry that is not like a fresh one's; return what a load is to cast."""
    if not isinstance(entry, Mapping):
        raise _misfit(where, f"has a {type(entry).__name__} as the state of {name}.")
    if missing := sorted(str(slot) for slot in example if slot not in entry):
        raise _misfit(where, f"lacks {', '.join(map(repr, missing))} of {name}.")
    cast = set()
    for slot, value in entry.items():
        like = example.get(slot)
        if not isinstance(like, torch.Tensor):
            continue
        if isinstance(value, torch.Tensor):
            if value.shape != like.shape and value.numel() + like.numel() != 2:
                shapes = f"shape {tuple(value.shape)} for {name}, whose is {tuple(like.shape)}"
                raise _misfit(where, f"has {slot!r} of {shapes}.")
            if value.is_meta or value.layout is not like.layout or value.is_complex() != like.is_complex():
                raise _misfit(where, f"has {slot!r} of {name} as a tensor of another kind.")
            if value.dtype != like.dtype and value.is_floating_point():
                cast.add((key, slot))
        elif like.numel() != 1 or not isinstance(value, (int, float)):  # a step may be a number or a tensor
            raise _misfit(where, f"has a {type(value).__name__} as {slot!r} of {name}, and no tensor.")
    return cast


def _misfit(where: str, problem: str) -> CheckpointError:
    return CheckpointError(where, "optimizer", problem)


_NEEDS_MORE = ("LBFGS", "SparseAdam")  # a closure, sparse gradients
_READS_NUMBERS = ("ASGD", "Adafactor")  # which a tensor of the meta device does not have
_QUICKLY = {"fused": None, "foreach": False, "capturable": False, "differentiable": False, "lr": 0.0}


def _example(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: torch.Tensor
) -> Mapping[str, Any]:
    """Return what one of torch's own optimizers holds after a step with such a parameter."""
    cls: Any = type(optimizer)
    if not cls.__module__.startswith("torch.optim") or cls.__name__ in _NEEDS_MORE:
        return {}
    device = "cpu" if cls.__name__ in _READS_NUMBERS else "meta"
    like = torch.nn.Parameter(torch.zeros(parameter.shape, dtype=parameter.dtype, device=device))
    like.grad = torch.zeros_like(like)
    known = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    twin = cls(
        [{**known, **{key: value for key, value in _QUICKLY.items() if key in known}, "params": [like]}]
    )
    twin.step()
    held: Mapping[str, Any] = twin.state[like]
    return held


def load(optimizer: Any, saved: Any, cast: frozenset[tuple[Any, str]] = frozenset()) -> None:
    """Load a state into an optimizer: a copy of it, in the dtypes in which it was saved but for ``cast``."""
    copied = copied_of(saved)
    optimizer.load_state_dict(copied)
    if not is_plain(optimizer):
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    ids = [key for group in copied["param_groups"] for key in group["params"]]
    for key, parameter in zip(ids, parameters, strict=True):
        for slot, value in copied["state"].get(key, {}).items():
            held = optimizer.state[parameter].get(slot)
            if (key, slot) in cast or not isinstance(held, torch.Tensor):
                continue
            if isinstance(value, torch.Tensor) and held.dtype != value.dtype:
                optimizer.state[parameter][slot] = value.to(held.device)


def copied_of(content: Any, done: dict[int, Any] | None = None) -> Any:
    """Copy what was saved: it may be a view of a file, and is nobody's live state."""
    done = {} if done is None else done
    if id(content) not in done:
        if isinstance(content, torch.Tensor):
            made: Any = content.clone()
        elif isinstance(content, Mapping):
            made = {key: copied_of(value, done) for key, value in content.items()}
        elif type(content) in (list, tuple):
            made = type(content)([copied_of(item, done) for item in content])
        else:
            made = copy.deepcopy(content)
        done[id(content)] = made
    return done[id(content)]
