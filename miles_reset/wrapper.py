"""The words in which a plugin says how to reach what a wrapper holds."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, Iterator, ValuesView
from dataclasses import dataclass
from typing import Any, Literal

from miles_reset.schema import Ready, Slot, Slotted, distinct, dotted_name

Children = Callable[[Any], Any]


@dataclass(frozen=True, init=False)
class UnwrapRule(Slotted):
    """How to reach the optimizers inside a wrapper, and what the wrapper owns itself.

    ::

        UnwrapRule("accelerate.optimizer.AcceleratedOptimizer", "optimizer")

    A rule beats a schema: a wrapper that is a subclass of the optimizer that it wraps is unwrapped.

    Attributes:
        target: The class by its dotted name.
        children: The attribute that holds one optimizer, or a list, tuple or dict of them; or a
            function ``children(wrapper)`` that returns such, or pairs ``(label, child)``. None for a
            child, and no child at all, are legal: a stub.
        slots: What the wrapper owns itself, each at its place; ``at="child"`` for a key that it
            keeps in the state of the optimizer below.
        stale_groups: For a wrapper that copies its own groups down to its children at each step:
            what becomes of a group entry there that a child's schema declares. ``"delete"`` where
            a fresh wrapper's groups do not have it, ``"set"`` to the child's initial value.
        ready: Says why state below cannot be written now (offloaded, released, on disk), or None.
        refresh_masters: Copies the model's weights into the wrapper's master weights:
            ``refresh_masters(wrapper)``, for when weights were loaded without the optimizer.
        exact: Whether subclasses are left out.
        override: Whether this record wins over another one for the same class.
    """

    target: str
    children: str | Children
    slots: tuple[Slot, ...]
    stale_groups: Literal["delete", "set"] | None
    ready: Ready | None
    refresh_masters: Callable[[Any], None] | None
    exact: bool
    override: bool

    def __init__(
        self,
        target: str,
        children: str | Children,
        *slots: Slot,
        stale_groups: Literal["delete", "set"] | None = None,
        ready: Ready | None = None,
        refresh_masters: Callable[[Any], None] | None = None,
        exact: bool = False,
        override: bool = False,
    ) -> None:
        if not isinstance(children, str) and not callable(children):
            raise TypeError(f"{target}: children is {children!r}, not an attribute's name or a function")
        if stale_groups not in ("delete", "set", None):
            raise ValueError(f"{target}: stale_groups is {stale_groups!r}, not 'delete', 'set' or None")
        vars(self).update(
            target=dotted_name(target),
            children=children,
            slots=distinct(target, slots),
            stale_groups=stale_groups,
            ready=ready,
            refresh_masters=refresh_masters,
            exact=exact,
            override=override,
        )

    def children_of(self, wrapper: object) -> Iterable[tuple[str | int, Any]]:
        """Return what the wrapper holds, with labels; a label is empty for an only child.

        An empty list where it holds nothing.
        """
        children = self.children
        return labelled(getattr(wrapper, children) if isinstance(children, str) else children(wrapper))


def labelled(held: Any) -> Iterable[tuple[str | int, Any]]:
    """Label one optimizer, or those in a list, tuple or dict.

    A dict gives its keys as labels, a sequence its positions; a pair in a sequence is (label, optimizer).
    """
    if isinstance(held, dict):
        return [(str(key), child) for key, child in held.items()]
    if isinstance(held, (Iterator, ItemsView, ValuesView)):
        held = list(held)
    if not isinstance(held, (list, tuple)):
        return [("", held)]
    if tuple in map(type, held):
        return [item if _is_pair(item) else (i, item) for i, item in enumerate(held)]
    return enumerate(held) if held else []


def _is_pair(item: object) -> bool:
    return isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], (str, int))
