"""From one value and its initial value to the writes that bring it there."""

from __future__ import annotations

import enum
import random
from cmath import isfinite
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, replace
from numbers import Number
from typing import Any, NamedTuple

import torch

from miles_reset.errors import NOTHING_CHANGED, UndeclaredStateError, UnsupportedOptimizerState
from miles_reset.registry import Registry, class_name
from miles_reset.schema import Initial, Kind, Place, StateSchema
from miles_reset.walk import Node

PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})
NUMBERS = frozenset({bool, int, float, complex})


class How(enum.StrEnum):
    """How a value is brought to its initial value."""

    FILL = "filled in place"
    DIAGONAL = "set to identity in place"
    COPY = "copied into in place"
    CLEAR = "emptied in place"
    SEED = "seeded in place"
    SET = "set"
    REPLACE = "replaced"
    REMOVE = "removed"
    REMOVE_ENTRY = "removed with its entry"
    MERGE = "filled in part, in place"


@dataclass(slots=True)
class Write:
    """One change to one key of some containers, value by value.

    Attributes:
        how: What is done.
        nodes: Whose each value is.
        containers: The mappings that hold the values; empty for tensors inside other objects.
        key: The key in each container.
        old: The live values.
        new: One number for all (FILL, DIAGONAL, SEED), or a value for each. REMOVE_ENTRY has the
            keys of the entries here: its containers are the mappings that hold the entries. MERGE has
            pairs: what gives the mask of what is written, and the number or tensor that is written.
    """

    how: How
    nodes: list[Node]
    containers: list[MutableMapping[Any, Any]]
    key: Any
    old: list[Any]
    new: Any = None


class Site(NamedTuple):
    """Where one value lives.

    Attributes:
        node: The leaf or wrapper that it belongs to.
        container: The mapping, or the list, that holds it, if one does.
        key: Its key there.
        parameter: The parameter that it is about, if any.
        group: That parameter's group, if it is known.
        registry: Where classes of objects in the state are looked up.
    """

    node: Node
    container: Any
    key: Any
    parameter: torch.Tensor | None
    group: MutableMapping[str, Any] | None
    registry: Registry

    def refusal(self, problem: str) -> UnsupportedOptimizerState:
        """Return the error that says what cannot be done here."""
        path = self.node.path
        whose = f"{self.node.claim.record.target} comes from {self.node.claim.provider}"
        what = "a parameter's entry" if isinstance(self.key, torch.Tensor) else repr(self.key)
        return UnsupportedOptimizerState(
            path, f"{what} at {path} {problem}. {whose}. {NOTHING_CHANGED} Mend that record."
        )

    def write(self, how: How, old: object, new: object = None) -> Write:
        """Return one write here; without a container where the value is inside an object."""
        if self.container is None and how in (How.SET, How.REPLACE, How.REMOVE):
            raise self.refusal("is inside a tuple or a tensor, where it can only be filled in place")
        containers = [] if self.container is None else [self.container]
        one_for_all = how in (How.FILL, How.DIAGONAL, How.SEED)
        return Write(how, [self.node], containers, self.key, [old], new if one_for_all else [new])


def resolve(initial: Initial, site: Site) -> Initial:
    """Turn a value that a group, a default or a flag decides into one that stands by itself."""
    optimizer = site.node.obj
    if initial.kind is Kind.EITHER:
        chosen = initial.then if _named_value(initial.value, site) else initial.otherwise
        assert chosen is not None
        return resolve(chosen, site)
    if initial.kind is Kind.IDENTITY and isinstance(initial.value, str):
        return replace(initial, value=_named_value(initial.value, site))
    if initial.kind in (Kind.GROUP, Kind.DEFAULT):
        held = site.group if initial.kind is Kind.GROUP else getattr(optimizer, "defaults", None)
        if held is None or initial.value not in held:
            raise site.refusal(f"starts as {initial}, which is not there")
        value = held[initial.value]
        number = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        if not isinstance(number, Number):
            raise site.refusal(f"starts as {initial}, which is {value!r} and no number")
        return replace(initial, kind=Kind.CONSTANT, value=number)
    return initial


def _named_value(name: str, site: Site) -> Any:
    if site.group is not None and name in site.group:
        return site.group[name]
    if hasattr(site.node.obj, name):
        return getattr(site.node.obj, name)
    raise site.refusal(f"depends on {name!r}, which neither its group nor its optimizer has")


def plan_value(initial: Initial, value: Any, site: Site) -> Iterator[Write]:
    """Yield the writes that bring one value to a resolved initial value.

    Raises:
        UnsupportedOptimizerState: The value cannot be brought there.
    """
    match initial.kind:
        case Kind.REFUSED:
            raise site.refusal(f"cannot be reset: {initial.value}")
        case Kind.ABSENT_ENTRY:
            raise site.refusal(
                "depends on a flag to be absent with its entry, and another key there does too"
            )
        case Kind.ABSENT:
            yield site.write(How.REMOVE, value)
        case Kind.NONE:
            yield site.write(How.SET, value, None)
        case Kind.COMPUTED:
            yield from _put(_compute(initial, site), value, site)
        case Kind.CONSTANT | Kind.IDENTITY | Kind.COPY | Kind.EMPTY | Kind.SEEDED if value is None:
            return  # made lazily, and not made yet: as fresh as it can be
        case Kind.EMPTY:
            if not hasattr(value, "clear"):
                raise site.refusal(f"starts as an empty container and is {type(value).__name__}")
            yield site.write(How.CLEAR, value)
        case Kind.SEEDED:
            if not isinstance(value, (torch.Generator, random.Random)):
                raise site.refusal(f"starts as a seeded generator and is {type(value).__name__}")
            yield site.write(How.SEED, value, initial.value)
        case _:
            yield from _number_or_tensor(initial, value, site)


def _number_or_tensor(initial: Initial, value: Any, site: Site) -> Iterator[Write]:
    if isinstance(value, torch.Tensor):
        yield from _tensor(initial, value, site)
    elif isinstance(value, Number) and initial.kind is Kind.CONSTANT:
        try:
            like = _like(value, initial.value)
        except (OverflowError, TypeError, ValueError) as error:
            raise site.refusal(f"starts as {initial.value}: {error}") from error
        yield site.write(How.SET, value, like)
    elif isinstance(value, (list, tuple, dict)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            about = key if isinstance(key, torch.Tensor) else site.parameter
            place = None if isinstance(value, tuple) else value
            inside = site._replace(container=place, key=key, parameter=about)
            yield from plan_value(initial, item, inside)
    elif initial == Initial.ZEROS:
        if not hasattr(value, "__dict__") and site.registry.find(type(value)) is not None:
            raise site.refusal(f"is a {type(value).__name__}, whose attributes cannot be listed")
        yield from _parts(value, vars(value) if hasattr(value, "__dict__") else {}, site)
    else:
        raise site.refusal(f"starts as {initial} and is {type(value).__name__}")


def _like(value: Any, number: float) -> Any:
    """Return a number of a value's own type: int, float, bool, or numpy's."""
    like = type(value)(number)
    if like != number:
        raise OverflowError(f"{number!r} is no {type(value).__name__}")
    return like


def _tensor(initial: Initial, tensor: torch.Tensor, site: Site) -> Iterator[Write]:
    source = site.parameter
    if hasattr(type(tensor), "__tensor_flatten__"):
        if not hasattr(tensor, "placements"):
            if initial != Initial.ZEROS:
                raise site.refusal(f"starts as {initial} and is a {type(tensor).__name__}")
            flatten: Any = tensor.__tensor_flatten__  # type: ignore[attr-defined]  # a subclass has it
            names = flatten()[0]
            yield from _parts(tensor, {name: getattr(tensor, name) for name in names}, site)
            return
        if initial.kind is Kind.IDENTITY:
            raise site.refusal("starts as an identity matrix and is sharded over ranks")
        if initial.kind is Kind.COPY and getattr(source, "placements", None) != tensor.placements:
            raise site.refusal("starts as a copy of a parameter that is sharded otherwise")
        site = site._replace(container=None, parameter=None if source is None else local(source))
        if hasattr(type(local(tensor)), "__tensor_flatten__"):  # quantized, and then sharded
            yield from _tensor(initial, local(tensor), site)
            return
        tensor, source = local(tensor), site.parameter
    if initial.kind is Kind.IDENTITY and tensor.ndim > 2:
        raise site.refusal(f"starts as an identity matrix and has {tensor.ndim} dimensions")
    if initial.kind in (Kind.CONSTANT, Kind.IDENTITY):
        how = How.DIAGONAL if initial.kind is Kind.IDENTITY and tensor.ndim == 2 else How.FILL
        if initial.dtype and tensor.dtype != named_dtype(initial.dtype):
            tensor = torch.empty_like(tensor, dtype=named_dtype(initial.dtype))
            yield site.write(How.REPLACE, None, tensor)
        check_number(initial.value, tensor.dtype, site)
        yield site.write(how, tensor, initial.value)
    elif source is None:
        raise site.refusal("starts as a copy of its parameter and belongs to none: use Initial.computed()")
    elif source.shape != tensor.shape:
        shapes = f"of shape {tuple(source.shape)}, and has shape {tuple(tensor.shape)}"
        raise site.refusal(f"starts as a copy of its parameter, {shapes}")
    elif any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        raise site.refusal("starts as a copy of its parameter and is an expanded tensor")
    else:
        yield site.write(How.COPY, tensor, source)


def check_number(number: Any, dtype: torch.dtype, site: Site) -> None:
    """Refuse a number that a dtype cannot hold.

    Raises:
        UnsupportedOptimizerState: It overflows, or an integer type would cut it.
    """
    if dtype.is_floating_point or dtype.is_complex:
        fits = not isfinite(number) or abs(number) <= torch.finfo(dtype).max
    else:
        try:
            fits = torch.full((), number, dtype=dtype).item() == number
        except RuntimeError as error:
            raise site.refusal(f"starts as {number}, which is no {dtype}: {error}") from error
    if not fits:
        raise site.refusal(f"starts as {number}, which is no {dtype}")


def _storage(tensor: torch.Tensor) -> int:
    return local(tensor).untyped_storage().data_ptr()


def _compute(initial: Initial, site: Site) -> Any:
    try:
        with torch.no_grad():
            return initial.value(site.parameter, site.group, site.node.obj)
    except Exception as error:
        raise site.refusal(f"starts as {initial}, which failed: {error!r}") from error


def _put(new: Any, value: Any, site: Site) -> Iterator[Write]:
    """Yield the writes that put a computed value, or the items of a list of such, where one is."""
    if type(new) is type(value) is list and len(new) == len(value):
        for i, item in enumerate(new):
            yield from _put(item, value[i], site._replace(container=value, key=i))
        return
    if not isinstance(new, torch.Tensor):
        yield site.write(How.REPLACE if isinstance(value, torch.Tensor) else How.SET, value, new)
        return
    if site.parameter is not None and _storage(new) == _storage(site.parameter):
        new = new.clone()  # never put the weights themselves into the state
    alike = isinstance(value, torch.Tensor) and (value.shape, value.dtype) == (new.shape, new.dtype)
    yield site.write(How.COPY if alike else How.REPLACE, value, new)


def _parts(value: object, parts: dict[str, Any], site: Site) -> Iterator[Write]:
    """Bring an object, or a tensor made of other tensors, to fresh by the schema of its class."""
    claim = site.registry.find(type(value))
    if claim is None or not isinstance(claim.record, StateSchema):
        raise site.refusal(
            f"is a {class_name(type(value))}, which no plugin declares; a StateSchema for that class can"
        )
    slots = {key: slot for key in parts for slot in claim.record.at(Place.ATTRIBUTE) if slot.matches(key)}
    if unnamed := sorted(parts.keys() - slots.keys()):
        declared = ", ".join(repr(slot.key) for slot in claim.record.slots) or "nothing"
        raise UndeclaredStateError(
            f"{site.node.path}.{type(value).__name__}",
            unnamed,
            claim.record.target,
            provider=str(claim.provider),
            declared=declared,
        )
    is_tensor = isinstance(value, torch.Tensor)
    for key, slot in slots.items():
        if slot.initial is not None:
            inside = site._replace(container=None if is_tensor else vars(value), key=key)
            yield from plan_value(resolve(slot.initial, inside), parts[key], inside)


def named_dtype(name: str) -> torch.dtype:
    """Return the dtype that :meth:`Initial.as_dtype` names."""
    default = torch.get_default_dtype()
    if name == "scalar":
        return torch.float64 if default is torch.float64 else torch.float32
    dtype: torch.dtype = default if name == "default" else getattr(torch, name)
    return dtype


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a sharded tensor (DTensor), or the tensor itself."""
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part
