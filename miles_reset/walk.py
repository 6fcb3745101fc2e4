"""From an optimizer to its leaves, through every wrapper."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from miles_reset.errors import UnknownOptimizerError, UnreachableStateError
from miles_reset.registry import Claim, Provider, Registry, class_name
from miles_reset.wrapper import UnwrapRule, labelled


class Node(NamedTuple):
    """An object in the tree: a leaf (an optimizer that owns state), or a wrapper.

    Attributes:
        obj: The object.
        claim: The record about its class, and who provides it.
        label: Its label under its parent; empty for an only child.
        parent: The wrapper above it.
    """

    obj: Any
    claim: Claim
    label: str
    parent: Node | None

    @property
    def path(self) -> str:
        """Where it stands, as ``ChainedOptimizer[0].DistributedOptimizer.AdamW``."""
        return _path(self.parent, self.label, type(self.obj).__name__)

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
    claims: dict[type, Claim | None] = {}
    stack: list[tuple[Any, str, Node | None]] = [(optimizer, "", None)]
    while stack:
        obj, label, parent = stack.pop()
        cls = type(obj)
        if cls not in claims:
            claims[cls] = _COLLECTION if cls in _COLLECTIONS else registry.find(cls)
        claim = claims[cls]
        if obj is None:
            tree.left_alone.append((_path(parent, label, "None"), "stub: holds no optimizer"))
        elif id(obj) in met:
            first = met[id(obj)].path
            if (path := _path(parent, label, cls.__name__)) != first:
                tree.left_alone.append((path, f"met before, as {first}"))
        elif claim is None:
            path = _path(parent, label, cls.__name__)
            inner = vars(obj).get("optimizer") if hasattr(obj, "__dict__") else None
            if strict:
                raise _unknown(path, cls, inner, registry)
            if inner is None:
                tree.left_alone.append((path, f"no plugin declares {class_name(cls)}"))
            else:
                tree.left_alone.append((path, f"no plugin declares {class_name(cls)}; its own state, if any"))
                met[id(obj)] = node = Node(obj, _TRANSPARENT, label, parent)
                stack.append((inner, "", node))
        else:
            met[id(obj)] = node = Node(obj, claim, label, parent)
            if claim.record.ready is not None and (reason := claim.record.ready(obj)):
                raise UnreachableStateError(node.path, reason)
            if isinstance(claim.record, UnwrapRule):
                tree.wrappers.append(node)
                children = _children(node, claim.record)
                if not children:
                    tree.left_alone.append((node.path, "holds no optimizers"))
                stack.extend((child, name, node) for name, child in reversed(children))
            else:
                tree.leaves.append(node)
    return tree


_OURSELVES = Provider("miles_reset")
_COLLECTIONS = (list, tuple, dict)
_COLLECTION = Claim(UnwrapRule("builtins.list", labelled), _OURSELVES)
_TRANSPARENT = Claim(UnwrapRule("builtins.object", "optimizer"), _OURSELVES)


def _unknown(path: str, cls: type, inner: object, registry: Registry) -> UnknownOptimizerError:
    name = class_name(cls)
    plugins = [provider.plugin for provider in registry.providers]
    hint = ""
    for alias in registry.aliases(cls):
        hint = f"{registry.claims[alias].provider} claims it as {alias}: it should claim {name}."
    if inner is not None and not hint:
        hint = (
            f'It holds an optimizer; if that is all it holds, UnwrapRule("{name}", "optimizer") declares it.'
        )
    return UnknownOptimizerError(path, cls, plugins=plugins, hint=hint)


def _children(node: Node, rule: UnwrapRule) -> list[tuple[str, Any]]:
    try:
        return rule.children_of(node.obj)
    except Exception as error:
        reason = f"the rule of {node.claim.provider} cannot list what it holds: {error!r}."
        raise UnreachableStateError(node.path, reason) from error


def _path(parent: Node | None, label: str, name: str) -> str:
    place = f"[{label}]." if label else "." if parent else ""
    return f"{parent.path if parent else ''}{place}{name}"
