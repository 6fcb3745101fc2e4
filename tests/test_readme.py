"""The README, and the page on resume policies, are true: their blocks run and print what is shown."""

from pathlib import Path
from typing import Any

import pytest
import run_page

README = Path(__file__).parent.parent / "README.md"


def test_the_blocks_of_the_readme_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = [block for block in run_page.blocks(README.read_text()) if block.language in ("python", "text")]
    page = tmp_path / "README.md"
    page.write_text("".join(f"```{block.language}\n{block.body}```\n" for block in python))
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    assert run_page.run(page, namespace) == sum(block.language == "python" for block in python)
    assert list(tmp_path.iterdir()) == [page]


def test_the_blocks_of_the_page_on_policies_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = README.parent / "docs" / "resume-policies.md"
    monkeypatch.chdir(tmp_path)
    blocks = [block for block in run_page.blocks(page.read_text()) if block.language != "text"]
    assert run_page.run(page, {"__name__": "__main__"}) == len(blocks)


def test_the_blocks_on_partial_resets_run(tmp_path: Path) -> None:
    text = (README.parent / "docs" / "trainers.md").read_text()
    section = text.split("## Forget a part")[1].split("\n## ")[0]
    page = tmp_path / "part.md"
    page.write_text(section)
    assert run_page.run(page, {"__name__": "__main__"}) == 2
