"""Whether a saved optimizer fits the live one, and the saved state in the live one's order."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from miles_reset.errors import CheckpointError

Groups = Sequence[Mapping[str, Any]]


def saved_groups(content: Any) -> list[Mapping[str, Any]]:
    """Return all param groups in a saved optimizer, whatever wrapped it when it was saved."""
    return list(_groups_in(content))


def _groups_in(content: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(content, Mapping):
        groups = content.get("param_groups")
        if isinstance(groups, list) and all(isinstance(group, Mapping) for group in groups):
            yield from groups
            return
        content = [value for key, value in content.items() if key != "state"]
    if isinstance(content, (list, tuple)):
        for item in content:
            if isinstance(item, (Mapping, list, tuple)):
                yield from _groups_in(item)


def is_plain(optimizer: object) -> bool:
    """Say whether an optimizer is torch's own kind, which keeps its state and groups itself."""
    load = getattr(type(optimizer), "load_state_dict", None)
    return isinstance(optimizer, torch.optim.Optimizer) and load is torch.optim.Optimizer.load_state_dict


def fitted(optimizer: torch.optim.Optimizer, saved: Any, where: str) -> tuple[dict[str, Any], list[str]]:
    """Return the saved state in the order of the live parameters, and what had to be filled in.

    Parameters are matched by name where both sides have names, else by position.

    Raises:
        CheckpointError: Groups, names, shapes or keys do not fit.
    """
    if not isinstance(saved, Mapping) or not {"state", "param_groups"} <= saved.keys():
        raise CheckpointError(
            where, "optimizer", "is no optimizer's state: it lacks 'state' or 'param_groups'."
        )
    state, groups = saved["state"], saved["param_groups"]
    if not isinstance(state, Mapping) or not isinstance(groups, list):
        raise CheckpointError(
            where, "optimizer", "is no optimizer's state: 'state' or 'param_groups' is no such."
        )
    live = optimizer.param_groups
    if len(groups) != len(live):
        raise CheckpointError(
            where, "optimizer", f"has {len(groups)} param groups, the live one {len(live)}."
        )
    notes: list[str] = []
    ordered: list[dict[str, Any]] = []
    matched: list[tuple[Any, Any]] = []
    for i, (group, own) in enumerate(zip(groups, live, strict=True)):
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), list):
            raise CheckpointError(where, "optimizer", f"has no list of params in group {i}.")
        ids = _matched(group, own, i, where)
        matched += zip(ids, own["params"], strict=True)
        lacking = {
            key: copy.deepcopy(value) for key, value in own.items() if key not in group and key != "params"
        }
        if lacking:
            notes.append(f"group {i} lacks {', '.join(lacking)}: the live values stay")
        names = {"param_names": own["param_names"]} if "param_names" in own else {}
        ordered.append({**group, **lacking, **names, "params": ids})
    for position, (key, parameter) in enumerate(matched):
        if key in state:
            _check_entry(optimizer, state[key], parameter, f"parameter {position}", ordered, key, where)
    if unknown := [key for key in state if not isinstance(key, str) and key not in dict(matched)]:
        raise CheckpointError(
            where, "optimizer", f"has state of parameters that no group lists: {unknown[:5]}."
        )
    return {"state": state, "param_groups": ordered}, notes


def _matched(group: Mapping[str, Any], own: Mapping[str, Any], i: int, where: str) -> list[Any]:
    ids, names, live = group["params"], group.get("param_names"), own.get("param_names")
    if names and live:
        by_name = dict(zip(names, ids, strict=True))
        missing, extra = [n for n in live if n not in by_name], [n for n in names if n not in set(live)]
        if missing or extra:
            problem = (
                f"does not fit group {i}: missing are {missing or 'none'}, too many are {extra or 'none'}."
            )
            raise CheckpointError(where, "optimizer", problem)
        return [by_name[name] for name in live]
    if len(ids) != len(own["params"]):
        named = f" Saved: {names}." if names else f" Live: {live}." if live else " Names were not saved."
        problem = f"has {len(ids)} parameters in group {i}, the live one {len(own['params'])}.{named}"
        raise CheckpointError(where, "optimizer", problem)
    return list(ids)


def _check_entry(
    optimizer: torch.optim.Optimizer,
    entry: Any,
    parameter: Any,
    name: str,
    groups: Groups,
    key: Any,
    where: str,
) -> None:
    if not isinstance(entry, Mapping):
        raise CheckpointError(where, "optimizer", f"has a {type(entry).__name__} as the state of {name}.")
    live = optimizer.state.get(parameter, {})
    group = next(group for group in groups if key in group["params"])
    example = live or _example(optimizer, group, parameter)
    if missing := sorted(str(slot) for slot in example if slot not in entry):
        raise CheckpointError(where, "optimizer", f"lacks {', '.join(map(repr, missing))} of {name}.")
    for slot, value in entry.items():
        like = example.get(slot)
        if like is None or isinstance(value, torch.Tensor) != isinstance(like, torch.Tensor):
            continue  # a step may be a number or a tensor
        if (
            isinstance(value, torch.Tensor)
            and value.shape != like.shape
            and value.numel() + like.numel() != 2
        ):
            problem = f"has {slot!r} of shape {tuple(value.shape)} for {name}, whose is {tuple(like.shape)}."
            raise CheckpointError(where, "optimizer", problem)


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


def load(optimizer: Any, saved: Mapping[str, Any]) -> None:
    """Load a state into an optimizer: a copy of it, and in the dtypes in which it was saved."""
    copied = _copied(saved)
    optimizer.load_state_dict(copied)
    if not is_plain(optimizer):
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    ids = [key for group in copied["param_groups"] for key in group["params"]]
    for key, parameter in zip(ids, parameters, strict=True):
        for slot, value in copied["state"].get(key, {}).items():
            held = optimizer.state[parameter].get(slot)
            if (
                isinstance(value, torch.Tensor)
                and isinstance(held, torch.Tensor)
                and held.dtype != value.dtype
            ):
                optimizer.state[parameter][slot] = value.to(held.device)


def _copied(content: Any) -> Any:
    """Copy what was saved: it may be a view of a file, and is nobody's live state."""
    if isinstance(content, torch.Tensor):
        return content.clone()
    if isinstance(content, Mapping):
        return {key: _copied(value) for key, value in content.items()}
    if type(content) in (list, tuple):
        return type(content)(map(_copied, content))
    return copy.deepcopy(content)
