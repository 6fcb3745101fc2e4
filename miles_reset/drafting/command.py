"""``miles-reset draft`` and ``miles-reset doctor``: what no plugin declares yet, and a plugin for it."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from miles_reset.drafting.drafted import Drafted

Json = Annotated[bool, typer.Option("--json", help="Print plain JSON, and nothing else.")]


def draft(
    name: Annotated[
        str | None,
        typer.Argument(help="The optimizer's class: package.module.Optimizer.", show_default=False),
    ] = None,
    kwargs: Annotated[
        list[str] | None,
        typer.Option(help="Options of the constructor: 'lr=0.1,betas=(0.9,0.99)'. Once for each variant."),
    ] = None,
    factory: Annotated[
        str | None,
        typer.Option(help="module:function that is handed a list of parameters and returns the optimizer."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the plugin, a distribution, into this folder.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Draft the schema of an optimizer: step it, try what a fresh one holds, and hold that to the law.

    The class is imported and built here. What cannot be decided is said, and refused by the draft.
    Exit status 1 if something is undecided.
    """
    from miles_reset.discovery import default_registry
    from miles_reset.drafting.drafter import draft_schema
    from miles_reset.drafting.writing import Call, write_distribution

    if (name is None) == (factory is None):
        raise typer.BadParameter("give a class, or --factory module:function.", param_hint="NAME")
    sys.path.insert(0, "")  # as `python -m` does: the optimizer may be in the current folder
    where = factory or name or ""
    build = _imported(where)
    variants = [_options(text) for text in kwargs or [""]]
    ways = {
        text or "as it is": partial(build, **options)
        for text, options in zip(kwargs or [""], variants, strict=True)
    }
    first, *others = ways
    with Console(stderr=True).status("Stepping the optimizer ..."):
        drafted = draft_schema(ways[first], variants={title: ways[title] for title in others})
    claim = default_registry().claims.get(drafted.schema.target)
    written = []
    if out is not None:
        claimed_by = claim.provider.plugin if claim else ""
        call = Call(_dotted(where, build), variants)
        try:
            written = write_distribution(drafted, out, call, claimed_by=claimed_by)
        except FileExistsError as error:
            raise typer.BadParameter(str(error), param_hint="--out") from error
    untried = _untried(build, variants)
    if as_json:
        data = drafted.to_dict() | {"claimed_by": str(claim.provider) if claim else None, "untried": untried}
        typer.echo(json.dumps(data | {"written": list(map(str, written))}, indent=2))
    else:
        _show(drafted, Console(), untried, f"{claim.provider} claims the class already." if claim else "")
        for path in written:
            typer.echo(f"wrote {path}")
    if not drafted.decided:
        raise typer.Exit(1)


def doctor(
    package: Annotated[
        list[str] | None,
        typer.Option(help="A further top-level package to look into. May be given more than once."),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit status 1 also if an optimizer is unknown.")
    ] = False,
    timeout: Annotated[float, typer.Option(help="Seconds that one library may take to be imported.")] = 60.0,
    as_json: Json = False,
) -> None:
    """List the optimizers of this environment that plugins know, those that they do not, and stale claims.

    Looked at are the libraries in which plugins claim classes, and those that require torch. Each is imported
    in a process of its own. Exit status 1 if a plugin claims what is not there.
    """
    from miles_reset.discovery import load_registry
    from miles_reset.doctor import examine, render

    with Console(stderr=True).status("Looking into the libraries ..."):
        findings = examine(load_registry(), package or (), timeout)
    if as_json:
        typer.echo(json.dumps({"libraries": [one.to_dict() for one in findings]}, indent=2))
    else:
        Console().print(render(findings), soft_wrap=True)
    if any(one.stale for one in findings) or (strict and any(one.unknown for one in findings)):
        raise typer.Exit(1)


def _imported(name: str) -> Callable[..., Any]:
    """Import what a user named, as ``module:function`` or ``module.Class``."""
    module, _, attribute = name.partition(":") if ":" in name else name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise typer.BadParameter(f"{name!r} cannot be imported: {error}", param_hint="NAME") from error
    if not callable(found):
        raise typer.BadParameter(
            f"{name!r} is a {type(found).__name__}, and builds nothing.", param_hint="NAME"
        )
    return found  # type: ignore[no-any-return]  # it can be called


def _options(text: str) -> dict[str, Any]:
    """Read options as they stand in a call."""
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        assert isinstance(call, ast.Call)
        if call.args or any(word.arg is None for word in call.keywords):
            raise ValueError("give each as name=value")  # as for what cannot be read
        return {word.arg or "": ast.literal_eval(word.value) for word in call.keywords}
    except (SyntaxError, ValueError, AssertionError) as error:
        raise typer.BadParameter(f"{text!r} cannot be read: {error}", param_hint="--kwargs") from error


def _dotted(where: str, build: Any) -> str:
    return f"{build.__module__}.{build.__qualname__}" if isinstance(build, type) else where


def _untried(build: Any, variants: list[dict[str, Any]]) -> list[str]:
    """Return the options of a constructor that switch something, and that no variant sets."""
    try:
        taken: Mapping[str, inspect.Parameter] = inspect.signature(build).parameters
    except (TypeError, ValueError):
        return []
    given = {key for options in variants for key in options}
    quiet = {"foreach", "fused", "capturable", "differentiable", "maximize"}
    return [
        key
        for key, one in taken.items()
        if isinstance(one.default, bool) and key not in given and key not in quiet
    ]


def _show(drafted: Drafted, console: Console, untried: list[str], claimed: str) -> None:
    console.print(Text(drafted.schema.target, style="bold cyan"))
    if claimed:
        console.print(Text(claimed, style="yellow"), soft_wrap=True)
    table = Table("key", "place", "role", "seen first", "fresh value", "evidence", "in place?")
    for one in drafted.decisions:
        fresh = str(one.slot.role) if one.slot.initial is None else str(one.slot.initial)
        words = (one.slot.key, str(one.slot.at), str(one.slot.role), one.seen, fresh, one.evidence)
        table.add_row(*map(Text, words), "" if one.undecided else "yes" if one.in_place else "no")
    console.print(table if drafted.decisions else Text("It remembers nothing that was found.", style="dim"))
    for schema in drafted.schemas[1:]:
        console.print(Text(f"Also declared, for it is kept in the state: {schema.target}"), soft_wrap=True)
    for note in drafted.notes:
        console.print(Text(note, style="yellow"), soft_wrap=True)
    if untried:
        console.print(
            Text(f"Not tried, and each may keep other state: {', '.join(untried)}. Give --kwargs."),
            soft_wrap=True,
        )
    if drafted.failure:
        console.print(Text(f"Undecided: {drafted.failure}", style="red"), soft_wrap=True)
    else:
        held = f"The law holds in {len(drafted.variants)} variant{'s' * (len(drafted.variants) > 1)}."
        console.print(Text(f"{held} {drafted.tried} tried.", style="green"))
