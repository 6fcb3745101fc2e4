"""The tutorial is true: its blocks run, in order, in an environment of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import run_page
from fakes import fresh_environment

from miles_reset import Initial

PAGE = Path(__file__).parent.parent / "docs" / "writing-a-plugin.md"


def run(page: Path, folder: Path, python: Path = Path(sys.executable)) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    environment = {**os.environ, "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "100"}
    command = [python, run_page.__file__, page]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_the_tutorial_runs_as_it_is_printed(tmp_path: Path) -> None:
    done = run(PAGE, tmp_path / "reader", fresh_environment(tmp_path / "environment"))
    assert done.returncode == 0, done.stderr
    ran = [block for block in run_page.blocks(PAGE.read_text()) if block.language != "text"]
    assert done.stdout == f"{len(ran)} blocks ran\n"


def test_the_tutorial_s_table_has_every_initial_value() -> None:
    words = {name for name, it in vars(Initial).items() if isinstance(it, (Initial, classmethod))}
    table = re.findall(r"^\| `(?:Initial)?\.(\w+)", PAGE.read_text(), re.M)
    assert sorted(table) == sorted({*words, "as_dtype"})


@pytest.mark.parametrize(
    ("page", "complaint"),
    [
        ("```python\nprint(1)\n```\n\n```text\n1\n```\n", ""),
        ("```python\nprint(1)\n```\n\n```text\n2\n```\n", "page.md:1\n--- the page\n+++ the truth"),
        ("```python\nprint(1)\n```\n", "+1"),
        ("```python\n1 / 0\n```\n", "+ZeroDivisionError: division by zero"),
        ("```python\n1 / 0\n```\n\n```text\nZeroDivisionError: division ...\n```\n", ""),
        ("```python\n1\n```\n\n```text\nsomething\n```\n", "-something"),
        (
            '```python title="m.py"\nx = 1\n```\n\n```python\nimport m\nassert m.x == 2\n```\n',
            "AssertionError",
        ),
        ("```console\n$ echo one\none\n$ echo two\ntwo\n```\n", ""),
        ("```console\n$ echo one\n$ echo two\ntwo\n```\n", "page.md:1: echo one"),
        ("```text\n1\n```\n", "what prints this?"),
        ("```ruby\nputs 1\n```\n", "what is a block of 'ruby'?"),
        ("```python {hl_lines=1}\nprint(1)\n```\n", "a fence that is not understood"),
    ],
)
def test_a_page_that_is_not_true_is_found_out(tmp_path: Path, page: str, complaint: str) -> None:
    (tmp_path / "page.md").write_text(page)
    done = run(tmp_path / "page.md", tmp_path / "reader")
    assert (done.returncode == 0) == (not complaint), done.stderr
    assert complaint in done.stderr
