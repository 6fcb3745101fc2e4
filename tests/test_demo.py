"""The demo: that it shows the truth, that it can fail, and that it leaves no trace."""

import json
import logging
import math
import os
import subprocess
import sys
import time
import warnings
from functools import partial

import fakes
import pytest
import torch
from torch.overrides import _get_current_function_mode_stack
from typer.testing import CliRunner

from miles_reset.cli import app
from miles_reset.demo import _jobs, ways
from miles_reset.demo.pictures import draw, table
from miles_reset.demo.training import job_of, torch_job
from miles_reset.demo.ways import LEFT, RIGHT, Outcome, compare_ways, prove

ZEROED_MOMENTS, ZEROED_TENSORS, CLEARED = list(ways.WAYS)[2:]

# An environment where some packages are not installed, as far as an import can tell.
WITHOUT = """
import sys
from importlib.abc import MetaPathFinder

class Absent(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
from miles_reset.cli import app
app()
"""
MEGATRON = {"megatron", "emerging_optimizers"}


def run_demo(folder, *arguments, absent=frozenset()):
    """Run the command in a process of its own, in an empty folder."""
    return subprocess.run(
        [sys.executable, "-c", WITHOUT.format(absent=set(absent)), "demo", *arguments],
        cwd=folder,
        env=os.environ | {"COLUMNS": "100"},
        capture_output=True,
        text=True,
    )


def traces():
    """Return what a run might leave behind in this process."""
    return {
        "torch.cuda": dict(vars(torch.cuda)),
        "torch.distributed": dict(vars(torch.distributed)),
        "process group": torch.distributed.is_initialized(),
        "modes": _get_current_function_mode_stack(),
        "threads": torch.get_num_threads(),
        "stance": torch._dynamo.eval_frame._stance.stance,
        "random numbers": torch.get_rng_state().tolist(),
        "warnings": list(warnings.filters),
        "log": logging.getLogger("torch.utils.cpp_extension").level,
        "environment": dict(os.environ),
    }


def of(found, optimizer, way):
    (outcome,) = [one for one in found["ways"] if (one["optimizer"], one["way"]) == (optimizer, way)]
    return outcome


def assert_resumed(found):
    """See the rates of a cosine from 1 to 0, and what a tenth of them at the start leads to."""
    right, policy, plain, lost = found["resume"]["rates"].values()
    assert found["resume"]["same"] is True
    assert policy == right
    assert right[0] == pytest.approx(0.5)
    assert plain[0] == lost[0] == 0.1
    assert plain[25] == pytest.approx(0.1 * (1 - math.sqrt(0.5)))
    assert "learning rate 0.5." in found["resume"]["plan"]


def assert_proven(found):
    assert found["proof"]["same"] is True
    assert found["proof"]["max_difference"] == 0
    assert found["proof"]["steps"] == 5
    assert found["proof"]["numbers"] > 1000
    assert found["weights_moved"] is False
    assert found["training"]["last_loss"] < found["training"]["first_loss"] / 2
    assert found["plan"] == found["report"]
    assert sum(line["values"] for line in found["plan"]["lines"]) == sum(found["report"]["values"].values())


def assert_ways_are_told_apart(found, *optimizers):
    assert {one["optimizer"] for one in found["ways"]} == {*optimizers, "NAdam", "Adagrad"}
    for outcome in found["ways"]:
        if outcome["way"] == RIGHT:
            assert outcome["same"]
            assert set(outcome["sizes"]) == {1.0}
            assert len(outcome["sizes"]) == 20
        if outcome["way"] == LEFT:
            assert not outcome["same"]
            assert outcome["degrees"] > 20
    moments = of(found, "AdamW", ZEROED_MOMENTS)
    # With both moments zeroed, only the corrections for their bias are those of the count that is kept.
    count = found["training"]["steps"] + 1
    corrections = (1 - 0.9**count) / math.sqrt(1 - 0.999**count)
    assert moments["sizes"][0] == pytest.approx((1 - 0.9) / math.sqrt(1 - 0.999) / corrections, rel=0.05)
    assert moments["sizes"][0] > 1.5
    assert of(found, "NAdam", ZEROED_MOMENTS)["sizes"][0] > 1.5
    assert of(found, "Adagrad", ZEROED_TENSORS)["sizes"][0] > 1.5
    assert of(found, "NAdam", ZEROED_TENSORS)["sizes"][0] < 1 / 1.5
    assert of(found, "AdamW", ZEROED_TENSORS)["same"]
    cleared = of(found, "AdamW", CLEARED)
    assert cleared["same"]
    assert not cleared["in_place"]


def assert_is_png(path):
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(data) > 10_000


@pytest.mark.slow
def test_the_demo_under_megatron_proves_the_reset_and_leaves_no_trace(tmp_path, monkeypatch):
    pytest.importorskip("emerging_optimizers")
    parallel_state = pytest.importorskip("megatron.core.parallel_state")
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    before, start = traces(), time.process_time()
    result = CliRunner().invoke(app, ["demo", "--json"])
    # Of the processor, not of the wall: others may be at work.
    assert time.process_time() - start < 30
    assert traces() == before
    assert not parallel_state.model_parallel_is_initialized()
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["fallback"] is None
    paths = {line["path"] for line in found["plan"]["lines"]}
    wrapper = "Float16OptimizerWithFloat16Params"
    assert paths == {
        f"ChainedOptimizer[0].{wrapper}.TensorParallelMuon",
        f"ChainedOptimizer[1].{wrapper}.AdamW",
    }
    assert_proven(found)
    assert_ways_are_told_apart(found, "TensorParallelMuon", "AdamW")
    assert found["chart"] == "miles-reset-demo.png"
    charts = ["miles-reset-demo-resume.png", "miles-reset-demo.png"]
    assert sorted(path.name for path in tmp_path.iterdir()) == charts
    for name in charts:
        assert_is_png(tmp_path / name)
    assert_resumed(found)


@pytest.mark.slow
def test_the_demo_under_megatron_says_little_and_nothing_else(tmp_path):
    pytest.importorskip("emerging_optimizers")
    pytest.importorskip("megatron.core")
    done = run_demo(tmp_path, "--chart", "here.png")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert len(lines) <= 75
    assert max(map(len, lines)) <= 100
    assert "TensorParallelMuon" in done.stdout
    assert "all bits are the same" in done.stdout


@pytest.mark.slow
def test_the_demo_without_megatron_proves_the_reset_of_torchs_optimizers(tmp_path):
    pytest.importorskip("matplotlib")
    done = run_demo(tmp_path, "--json", "--chart", "there.png", absent=MEGATRON)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["fallback"] == "No module named 'emerging_optimizers'"
    assert {line["path"] for line in found["plan"]["lines"]} == {"list[0].SGD", "list[1].AdamW"}
    assert_proven(found)
    assert_ways_are_told_apart(found, "SGD", "AdamW")
    # With dampening, the first gradient counts in full; beside a zeroed buffer, a tenth of it.
    assert of(found, "SGD", ZEROED_TENSORS)["sizes"][0] == pytest.approx(0.1, rel=1e-4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["there-resume.png", "there.png"]
    assert_is_png(tmp_path / "there.png")
    assert_is_png(tmp_path / "there-resume.png")
    assert_resumed(found)


@pytest.mark.slow
def test_the_demo_says_what_it_goes_without(tmp_path):
    done = run_demo(tmp_path, absent=MEGATRON | {"matplotlib"})
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "Without Megatron (No module named 'emerging_optimizers'): torch's own SGD and AdamW."
    assert lines[-1] == "No charts: matplotlib is not installed. Get it with: pip install 'miles-reset[demo]'"
    assert len(lines) <= 75
    assert max(map(len, lines)) <= 100
    assert not list(tmp_path.iterdir())


LIAR = """
from miles_reset import StateSchema, hookimpl, kept

KEYS = ("exp_avg", "exp_avg_sq", "step", "momentum_buffer", "mu_product", "sum")

@hookimpl
def miles_reset_schemas():
    return [
        StateSchema("torch.optim.optimizer.Optimizer",
            *(kept(key) for key in KEYS)),
    ]
"""


@pytest.mark.slow
def test_a_reset_that_is_not_one_fails_the_demo(tmp_path, monkeypatch):
    names = {"name": "liar", "module": "miles_reset_liar", "distribution": "liar", "version": "1"}
    fakes.install(tmp_path / "liar", LIAR, **names)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "liar"), prepend=os.pathsep)
    monkeypatch.setenv("MILES_RESET_DISABLE", "torch")
    done = run_demo(tmp_path, absent=MEGATRON | {"matplotlib"})
    assert done.returncode == 1
    assert "THEY DIFFER" in done.stdout


def test_a_chart_without_a_folder_is_a_wrong_use_said_before_the_work(tmp_path):
    start = time.process_time()
    result = CliRunner().invoke(app, ["demo", "--chart", str(tmp_path / "none" / "chart.png")])
    assert result.exit_code == 2
    assert time.process_time() - start < 1


def test_megatron_that_fails_is_said_and_undone(monkeypatch):
    pytest.importorskip("emerging_optimizers")
    optimizer = pytest.importorskip("megatron.core.optimizer")
    monkeypatch.setattr(optimizer, "get_megatron_optimizer", lambda *_: 1 / 0)
    before = traces()
    with _jobs() as (build, fallback):
        assert build is torch_job
        assert fallback == "division by zero"
        assert traces() == before


def test_a_process_group_that_is_there_is_left_as_it_is():
    pytest.importorskip("emerging_optimizers")
    pytest.importorskip("megatron.core")
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        before = traces()
        with _jobs() as (build, fallback):
            assert build is torch_job
            assert "default process group twice" in fallback
            assert traces() == before
        assert torch.distributed.is_initialized()
    finally:
        torch.distributed.destroy_process_group()


def trained(build, steps=30):
    job = build()
    for i in range(steps):
        job.step(i)
    return job


def test_the_proof_fails_without_a_reset_and_holds_with_one():
    job = trained(torch_job)
    proof = prove(job, torch_job().take_over(job, history=False), 30, 2)
    assert not proof.same
    assert proof.max_difference > 0
    ways.WAYS[RIGHT](job)
    proof = prove(job, torch_job().take_over(job, history=False), 32, 2)
    assert proof.same
    assert proof.max_difference == 0


def test_the_proof_sees_a_difference_in_the_last_step_and_the_last_bit():
    job = trained(torch_job)
    ways.WAYS[RIGHT](job)
    twin = torch_job().take_over(job, history=False)
    head = twin.net.head.weight
    with torch.no_grad():
        head[0, -1] = torch.nextafter(head[0, -1], torch.tensor(9.0))
    assert not prove(job, twin, 30, 1).same


def test_a_copy_with_history_goes_on_as_the_job_does_and_shares_nothing():
    job = trained(torch_job)
    assert prove(torch_job().take_over(job, history=True), job, 30, 3).same


class Eager(torch.optim.SGD):
    """Makes its state when it is built, as some optimizers do, and counts on it."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1, momentum=0.9)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["momentum_buffer"].mul_(1)
        return super().step(closure)


def test_what_a_naive_way_leads_to_is_its_outcome_even_if_that_is_an_error():
    build = partial(job_of, Eager)
    outcomes = {outcome.way: outcome for outcome in compare_ways(build, trained(build), 30, 2)}
    assert outcomes[RIGHT].same
    assert outcomes[RIGHT].in_place
    assert outcomes[CLEARED] == Outcome("Eager", CLEARED, error="KeyError('momentum_buffer')")


def test_outcomes_are_drawn_and_tabled_though_one_failed(tmp_path):
    pytest.importorskip("matplotlib")
    good = Outcome("Adam", RIGHT, (1.0, 1.0), 0.0, same=True, in_place=True)
    outcomes = [good if way == RIGHT else Outcome("Adam", way, error="KeyError('sum')") for way in ways.WAYS]
    assert draw(outcomes, tmp_path / "chart.png")
    assert_is_png(tmp_path / "chart.png")
    assert table(outcomes).row_count == len(ways.WAYS)
