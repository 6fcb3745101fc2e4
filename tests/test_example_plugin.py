"""The example of a whole distribution: built, installed, listed, used, and tested by its own test."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from fakes import fresh_environment

EXAMPLE = Path(__file__).parent.parent / "docs" / "examples" / "miles-reset-lion"

USE = """
import torch
from lion_pytorch import Lion
from miles_reset import reset_optimizer_states

weight = torch.nn.Parameter(torch.ones(2))
weight.grad = torch.ones(2)
optimizer = Lion([weight])
optimizer.step()
(average,) = (state["exp_avg"] for state in optimizer.state.values())
assert average.any()
report = reset_optimizer_states(optimizer)
assert not average.any()
print(*(f"{line.path} {line.key} {line.plugin}" for line in report.lines), sep="\\n")
"""


@pytest.mark.slow
def test_the_example_is_installed_listed_used_and_passes_its_own_test(tmp_path: Path) -> None:
    """One test, for the environment takes longer than what is done in it."""
    source = shutil.copytree(EXAMPLE, tmp_path / "miles-reset-lion")  # builds leave files behind
    python = fresh_environment(tmp_path / "environment")

    def run(*command: str | Path) -> str:
        done = subprocess.run(command, cwd=source, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(python, "-m", "pip", "install", ".[test]")
    (lion,) = json.loads(run(python.parent / "miles-reset", "plugins", "lion", "--json"))["plugins"]
    assert (lion["name"], lion["distribution"], lion["version"]) == ("lion", "miles-reset-lion", "0.1.0")
    assert {claim["target"]: claim["status"] for claim in lion["claims"]} == {
        "lion_pytorch.cautious_lion.Lion": "ok",
        "lion_pytorch.foreach.Lion": "ok",
        "lion_pytorch.lion_pytorch.Lion": "ok",
    }
    assert run(python, "-c", USE) == "Lion exp_avg lion\n"
    assert "3 passed" in run(python, "-m", "pytest", "-p", "no:cacheprovider")
