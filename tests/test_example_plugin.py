"""The example of a whole distribution: built, installed, listed, used, and tested by its own test."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from fakes import fresh_environment

EXAMPLE = Path(__file__).parent.parent / "docs" / "examples" / "miles-reset-calm"

USE = """
import torch
from calm import Calm
from miles_reset import reset_optimizer_states

weight = torch.nn.Parameter(torch.ones(2))
weight.grad = torch.ones(2)
optimizer = Calm([weight])
optimizer.step()
(mean,) = (state["mean"] for state in optimizer.state.values())
assert mean.any()
report = reset_optimizer_states(optimizer)
assert not mean.any()
print(*(f"{line.path} {line.key} {line.plugin}" for line in report.lines), sep="\\n")
"""


@pytest.mark.slow
def test_the_example_is_installed_listed_used_and_passes_its_own_test(tmp_path: Path) -> None:
    """One test, for the environment takes longer than what is done in it."""
    source = shutil.copytree(EXAMPLE, tmp_path / "miles-reset-calm")  # builds leave files behind
    python = fresh_environment(tmp_path / "environment")

    def run(*command: str | Path) -> str:
        done = subprocess.run(command, cwd=source, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(python, "-m", "pip", "install", ".[test]")
    (calm,) = json.loads(run(python.parent / "miles-reset", "plugins", "calm", "--json"))["plugins"]
    assert (calm["name"], calm["distribution"], calm["version"]) == ("calm", "miles-reset-calm", "0.1.0")
    assert {claim["target"]: claim["status"] for claim in calm["claims"]} == {"calm.Calm": "ok"}
    assert run(python, "-c", USE) == "Calm mean calm\nCalm decay calm\n"
    assert "2 passed" in run(python, "-m", "pytest", "-p", "no:cacheprovider")
