"""The words in which a plugin says what an optimizer remembers.

A :class:`StateSchema` names one optimizer class and lists its slots. A :class:`Slot` has a
key, a :class:`Role` and the :class:`Initial` value that a freshly built optimizer holds there::

    StateSchema("torch.optim.nadam.NAdam",
        momentum("exp_avg"), variance("exp_avg_sq"), history("mu_product", Initial.ONES), clock("step"))

Everything here is a frozen record. Nothing imports the class that it names, or touches a tensor.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, ClassVar

Compute = Callable[[Any, Any, Any], object]
Ready = Callable[[Any], str | None]


class Role(enum.StrEnum):
    """What a slot is for."""

    MOMENTUM = "momentum"
    """First moment: a running mean of gradients or updates."""
    VARIANCE = "variance"
    """Second moment: a running mean of squared gradients, whole or factored."""
    HISTORY = "history"
    """Any other memory of past gradients or of past weights."""
    CLOCK = "clock"
    """A count of steps, as a number or a tensor."""
    KEPT = "kept"
    """Weights, layouts, constants: never written by a reset."""
    SCRATCH = "scratch"
    """Overwritten before it is read: left alone, and not an error."""


class Place(enum.StrEnum):
    """Where a slot lives."""

    STATE = "state"
    """``optimizer.state[parameter][key]``."""
    NAMED = "named"
    """``optimizer.state[key]``: state under a key that is not a parameter."""
    GROUP = "group"
    """``optimizer.param_groups[i][key]``."""
    ATTRIBUTE = "attribute"
    """``optimizer.key``; a dotted key reaches into an attribute."""
    CHILD = "child"
    """A wrapper's key in the state of the optimizer that it wraps."""


class Kind(enum.Enum):
    """The kinds of initial value; :class:`Initial` has a constructor for each."""

    CONSTANT = enum.auto()
    GROUP = enum.auto()
    DEFAULT = enum.auto()
    IDENTITY = enum.auto()
    COPY = enum.auto()
    COMPUTED = enum.auto()
    NONE = enum.auto()
    EMPTY = enum.auto()
    ABSENT = enum.auto()
    ABSENT_ENTRY = enum.auto()
    SEEDED = enum.auto()
    REFUSED = enum.auto()
    EITHER = enum.auto()


@dataclass(frozen=True)
class Initial:
    """What a freshly built optimizer holds in a slot.

    Build one with the constants and constructors below, never with ``Initial(...)``. A value is
    written in place into a tensor that is there; the words that give a tensor's storage up are
    NONE, ABSENT, ABSENT_ENTRY and a computed value of another shape or type. On a list, tuple or
    dict of tensors a word holds for each tensor. A constant ``c`` on a complex tensor is ``c + ci``:
    torch's optimizers see a complex parameter as pairs of reals.
    """

    kind: Kind
    value: Any = None
    then: Initial | None = None
    otherwise: Initial | None = None
    dtype: str = ""

    ZEROS: ClassVar[Initial]
    """Zero, in each element; a number becomes 0 of its own type. The value of most slots."""
    ONES: ClassVar[Initial]
    """One, in each element."""
    COPY: ClassVar[Initial]
    """A copy of the current parameter: slow weights, schedule-free ``z``, Prodigy ``p0``."""
    NONE: ClassVar[Initial]
    """The key is there and holds None."""
    EMPTY: ClassVar[Initial]
    """An empty list, deque, dict or set; the container stays the same object."""
    ABSENT: ClassVar[Initial]
    """The key is not there: the optimizer makes it from the first gradient."""
    ABSENT_ENTRY: ClassVar[Initial]
    """The parameter's whole entry is not there: one presence test guards several keys."""
    SGD_BUFFER: ClassVar[Initial]
    """The buffer of torch's SGD, and of those built like it: it starts as a copy of the first gradient.
    Without dampening, negative zeros come to the same, in place: ``-0.0 + g`` is ``g``, where ``0.0 + g``
    loses the sign of a ``-0.0``. With dampening nothing does, and the key is not there."""

    @classmethod
    def constant(cls, value: float) -> Initial:
        """Return a number, in each element."""
        return cls(Kind.CONSTANT, value)

    @classmethod
    def group(cls, key: str) -> Initial:
        """Return the current value of an entry of the parameter's group, such as ``"lr"``."""
        return cls(Kind.GROUP, key)

    @classmethod
    def default(cls, key: str) -> Initial:
        """Return an entry of ``optimizer.defaults``: what the constructor was given."""
        return cls(Kind.DEFAULT, key)

    @classmethod
    def identity(cls, scale: float | str = 1.0) -> Initial:
        """Return the identity matrix times ``scale``; ``scale`` itself in a 0-d or 1-d tensor (a diagonal).

        A scale that is a name is looked up like the flag of :meth:`either`.
        """
        return cls(Kind.IDENTITY, scale)

    @classmethod
    def computed(cls, function: Compute) -> Initial:
        """Return the result of ``function(parameter, group, optimizer)``, a pure function.

        It is called while the reset is planned, so it may raise. A tensor of the same shape and
        dtype is copied in place, and so is each in a list of as many; any other result replaces
        what is there. Parameter and group are None where the slot belongs to neither.
        """
        return cls(Kind.COMPUTED, function)

    @classmethod
    def seeded(cls, seed: int) -> Initial:
        """Return a random number generator (torch's or Python's) seeded, in place, with ``seed``."""
        if type(seed) is not int:
            raise TypeError(f"a seed is a whole number, not {seed!r}")
        return cls(Kind.SEEDED, seed)

    @classmethod
    def refused(cls, reason: str) -> Initial:
        """Return the word for a slot that cannot be brought to a fresh value, and why."""
        return cls(Kind.REFUSED, reason)

    @classmethod
    def either(cls, flag: str, then: Initial, otherwise: Initial) -> Initial:
        """Return ``then`` where the flag is true, else ``otherwise``.

        The flag is looked up in the parameter's group, then among the optimizer's attributes.
        """
        return cls(Kind.EITHER, flag, then, otherwise)

    def as_dtype(self, dtype: str) -> Initial:
        """Say which dtype a fresh optimizer gives the tensor, whatever the parameter's.

        ``load_state_dict`` casts state to the parameter's dtype; a tensor that it cast is replaced
        by one of the right dtype.

        Args:
            dtype: A torch dtype's name, such as ``"float32"``; ``"default"`` for torch's default
                dtype; ``"scalar"`` for torch's dtype of step counts: float64 where that is the
                default dtype, else float32.
        """
        return replace(self, dtype=dtype)

    @property
    def may_drop_entry(self) -> bool:
        """Whether it is, or may turn out to be, :attr:`ABSENT_ENTRY`."""
        options = (self.then, self.otherwise)
        return self.kind is Kind.ABSENT_ENTRY or any(
            one is not None and one.may_drop_entry for one in options
        )

    def __str__(self) -> str:
        """Say the value in a few words, as the tables print it."""
        return f"{self._words()} ({self.dtype})" if self.dtype else self._words()

    def _words(self) -> str:
        match self.kind:
            case Kind.CONSTANT:
                return str(self.value)
            case Kind.GROUP:
                return f"group's {self.value}"
            case Kind.DEFAULT:
                return f"default {self.value}"
            case Kind.IDENTITY:
                return "identity" if self.value == 1 else f"identity x {self.value}"
            case Kind.COPY:
                return "copy of parameter"
            case Kind.COMPUTED:
                return f"computed by {getattr(self.value, '__name__', 'a function')}"
            case Kind.SEEDED:
                return f"seeded with {self.value}"
            case Kind.REFUSED:
                return f"refused: {self.value}"
            case Kind.EITHER:
                return f"{self.then} if {self.value} else {self.otherwise}"
        return self.kind.name.lower().replace("absent_entry", "absent with its entry")


Initial.ZEROS = Initial(Kind.CONSTANT, 0)
Initial.ONES = Initial(Kind.CONSTANT, 1)
Initial.COPY = Initial(Kind.COPY)
Initial.NONE = Initial(Kind.NONE)
Initial.EMPTY = Initial(Kind.EMPTY)
Initial.ABSENT = Initial(Kind.ABSENT)
Initial.ABSENT_ENTRY = Initial(Kind.ABSENT_ENTRY)
Initial.SGD_BUFFER = Initial.either("dampening", Initial.ABSENT, Initial.constant(-0.0))


@dataclass(frozen=True)
class Slot:
    """One named entry of an optimizer's state, groups or attributes.

    Attributes:
        key: The key; ``*`` stands for any characters (``"pre_cond_*"``).
        role: What it is for.
        initial: What a fresh optimizer holds there; None for kept and scratch.
        at: Where it lives.
    """

    key: str
    role: Role
    initial: Initial | None = None
    at: Place = Place.STATE

    def __post_init__(self) -> None:
        """Check that exactly the slots that a reset writes say what is written."""
        vars(self).update(role=Role(self.role), at=Place(self.at))
        if self.initial is not None and not isinstance(self.initial, Initial):
            raise TypeError(
                f"slot {self.key!r}: {self.initial!r} is not an Initial; use Initial.constant() or another"
            )
        if (self.initial is None) != (self.role in (Role.KEPT, Role.SCRATCH)):
            raise ValueError(f"slot {self.key!r}: {self.role} with initial value {self.initial}")

    def matches(self, key: object) -> bool:
        """Say whether the slot's key, a pattern perhaps, is this key."""
        return key == self.key or ("*" in self.key and isinstance(key, str) and fnmatchcase(key, self.key))


def momentum(key: str, initial: Initial = Initial.ZEROS, *, at: str = Place.STATE) -> Slot:
    """Declare a first moment."""
    return Slot(key, Role.MOMENTUM, initial, Place(at))


def variance(key: str, initial: Initial = Initial.ZEROS, *, at: str = Place.STATE) -> Slot:
    """Declare a second moment, whole or factored."""
    return Slot(key, Role.VARIANCE, initial, Place(at))


def history(key: str, initial: Initial = Initial.ZEROS, *, at: str = Place.STATE) -> Slot:
    """Declare any other memory of past gradients or weights."""
    return Slot(key, Role.HISTORY, initial, Place(at))


def clock(key: str, initial: Initial = Initial.ZEROS, *, at: str = Place.STATE) -> Slot:
    """Declare a count of steps, as a number or a tensor."""
    return Slot(key, Role.CLOCK, initial, Place(at))


def kept(key: str, *, at: str = Place.STATE) -> Slot:
    """Declare weights, a layout or a constant: a reset never writes it."""
    return Slot(key, Role.KEPT, None, Place(at))


def scratch(key: str, *, at: str = Place.STATE) -> Slot:
    """Declare what is overwritten before it is read: a reset leaves it alone."""
    return Slot(key, Role.SCRATCH, None, Place(at))


def dotted_name(target: str) -> str:
    """Check that a target is ``module.Class`` and return it."""
    if not isinstance(target, str):
        name = f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', '')}".strip(".")
        raise TypeError(
            f"target is {target!r}, not a dotted name; a plugin claims a class by its name: {name!r}"
        )
    parts = target.split(".")
    if len(parts) < 2 or not all(part.isidentifier() or part == "<locals>" for part in parts):
        raise ValueError(f"target {target!r} is not a dotted class name such as 'torch.optim.adam.Adam'")
    return target


def distinct(target: str, slots: tuple[Slot, ...]) -> tuple[Slot, ...]:
    """Check that slots are slots and that no two of them name one key, and return them."""
    for slot in slots:
        if not isinstance(slot, Slot):
            raise TypeError(f"{target}: {slot!r} is not a Slot; use momentum(), clock(), kept() ...")
    names = [(slot.at, slot.key) for slot in slots]
    for at, key in names:
        if names.count((at, key)) > 1:
            raise ValueError(f"{target}: {at} key {key!r} is declared twice")
    return slots


class Slotted:
    """A record with slots."""

    slots: tuple[Slot, ...]

    def at(self, place: Place) -> tuple[Slot, ...]:
        """Return the slots that live in one place."""
        return self._by_place[place]

    @cached_property
    def _by_place(self) -> dict[Place, tuple[Slot, ...]]:
        return {place: tuple(slot for slot in self.slots if slot.at == place) for place in Place}


@dataclass(frozen=True, init=False)
class StateSchema(Slotted):
    """The slots of one class.

    The class is mostly an optimizer. It may also be a tensor subclass made of other tensors, or an
    object that an optimizer keeps in its state; its slots are then attributes of that object.

    Attributes:
        target: The class by its dotted name, ``cls.__module__ + "." + cls.__qualname__``.
        slots: What it holds.
        ready: Says why state cannot be written now, or None where it can: ``ready(optimizer)``.
        exact: Whether subclasses are left out. By default a subclass that no record names is
            taken for the nearest base that one does.
        override: Whether this record wins over another one for the same class.
    """

    target: str
    slots: tuple[Slot, ...]
    ready: Ready | None
    exact: bool
    override: bool

    def __init__(
        self,
        target: str,
        *slots: Slot,
        ready: Ready | None = None,
        exact: bool = False,
        override: bool = False,
    ) -> None:
        slots = distinct(target, slots)
        if strays := [slot.key for slot in slots if slot.at is Place.CHILD]:
            raise ValueError(f"{target}: only a wrapper's rule may say at='child', and {strays} do")
        vars(self).update(
            target=dotted_name(target),
            slots=slots,
            ready=ready,
            exact=exact,
            override=override,
        )
