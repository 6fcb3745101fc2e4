"""``miles-reset``: what plugins declare, resume policies, checkpoints, and a demonstration.

Exit statuses: 0; 1 for an error that miles_reset raises on purpose; 2 for a wrong use of the command.
"""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from miles_reset.drafting import command as drafting

if TYPE_CHECKING:
    from miles_reset.registry import Claim, Registry


class _Commands(TyperGroup):
    """The commands; an error of miles_reset's own becomes one message."""

    def invoke(self, ctx: Any) -> Any:
        from miles_reset.errors import ResetError

        try:
            return super().invoke(ctx)
        except ResetError as error:
            Console(stderr=True).print(Text(f"Error: {error}"), style="red", soft_wrap=True)
            raise typer.Exit(1) from error


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
    help="Reset the state of any PyTorch optimizer tree to what a freshly built one holds.",
)

app.command()(drafting.draft)
app.command()(drafting.doctor)

Json = drafting.Json


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"miles-reset {metadata.version('miles-reset')}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Take the options that stand before a command."""


@app.command()
def plugins(
    name: Annotated[
        str | None, typer.Argument(help="Show one plugin, and each class that it claims.")
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show each class that is claimed.")
    ] = False,
    timeout: Annotated[float, typer.Option(help="Seconds that one library may take to be imported.")] = 120.0,
    as_json: Json = False,
) -> None:
    """List the installed plugins, and whether the classes that they claim are there.

    To find out, each library that is installed is imported, in a process of its own.
    """
    from miles_reset.catalogue import claims_of, plugin_dict, plugin_list, plugins_table
    from miles_reset.discovery import DISABLE, ENTRY_POINTS, load_registry
    from miles_reset.libraries import resolve

    registry = load_registry()
    loaded = [provider.plugin for provider in registry.providers]
    providers = [provider for provider in registry.providers if name in (None, provider.plugin)]
    if not providers:
        known = f"Loaded: {', '.join(loaded) or 'none'}."
        raise typer.BadParameter(f"no plugin {name!r} is loaded. {known}", param_hint="NAME")
    disabled = sorted({point.name for point in metadata.entry_points(group=ENTRY_POINTS)} - {*loaded})
    claims = {provider: claims_of(registry, provider) for provider in providers}
    with Console(stderr=True).status("Importing the libraries ..."):
        resolved = resolve((target for claimed in claims.values() for target in claimed), timeout)
    if as_json:
        listed = [plugin_dict(provider, claims[provider], resolved, registry) for provider in providers]
        _print_json({"plugins": listed, "disabled": disabled})
        return
    console = Console()
    if verbose or name is not None:
        for provider in providers:
            console.print(plugin_list(provider, claims[provider], resolved, registry), soft_wrap=True)
    else:
        console.print(plugins_table(claims, resolved, registry))
    if disabled:
        off = f"Disabled by {DISABLE}: {', '.join(disabled)}."
        console.print(Text(off, style="yellow"), soft_wrap=True)


@app.command()
def schema(
    name: Annotated[str, typer.Argument(help="A class: torch.optim.adamw.AdamW, or just adamw.")],
    as_json: Json = False,
) -> None:
    """Show the schema, or the unwrap rule, of a class."""
    from miles_reset.catalogue import claim_dict, render_claim
    from miles_reset.discovery import load_registry

    claim = _find(load_registry(), name)
    if as_json:
        _print_json(claim_dict(claim))
    else:
        Console().print(render_claim(claim))


def _find(registry: Registry, name: str) -> Claim:
    """Find a claim by a dotted name from which leading and middle parts may be missing."""
    from difflib import get_close_matches

    if name in registry.claims:
        return registry.claims[name]
    asked = name.lower().split(".")
    found = [target for target in registry.claims if _is_short_for(asked, target.lower().split("."))]
    if len(found) == 1:
        return registry.claims[found[0]]
    if found:
        raise typer.BadParameter(f"{name!r} is any of {', '.join(found)}.", param_hint="NAME")
    last = {target.rpartition(".")[2].lower(): target for target in registry.claims}
    near = [last[close] for close in get_close_matches(asked[-1], last, n=5)]
    hint = f"Near it: {', '.join(near)}." if near else "miles-reset plugins --verbose lists all."
    raise typer.BadParameter(f"no plugin declares {name!r}. {hint}", param_hint="NAME")


def _is_short_for(asked: list[str], target: list[str]) -> bool:
    """Say whether the parts asked for are among the target's, in their order, down to the last."""
    rest = iter(target)
    return asked[-1] == target[-1] and all(part in rest for part in asked)


policy = typer.Typer(no_args_is_help=True, help="Check resume policies, and list named ones.")
app.add_typer(policy, name="policy")


@policy.command("check")
def policy_check(
    file: Annotated[Path, typer.Argument(help="A policy, TOML or YAML.")], as_json: Json = False
) -> None:
    """Say what a policy file chooses, or what is wrong with it."""
    from miles_reset.policy import ResumePolicy
    from miles_reset.preview import policy_table

    checked = ResumePolicy.from_file(file)
    if as_json:
        _print_json(checked.model_dump())
    else:
        Console().print(policy_table(checked))


@policy.command("schema")
def policy_schema() -> None:
    """Print the JSON Schema of policies, for editors."""
    from miles_reset.policy import ResumePolicy

    _print_json(ResumePolicy.model_json_schema())


@policy.command("presets")
def policy_presets(
    name: Annotated[str | None, typer.Argument(help="Print one, as TOML.")] = None, as_json: Json = False
) -> None:
    """List the named policies, or print one to start from."""
    from miles_reset.policy import PRESETS, ResumePolicy
    from miles_reset.preview import as_toml, presets_table

    if name is not None:
        typer.echo(as_toml(ResumePolicy.preset(name), PRESETS[name][0]), nl=False)
    elif as_json:
        _print_json({key: {"what": what, "policy": chosen} for key, (what, chosen) in PRESETS.items()})
    else:
        Console().print(presets_table())


Rank = Annotated[int, typer.Option(help="Whose part of the checkpoint.", min=0)]
Allow = Annotated[
    list[str] | None, typer.Option(help="A dotted name that may be unpickled. May be given more than once.")
]


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="A checkpoint: a file or a folder.")],
    rank: Rank = 0,
    allow: Allow = None,
    as_json: Json = False,
) -> None:
    """Show what a checkpoint holds, part by part, without loading it."""
    from miles_reset.checkpoint.opening import open_checkpoint
    from miles_reset.preview import checkpoint_tree

    found = open_checkpoint(path, rank=rank, allow=allow or ())
    if as_json:
        _print_json(found.to_dict())
    else:
        Console().print(checkpoint_tree(found))


@app.command()
def plan(
    path: Annotated[Path, typer.Argument(help="A checkpoint: a file or a folder.")],
    policy_file: Annotated[Path, typer.Option("--policy", help="A policy, TOML or YAML.")],
    rank: Rank = 0,
    as_json: Json = False,
) -> None:
    """Preview what a policy does with a checkpoint. A trainer's own plan also tells the rate after it."""
    from miles_reset.checkpoint.opening import open_checkpoint
    from miles_reset.policy import ResumePolicy
    from miles_reset.preview import preview, preview_table

    chosen = ResumePolicy.from_file(policy_file)
    found = open_checkpoint(path, rank=rank, allow=chosen.allow)
    lines = preview(chosen, found)
    if as_json:
        _print_json({"parts": [line._asdict() for line in lines]})
    else:
        Console().print(preview_table(lines, str(path), found))
    if any(line.outcome == "refuse" for line in lines):
        raise typer.Exit(1)


@app.command()
def demo(
    chart: Annotated[
        Path, typer.Option(dir_okay=False, writable=True, help="Where to write the chart, a PNG file.")
    ] = Path("miles-reset-demo.png"),
    as_json: Json = False,
) -> None:
    """Reset a small real model's optimizer, prove it, and show what naive ways do.

    On the CPU, under Megatron's own optimizers where they are installed; it takes less than half a minute.
    """
    if not chart.absolute().parent.is_dir():
        raise typer.BadParameter(f"the folder of {str(chart)!r} is not there.", param_hint="--chart")
    from miles_reset.demo import run

    result = run(Console(quiet=as_json), chart)
    if as_json:
        _print_json(result.to_dict())
    if not result.proven:
        raise typer.Exit(1)


def _print_json(data: object) -> None:
    typer.echo(json.dumps(data, indent=2, allow_nan=False))
