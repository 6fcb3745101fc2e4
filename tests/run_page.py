"""Run the code blocks of a page in order, as a reader would, and compare what they print.

- A block with a title is a file.
- A ``python`` block runs, in one namespace for the page; so does a ``console`` block, in a shell.
- What a block prints, an error included, must be what the page shows: in the ``text`` block that
  follows a ``python`` block, or below a command. ``...`` stands for anything, and space for any space.
"""

import contextlib
import difflib
import importlib
import io
import re
import subprocess
import sys
import traceback
from collections.abc import Iterator
from doctest import ELLIPSIS, NORMALIZE_WHITESPACE, OutputChecker
from pathlib import Path
from typing import Any, NamedTuple

FENCE = re.compile(r'^```(?P<language>\w*)(?: title="(?P<title>[^"]+)")?\n(?P<body>.*?)^```$', re.M | re.S)


class Block(NamedTuple):
    line: int
    language: str
    title: str | None
    body: str


def blocks(page: str) -> Iterator[Block]:
    """Yield the fenced blocks of a page; a fence that is not understood is an error."""
    understood = len(FENCE.findall(page))
    assert len(re.findall("^ *```", page, re.M)) == 2 * understood, "a fence that is not understood"
    for match in FENCE.finditer(page):
        line = page.count("\n", 0, match.start()) + 1
        yield Block(line, match["language"], match["title"], match["body"])


def run(page: Path, namespace: dict[str, Any]) -> int:
    """Run a page in the current folder; return the number of blocks that ran or became files."""
    count, shown = 0, list(blocks(page.read_text()))
    for before, block, following in zip([None, *shown], shown, [*shown[1:], None], strict=False):
        where = f"{page.name}:{block.line}"
        if block.title:
            write(block.title, block.body, page)
        elif block.language == "python":
            expected = following.body if following and following.language == "text" else ""
            compare(where, expected, output_of(block.body, where, namespace, shown=bool(expected)))
        elif block.language == "console":
            for command, expected in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n?)*)", block.body, re.M):
                done = subprocess.run(command, shell=True, text=True, stdout=-1, stderr=subprocess.STDOUT)
                compare(f"{where}: {command}", expected, done.stdout)
        else:
            assert block.language == "text", f"{where}: what is a block of {block.language!r}?"
            printed = before is not None and before.language == "python" and not before.title
            assert printed, f"{where}: what prints this?"
            continue
        count += 1
    return count


def write(title: str, body: str, page: Path) -> None:
    """Write a file, and have its module imported anew; ``--8<--`` takes the text from elsewhere."""
    if included := re.fullmatch(r'--8<-- "(.+)"\n', body):
        body = (page.parent.parent / included[1]).read_text()
    path = Path(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(body)
    sys.modules.pop(path.stem, None)
    importlib.invalidate_caches()


def output_of(source: str, where: str, namespace: dict[str, Any], *, shown: bool) -> str:
    """Run a block and return what it prints, with the last line of the error that ends it, if any.

    An error that the page does not show at all is printed in full.
    """
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            exec(compile(source, where, "exec"), namespace)
        except Exception as error:  # noqa: BLE001  # which one, the page says
            out.write(traceback.format_exception_only(error)[-1])
            if not shown:
                traceback.print_exc()
    return out.getvalue()


def compare(where: str, expected: str, got: str) -> None:
    if not OutputChecker().check_output(expected, got, ELLIPSIS | NORMALIZE_WHITESPACE):
        lines = difflib.unified_diff(
            expected.splitlines(), got.splitlines(), "the page", "the truth", lineterm="", n=99
        )
        sys.exit(f"{where}\n" + "\n".join(lines))


if __name__ == "__main__":
    sys.path.insert(0, "")
    print(f"{run(Path(sys.argv[1]).resolve(), {'__name__': '__main__'})} blocks ran")
