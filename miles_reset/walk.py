"""From an optimizer to its leaves, through every wrapper."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from miles_reset.errors import UnknownOptimizerError, UnreachableStateError
from miles_reset.registry import Claim, Provider, Registry, class_name
from miles_reset.schema import StateSchema
from miles_reset.wrapper import UnwrapRule, labelled


@dataclass(slots=True, eq=False)  # half as dear as a NamedTuple, and there may be thousands
class Node:
    """An object in the tree: a leaf (an optimizer that owns state), or a wrapper.

    Attributes:
        obj: The object.
        claim: The record about its class, and who provides it.
        label: Its label under its parent; empty for an only child.
        parent: The wrapper above it.
    """

    obj: Any
    claim: Claim
    label: str | int
    parent: Node | None

    @property
    def path(self) -> str:
        """Where it stands, as ``ChainedOptimizer[0].DistributedOptimizer.AdamW``."""
        names: list[str] = []
        node: Node | None = self
        while node is not None:
            names.append(type(node.obj).__name__.replace("NoneType", "None"))
            names.append("" if node.parent is None else "." if node.label == "" else f"[{node.label}].")
            node = node.parent
        return "".join(reversed(names))

    def wrappers(self) -> tuple[Node, ...]:
        """Return the wrappers above, the nearest first."""
        above, node = [], self.parent
        while node is not None:
            above.append(node)
            node = node.parent
        return tuple(above)


@dataclass
class Tree:
    """What a walk found.

    Attributes:
        leaves: The optimizers that own state, each once, in the order of the walk.
        wrappers: The wrappers, each once, parents before children.
        left_alone: Path and reason for each place that holds nothing to reset or was passed over.
    """

    leaves: list[Node] = field(default_factory=list)
    wrappers: list[Node] = field(default_factory=list)
    left_alone: list[tuple[str, str]] = field(default_factory=list)


def walk(optimizer: object, registry: Registry, *, strict: bool = True) -> Tree:
    """Find every leaf below an optimizer, once, whatever wraps it and however often.

    A list, tuple or dict of optimizers is walked like a wrapper. An object that was met before,
    in a cycle or on a second way to it, is listed and not walked again.

    Args:
        optimizer: An optimizer, a wrapper, a collection of them, or None.
        registry: Where classes are looked up.
        strict: Whether a class that no plugin declares is an error; otherwise it is listed, and
            walked through where it holds something under ``optimizer``.

    Raises:
        UnknownOptimizerError: No plugin declares a class that was met.
        UnreachableStateError: A wrapper or an optimizer says that its state is not there now.
    """
    tree = Tree()
    met: dict[int, Node] = {}
    plain: dict[type, Claim] = {}  # leaves that are always ready, by class
    levels: list[tuple[Iterator[tuple[str | int, Any]], Node | None]] = [(iter([("", optimizer)]), None)]
    while levels:
        children, parent = levels[-1]
        for label, obj in children:
            claim = plain.get(type(obj))
            if claim is not None and id(obj) not in met:
                met[id(obj)] = node = Node(obj, claim, label, parent)
                tree.leaves.append(node)
                continue
            below = _visit(Node(obj, _UNKNOWN, label, parent), tree, met, registry, strict)
            if below is not None and isinstance(below.claim.record, UnwrapRule):
                held = _children(below, below.claim.record)
                if not held:
                    tree.left_alone.append((below.path, "holds no optimizers"))
                levels.append((iter(held), below))
                if len(levels) > _DEEPEST:
                    raise UnreachableStateError(type(optimizer).__name__, "it is wrapped without end.")
                break
            if below is not None and below.claim.record.ready is None and not _overrides_step(below):
                plain[type(obj)] = below.claim
        else:
            levels.pop()
    return tree


def _visit(node: Node, tree: Tree, met: dict[int, Node], registry: Registry, strict: bool) -> Node | None:
    """Enter one object into the tree, and return its node if it is new there."""
    obj, cls = node.obj, type(node.obj)
    if obj is None:
        tree.left_alone.append((node.path, "stub: holds no optimizer"))
        return None
    if id(obj) in met:
        first = met[id(obj)].path
        if node.path != first:
            tree.left_alone.append((node.path, f"met before, as {first}"))
        return None
    claim = _COLLECTION if cls in (list, tuple, dict) else registry.find(cls)
    if claim is None:
        inner = vars(obj).get("optimizer") if hasattr(obj, "__dict__") else None
        if strict:
            raise _unknown(node.path, cls, inner, registry)
        what = "; its own state, if any" if inner is not None else ""
        tree.left_alone.append((node.path, f"no plugin declares {class_name(cls)}{what}"))
        if inner is None:
            return None
        claim = _TRANSPARENT
    node.claim = claim
    met[id(obj)] = node
    if claim.record.ready is not None and (reason := _reason(node)):
        raise UnreachableStateError(node.path, reason)
    if isinstance(claim.record, UnwrapRule):
        tree.wrappers.append(node)
        return node
    tree.leaves.append(node)
    if overriding := _overrides_step(node):
        tree.left_alone.append((node.path, overriding))
    return node


def _overrides_step(node: Node) -> str:
    """Say so where a subclass is taken for its base and has a step of its own."""
    cls, target = type(node.obj), node.claim.record.target
    base = next((base for base in cls.__mro__ if class_name(base) == target), cls)
    own, declared = (inspect.unwrap(getattr(one, "step", _overrides_step)) for one in (cls, base))
    if own is declared:
        return ""
    return f"taken for {target}; it overrides step(), and what that keeps elsewhere is not reset"


_DEEPEST = 10_000
_OURSELVES = Provider("miles_reset")
_COLLECTION = Claim(UnwrapRule("builtins.list", labelled), _OURSELVES)
_UNKNOWN = Claim(StateSchema("builtins.object"), _OURSELVES)
_TRANSPARENT = Claim(UnwrapRule("builtins.object", "optimizer"), _OURSELVES)


def _unknown(path: str, cls: type, inner: object, registry: Registry) -> UnknownOptimizerError:
    name = class_name(cls)
    plugins = [provider.plugin for provider in registry.providers]
    hint = ""
    for alias in registry.aliases(cls):
        hint = f"{registry.claims[alias].provider} claims it as {alias}: it should claim {name}."
    if any(class_name(base) == "torch.optim.lr_scheduler.LRScheduler" for base in cls.__mro__):
        hint = "It is a scheduler: give its optimizer."
    elif any(class_name(base) == "torch.nn.modules.module.Module" for base in cls.__mro__):
        hint = "It is a module: give the optimizer."
    if inner is not None and not hint:
        hint = (
            f'It holds an optimizer; if that is all it holds, UnwrapRule("{name}", "optimizer") declares it.'
        )
    return UnknownOptimizerError(path, cls, plugins=plugins, hint=hint)


def _reason(node: Node) -> str | None:
    record = node.claim.record
    try:
        return record.ready(node.obj) if record.ready is not None else None
    except Exception as error:
        reason = f"ready() of the record of {node.claim.provider} failed: {error!r}."
        raise UnreachableStateError(node.path, reason) from error


def _children(node: Node, rule: UnwrapRule) -> Iterable[tuple[str | int, Any]]:
    try:
        return rule.children_of(node.obj)
    except Exception as error:
        reason = f"the rule of {node.claim.provider} cannot list what it holds: {error!r}."
        raise UnreachableStateError(node.path, reason) from error
