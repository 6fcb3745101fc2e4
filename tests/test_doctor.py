"""What the doctor finds: known, unknown and stale, also beside libraries that misbehave."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import plugin
from typer.testing import CliRunner

from miles_reset import StateSchema, load_registry, momentum
from miles_reset.cli import app
from miles_reset.doctor import Finding, examine, render
from miles_reset.finding import modules_with_optimizers
from miles_reset.registry import Registry

OPTIMIZERS = """
from torch.optim import SGD, Optimizer
print("hello")

class Claimed(Optimizer):
    def step(self): ...

class Derived(Claimed): ...
class Mine(SGD): ...

class Unknown(Optimizer):
    def step(self): ...

class _Private(Unknown): ...
class NoStep(Optimizer): ...
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "harpsi" / "tests").mkdir(parents=True)
    (tmp_path / "harpsi" / "__init__.py").write_text("")
    (tmp_path / "harpsi" / "optim.py").write_text(OPTIMIZERS)
    (tmp_path / "harpsi" / "tests" / "test_optim.py").write_text("raise SystemExit")
    (tmp_path / "harpsi" / "data.py").write_text("raise RuntimeError('not to be imported')")
    (tmp_path / "harpsi" / "broken.py").write_text(
        "from torch.optim import Optimizer\nclass Broken(Optimizer): ...\nexit(3)"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def registry_of(*targets: str) -> Registry:
    schemas = [StateSchema(target, momentum("m")) for target in targets]
    return load_registry(plugins=[plugin("harpsi", *schemas)], entry_points=False)


def test_only_modules_that_define_optimizers_are_imported(folder: Path) -> None:
    assert sorted(modules_with_optimizers("harpsi")) == ["harpsi.broken", "harpsi.optim"]


@pytest.mark.slow
def test_it_tells_known_from_unknown_and_from_stale(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One test, for one process looks into all libraries: two of them misbehave, and spoil no other."""
    head = "from torch.optim import Optimizer\nclass Bad(Optimizer): ...\n"
    (folder / "virginal.py").write_text(f"{head}import time\ntime.sleep(600)")
    (folder / "spinet.py").write_text(f"{head}import os\nos._exit(7)")
    monkeypatch.setattr("miles_reset.doctor._that_require_torch", lambda sources: ["harpsi"])
    claims = ("harpsi.optim.Claimed", "harpsi.optim.Gone", "virginal.Bad", "not_there.Optimizer")
    found = {one.library: one for one in examine(registry_of(*claims), ["spinet"], timeout=4)}
    assert sorted(found) == ["harpsi", "spinet", "virginal"]
    assert found["virginal"].problems == ("import took more than 4 s",)
    assert found["virginal"].stale == {}, "nobody knows"
    assert found["spinet"].problems == ("import ended Python with exit status 7",)
    harpsi = found["harpsi"]
    assert {one.name.rpartition(".")[2]: one.how for one in harpsi.optimizers} == {
        "Claimed": "exact",
        "Derived": "by its base",
        "Mine": "unknown",
        "Unknown": "unknown",
    }
    assert harpsi.unknown == ["harpsi.optim.Mine", "harpsi.optim.Unknown"]
    assert harpsi.stale == {"harpsi.optim.Gone": ("harpsi", "not found in harpsi")}
    assert harpsi.problems == ("import of harpsi.broken failed: SystemExit(3)",)
    assert json.loads(json.dumps(harpsi.to_dict()))["stale"][0]["target"] == "harpsi.optim.Gone"
    assert render([harpsi])


def test_the_command_s_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    findings: list[Finding] = []

    def fake(registry: Registry, packages: Any, timeout: float) -> list[Finding]:
        asked.append((list(packages), timeout))
        return findings

    monkeypatch.setattr("miles_reset.doctor.examine", fake)
    from miles_reset.doctor import Known

    run = CliRunner().invoke
    assert run(app, ["doctor", "--package", "harpsi"]).exit_code == 0
    assert asked == [(["harpsi"], 60.0)]
    findings.append(Finding("lib", "lib 1", (Known("lib.New"),), {}, ()))
    assert run(app, ["doctor"]).exit_code == 0
    shown = run(app, ["doctor", "--strict"])
    assert shown.exit_code == 1
    assert "unknown  lib.New" in shown.stdout
    findings.append(Finding("lib2", "lib2 1", (), {"lib2.Old": ("two", "not found in lib2 1")}, ()))
    done = run(app, ["doctor", "--json"])
    assert done.exit_code == 1
    assert json.loads(done.stdout)["libraries"][1]["stale"][0]["plugin"] == "two"
