"""A draft as a distribution: a plugin that reads like one written by hand, with its test and its page."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from miles_reset.drafting.deciding import Formula
from miles_reset.drafting.drafted import Decision, Drafted
from miles_reset.schema import Initial, Kind, Place, Role, Slot, StateSchema

_WORDS = {
    Initial.ONES: "ONES", Initial.COPY: "COPY", Initial.NONE: "NONE", Initial.EMPTY: "EMPTY",
    Initial.ABSENT: "ABSENT", Initial.ABSENT_ENTRY: "ABSENT_ENTRY", Initial.ZEROS: "ZEROS",
}  # fmt: skip
_WIDTH = 104


@dataclass(frozen=True)
class Call:
    """How the optimizer is built, for the test.

    Attributes:
        name: The class, or the function that is handed the parameters, by its dotted name.
        variants: The options of each variant, in the order of the draft's.
    """

    name: str
    variants: Sequence[Mapping[str, Any]] = ({},)


def word_source(word: Initial) -> str:
    """Return the source of a word."""
    if word.dtype:
        bare = Initial(word.kind, word.value, word.then, word.otherwise)
        return f"{word_source(bare)}.as_dtype({word.dtype!r})"
    if word in _WORDS and not isinstance(word.value, float):
        return f"Initial.{_WORDS[word]}"
    match word.kind:
        case Kind.CONSTANT:
            return f"Initial.{_WORDS[word]}" if word in _WORDS else f"Initial.constant({word.value!r})"
        case Kind.IDENTITY:
            return "Initial.identity()" if word.value == 1 else f"Initial.identity({word.value!r})"
        case Kind.COMPUTED:
            return f"Initial.computed({word.value.__name__})"
        case Kind.EITHER:
            assert word.then is not None
            assert word.otherwise is not None
            return f"Initial.either({word.value!r}, {word_source(word.then)}, {word_source(word.otherwise)})"
        case Kind.REFUSED:
            return f"Initial.refused({_text(str(word.value))})"
        case _:
            return f"Initial.{word.kind.name.lower()}({word.value!r})"


def _text(words: str) -> str:
    return '"' + " ".join(words.split()).replace("\\", "\\\\").replace('"', "'") + '"'


def slot_source(slot: Slot) -> str:
    """Return the source of a slot."""
    given = [_text(slot.key)]
    if slot.initial is not None and slot.initial != Initial.ZEROS:
        given.append(word_source(slot.initial))
    if slot.at is not Place.STATE:
        given.append(f'at="{slot.at}"')
    return f"{slot.role}({', '.join(given)})"


def schema_source(schema: StateSchema) -> str:
    """Return the source of a schema, several slots to a line, those of one place and role together."""
    lines: list[str] = []
    before: tuple[Place, bool] | None = None
    for slot in schema.slots:
        source, kind = f"{slot_source(slot)},", (slot.at, slot.role in (Role.KEPT, Role.CLOCK))
        if lines and kind == before and len(lines[-1]) + len(source) < _WIDTH - 12:
            lines[-1] += f" {source}"
        else:
            lines.append(source)
        before = kind
    if schema.ready is not None:
        lines.append("ready=_undecided,")
    inside = "".join(f"\n            {line}" for line in lines).rstrip(",")
    return f'        StateSchema("{schema.target}"{"," if inside else ""}{inside}),'


def module_source(drafted: Drafted, library: str) -> str:
    """Return the plugin's module."""
    words = [slot.initial for schema in drafted.schemas for slot in schema.slots if slot.initial is not None]
    formulas = {formula.name: formula for word in words for formula in _formulas(word)}
    body = "\n".join(map(schema_source, drafted.schemas))
    called = {name for name in (*map(str, Role),) if re.search(rf"\b{name}\(", body)}
    names = sorted(
        {"StateSchema", "hookimpl", *called, *({"Initial"} if "Initial." in body else set())}, key=_as_isort
    )
    typing = "from typing import Any\n\n" if formulas or drafted.schema.ready else ""
    return "\n".join(
        [
            f'"""What {drafted.schema.target.rpartition(".")[2]} remembers.\n',
            f"Drafted by ``miles-reset draft`` from {library}, and held to the law.",
            '"""\n',
            f"{typing}from miles_reset import {', '.join(names)}",
            "",
            *(line for formula in formulas.values() for line in _function(formula)),
            *_ready(drafted),
            "",
            "@hookimpl",
            "def miles_reset_schemas() -> list[StateSchema]:",
            f'    """Return the schema of {drafted.schema.target.rpartition(".")[2]}."""',
            "    return [",
            body,
            "    ]  # fmt: skip",
            "",
        ]
    )


def _as_isort(name: str) -> tuple[bool, str]:
    return not name[0].isupper(), name


def _formulas(word: Initial) -> Iterator[Formula]:
    if isinstance(word.value, Formula):
        yield word.value
    for one in (word.then, word.otherwise):
        if one is not None:
            yield from _formulas(one)


def _function(formula: Formula) -> list[str]:
    doc = formula.name.strip("_").replace("_", " ")
    return [
        "",
        f"def {formula.name}(parameter: Any, group: Any, optimizer: Any) -> Any:",
        f'    """Return what a fresh one holds: {doc.removeprefix("fresh ")}."""',
        f"    return {formula.expression}",
        "",
    ]


def _ready(drafted: Drafted) -> list[str]:
    if drafted.schema.ready is None:
        return []
    reason = _text(str(drafted.schema.ready(None)))
    return ["", "def _undecided(optimizer: Any) -> str:", f"    return {reason}", ""]


def names_of(target: str) -> tuple[str, str]:
    """Return the name of the plugin, and of its module, for a class."""
    library = re.sub(r"\W", "_", target.partition(".")[0]).strip("_").lower()
    return library.replace("_", "-"), f"miles_reset_{library}"


def library_of(target: str) -> tuple[str, str]:
    """Return the distribution that a class comes from, and its version, where that is known."""
    package = target.partition(".")[0]
    names = metadata.packages_distributions().get(package, [])
    return (names[0], metadata.version(names[0])) if names else (package, "")


_PYPROJECT = """[build-system]
requires = ["setuptools>=61"]
build-backend = "setuptools.build_meta"

[project]
name = "miles-reset-{plugin}"
version = "0.1.0"
description = "Teaches miles-reset what {cls} of {library} remembers"
readme = "README.md"
requires-python = ">=3.11"
dependencies = ["miles-reset>=0.1"]  # not {library}: a plugin never imports what it describes

[project.optional-dependencies]
test = [{requires}"pytest>=8"]

[project.entry-points.miles_reset]
{entry} = "{module}"  # the plugin's name, and its module

[tool.setuptools]
package-dir = {{"" = "src"}}
py-modules = ["{module}"]

[tool.pytest.ini_options]
pythonpath = ["src"]
testpaths = ["tests"]
"""

_README = """# miles-reset-{plugin}

A plugin for miles-reset, drafted by `miles-reset draft`. It says what {cls} of {library} remembers, so that
`reset_optimizer_states(optimizer)` makes one fresh, bit for bit, inside whatever wraps it.

    pip install '.[test]'
    miles-reset plugins    # lists it
    pytest                 # holds it to the law

Read the schema in `src/{module}.py` beside the optimizer's `step` before you publish it: the draft holds for
what it was tried with, and other options may keep other state.

| Key | At | Fresh value | Why |
|---|---|---|---|
{rows}
{undecided}"""

_TEST = '''"""Hold the schema to the law, with the real optimizer."""

from functools import partial
from importlib import import_module
from typing import Any

import {module}
import pytest
{imports}
BUILD = import_module("{where}").{name}
VARIANTS: list[dict[str, Any]] = [
{variants}
]
{helpers}

@pytest.mark.parametrize("options", VARIANTS)
def test_a_reset_is_fresh(options: dict[str, Any]) -> None:
    registry = load_registry(plugins=[{module}]{disabled})
    assert_reset_is_fresh({build}{law}, registry=registry)
'''

_PARAMETERS = {
    "matrices": "sample_parameters()[:2]",
    "large": "[torch.nn.Parameter(torch.randn(64, 80, generator=torch.Generator().manual_seed(11)))]",
}


def write_distribution(
    drafted: Drafted, folder: Path, call: Call, *, claimed_by: str = "", plugin: str = ""
) -> list[Path]:
    """Write a draft as a distribution, to be read, tested and published.

    Args:
        drafted: The draft.
        folder: Where to; it is made.
        call: How the optimizer is built.
        claimed_by: An installed plugin that claims the class too, and is left out by the test.
        plugin: The plugin's name; by default the library's.

    Returns:
        The files.

    Raises:
        FileExistsError: One of them is there.
    """
    target = drafted.schema.target
    short, module = names_of(plugin or target)
    library, version = library_of(target)
    where, _, name = call.name.replace(":", ".").rpartition(".")
    known = bool(version) and library not in ("torch", "miles-reset")
    rows = "\n".join(map(_row, drafted.decisions))
    undecided = (
        f"\n**Undecided.** The test fails, and a reset is refused: {drafted.failure}\n"
        if drafted.failure
        else ""
    )
    words = {
        "plugin": short, "module": module, "entry": short.replace("-", "_"), "library": library,
        "cls": target.rpartition(".")[2], "rows": rows, "undecided": undecided,
        "requires": f'"{library}>={version}", ' if known else "",
    }  # fmt: skip
    files = {
        "pyproject.toml": _PYPROJECT.format(**words),
        "README.md": _README.format(**words),
        f"src/{module}.py": module_source(drafted, f"{library} {version}".strip()),
        f"tests/test_{module.removeprefix('miles_reset_')}.py": _test(
            drafted, call, module, where, name, claimed_by
        ),
    }
    paths = [folder / path for path in files]
    if there := [str(path) for path in paths if path.exists()]:
        raise FileExistsError(f"{', '.join(there)}: there already. Nothing was written.")
    for path, text in zip(paths, files.values(), strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return paths


def _row(one: Decision) -> str:
    fresh = one.slot.role if one.slot.initial is None else one.slot.initial
    return f"| `{one.slot.key}` | {one.slot.at} | {fresh} | {one.evidence} |"


def _test(drafted: Drafted, call: Call, module: str, where: str, name: str, claimed_by: str) -> str:
    build, law, helpers = "partial(BUILD, **options)", "", ""
    testing, imports = ["assert_reset_is_fresh"], ["from miles_reset import load_registry"]
    if drafted.way:
        for around in reversed(drafted.way.split(", ")):
            build = f"{around}({build})"
        imports.append(f"from miles_reset.drafting import {', '.join(sorted(drafted.way.split(', ')))}")
    if making := _PARAMETERS.get(drafted.setting):
        testing += ["sample_parameters"] if "sample" in making else []
        imports = ["import torch\n", *imports]
        helpers += f"\n\ndef parameters() -> list[torch.nn.Parameter]:\n    return {making}\n"
        law += ", parameters=parameters"
    if not drafted.loads:
        law += ", round_trips=[False]"
    if drafted.forgetful:
        pairs = zip(drafted.variants, call.variants, strict=True)
        forgetful = [dict(options) for title, options in pairs if title in drafted.forgetful]
        helpers = f"FORGETFUL: list[dict[str, Any]] = {forgetful!r}  # these remember nothing\n{helpers}"
        law += ", has_history=options not in FORGETFUL"
    imports.append(f"from miles_reset.testing import {', '.join(testing)}\n")
    return _TEST.format(
        module=module, where=where, name=name, build=build, law=law, helpers=helpers,
        imports="\n".join(imports),
        variants="\n".join(f"    {dict(options)!r}," for options in call.variants),
        disabled=f", disabled=[{claimed_by!r}]" if claimed_by else "",
    )  # fmt: skip
