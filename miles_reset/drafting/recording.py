"""What an optimizer writes into its state and its groups, as it is first written."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from miles_reset.testing import same_bits

Note = Callable[[Any, Any], None]


class RecordingEntry(dict[Any, Any]):
    """A mapping that tells of each key that is new, and of its value while nothing was added to it."""

    def __init__(self, note: Note, items: Mapping[Any, Any] = {}) -> None:
        super().__init__(items)
        self._note = note

    def __setitem__(self, key: Any, value: Any) -> None:
        new = key not in self
        super().__setitem__(key, value)
        if new:
            self._note(key, value)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """Set a key that is not there."""
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Set several keys."""
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def __ior__(self, other: Any) -> RecordingEntry:  # type: ignore[misc]  # as dict's
        self.update(other)
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self),)


class RecordingState(dict[Any, Any]):
    """A mapping of parameters to entries that record; state under a name is told of as ``(None, key)``."""

    def __init__(self, note: Callable[[Any, Any, Any], None], items: Mapping[Any, Any]) -> None:
        super().__init__()
        self._note = note
        self._quiet = True
        for key, value in items.items():
            self[key] = value
        self._quiet = False

    def __missing__(self, key: Any) -> Any:
        self[key] = {}
        return self[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        new = key not in self
        if isinstance(key, torch.Tensor) and isinstance(value, Mapping):
            entry = RecordingEntry(lambda inner, held: self._note(key, inner, held), value)
            if new and not self._quiet:
                for inner, held in value.items():
                    self._note(key, inner, held)
            value = entry
        elif new and not self._quiet:
            self._note(None, key, value)
        super().__setitem__(key, value)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """Set a key that is not there."""
        if key not in self:
            self[key] = default
        return self[key]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self),)


class Opaque:
    """Stands for a value that cannot be copied."""


def copy_of(value: Any) -> Any:
    """Copy a value as it is now, whatever is inside."""
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        return value.detach().clone()
    if hasattr(type(value), "__tensor_flatten__"):
        names, context = value.__tensor_flatten__()
        parts = {name: copy_of(getattr(value, name)) for name in names}
        return type(value).__tensor_unflatten__(parts, context, value.shape, value.stride())
    if isinstance(value, Mapping):
        return {key: copy_of(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(copy_of(item) for item in value)
    if isinstance(value, torch.Generator):
        return value.clone_state()
    try:
        return copy.deepcopy(value)
    except Exception:  # noqa: BLE001  # it may fail in any way
        return Opaque()


def same(a: Any, b: Any, depth: int = 0) -> bool:
    """Say whether two values, and all that is inside, are the same to the last bit."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return type(a) is type(b) and _same_tensors(a, b)
    if isinstance(a, torch.Generator) and isinstance(b, torch.Generator):
        return torch.equal(a.get_state(), b.get_state())
    if type(a) is not type(b) and not (isinstance(a, Mapping) and isinstance(b, Mapping)):
        return False
    if isinstance(a, Mapping):
        return list(a) == list(b) and all(same(a[key], b[key], depth) for key in a)
    if isinstance(a, (list, tuple, deque)):
        return len(a) == len(b) and all(same(x, y, depth) for x, y in zip(a, b, strict=True))
    if hasattr(a, "getstate"):
        return bool(a.getstate() == b.getstate())
    if not _compares(a) and hasattr(a, "__dict__"):
        return depth > 4 or same(vars(a), vars(b), depth + 1)
    try:
        return bool(a == b or a != a)
    except Exception:  # noqa: BLE001  # arrays and the like
        return False


def _compares(value: Any) -> bool:
    return any("__eq__" in vars(base) for base in type(value).__mro__[:-1])


def _same_tensors(a: Any, b: Any) -> bool:
    if hasattr(type(a), "__tensor_flatten__"):
        names = a.__tensor_flatten__()[0]
        return all(same(getattr(a, name), getattr(b, name)) for name in names)
    try:
        return same_bits(a, b)
    except Exception:  # noqa: BLE001  # a subclass that knows few operations
        return False


def inside(value: Any) -> Iterator[Any]:
    """Yield a value, or what is inside of a list, tuple or mapping, however deep."""
    if isinstance(value, Mapping):
        for item in value.values():
            yield from inside(item)
    elif isinstance(value, (list, tuple, deque)):
        for item in value:
            yield from inside(item)
    else:
        yield value
