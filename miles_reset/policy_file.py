"""A policy as a file: read with care, and its mistakes said in words."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from miles_reset.errors import PolicyError

LARGEST = 1 << 14
"""The bytes that a policy file may have. Real ones have a few hundred."""
DEEPEST = 20
"""How deep a YAML policy may be nested. Real ones are 2 deep."""


def read_policy(path: Path) -> Any:
    """Read a policy file as plain data.

    Raises:
        PolicyError: It is not there, not readable, or too large to be one.
    """
    suffix = path.suffix.lower()
    if suffix not in (".toml", ".yaml", ".yml"):
        raise PolicyError("policy", f"{path} is neither .toml nor .yaml nor .yml.")
    try:
        with path.open("rb") as file:
            raw = file.read(LARGEST + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or error
        raise PolicyError("policy", f"{path} cannot be read: {reason}.") from error
    if len(raw) > LARGEST:
        raise PolicyError("policy", f"{path} has more than {LARGEST:,} bytes, and is no policy.")
    try:
        text = raw.decode()
        if suffix == ".toml":
            return tomllib.loads(text)
        _scan(text, path)
        return yaml.load(text, _NoDuplicates)  # a SafeLoader
    except PolicyError:
        raise
    except Exception as error:
        what = " ".join(str(error).split()) or type(error).__name__
        if "Invalid value" in what:
            what += ": TOML has text in quotes"
        raise PolicyError("policy", f"{path} is not readable as {suffix[1:].upper()}: {what}.") from error


def _scan(text: str, path: Path) -> None:
    """Refuse what a small file can use to grow large, before it does."""
    depth = 0
    for token in yaml.scan(text):
        if isinstance(token, (yaml.AliasToken, yaml.AnchorToken)):
            raise PolicyError("policy", f"{path} has YAML anchors or aliases, which a policy does not need.")
        depth += isinstance(token, _OPENING) - isinstance(token, _CLOSING)
        if depth > DEEPEST:
            raise PolicyError("policy", f"{path} is nested more than {DEEPEST} deep, and is no policy.")


_OPENING = (
    yaml.FlowSequenceStartToken,
    yaml.FlowMappingStartToken,
    yaml.BlockSequenceStartToken,
    yaml.BlockMappingStartToken,
)
_CLOSING = (yaml.FlowSequenceEndToken, yaml.FlowMappingEndToken, yaml.BlockEndToken)


class _NoDuplicates(yaml.SafeLoader):
    """Refuses a key that is there twice, as TOML does."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        counted = Counter(str(self.construct_object(key, deep=True)) for key, _ in node.value)
        if twice := sorted(key for key, count in counted.items() if count > 1):
            raise ValueError(f"{', '.join(twice)} is there twice")
        return super().construct_mapping(node, deep)


_NoDuplicates.add_implicit_resolver(  # 1e-4, which YAML 1.1 takes for text
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def explain(
    mistakes: Sequence[Mapping[str, Any]], keys: Mapping[str, list[str]], source: str
) -> tuple[str, str]:
    """Say what is wrong with a policy.

    Args:
        mistakes: What pydantic found, at least one.
        keys: The keys that a policy may have under ``""``, and those of each table in it.
        source: Where the policy is from.

    Returns:
        The part of the first mistake, and a sentence for each.
    """
    told = dict(_explain(mistake, keys) for mistake in reversed(mistakes))  # one for each place
    said = list(reversed(told.values()))
    if len(said) > 1:
        said = [f"({number}) {sentence}" for number, sentence in enumerate(said, 1)]
    return list(told)[-1], f"{source}: {' '.join(said)}"


def _explain(mistake: Mapping[str, Any], keys: Mapping[str, list[str]]) -> tuple[str, str]:
    """Return the place of one mistake, and a sentence about it."""
    steps = [str(step) for step in mistake["loc"]]
    where = ".".join(step for step in steps if not step.startswith(("literal[", "constrained")))
    value = mistake["input"]
    if mistake["type"] == "extra_forbidden":
        table = ".".join(steps[:-1])
        if table and steps[-1] in keys[""]:
            return where, f"it has {steps[-1]!r} under [{table}]; it belongs to the top, before any [table]."
        return (
            where,
            f"it has a key {where!r} that no policy has{nearest(steps[-1], keys.get(table, keys['']))}.",
        )
    if mistake["type"] == "value_error":
        return where or "policy", f"{mistake['msg'].removeprefix('Value error, ')}."
    what, near = mistake["msg"].lower(), ""
    if allowed := mistake.get("ctx", {}).get("expected"):
        what = f"one of {allowed}"
        near = nearest(str(value), [option.strip("' ") for option in allowed.replace(" or ", ",").split(",")])
    if isinstance(value, bool):
        near = "; YAML takes on, off, yes and no for true and false"
    elif isinstance(value, str) and value.strip().lstrip("-").replace(".", "", 1).isdigit():
        near = "; a number stands without quotes"
    return where, f"{where} is {value!r}; it must be {what}{near}."


def nearest(name: str, known: Iterable[str]) -> str:
    """Say which known name is the nearest, or which there are."""
    known = list(known)
    near = get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; the nearest is {near[0]!r}" if near else f"; known are {', '.join(sorted(known))}"
