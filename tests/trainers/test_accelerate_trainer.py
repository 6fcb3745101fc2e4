"""Accelerate resumes by a policy: the rate of the uninterrupted run, with a fresh optimizer."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from miles_reset import CheckpointError, ResumePolicy, reset_optimizer_states

pytest.importorskip("accelerate")
from accelerate import Accelerator
from tiny_accelerate import Run

from miles_reset.testing import Parameters, Trial, assert_reset_is_fresh, trial_of
from miles_reset_accelerate import resume_accelerate


@pytest.fixture(scope="module", params=[1, 2])
def saved(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run, int]:
    """The checkpoint after 4 of 8 steps of a run."""
    run = Run(optimizers=request.param)
    run.train(4)
    folder = tmp_path_factory.mktemp("run") / "c"
    run.accelerator.save_state(str(folder))
    run.train(4)
    return folder, run, request.param


def policy(**choices: Any) -> ResumePolicy:
    return ResumePolicy.from_dict(choices)


def test_a_fresh_optimizer_goes_on_at_the_rate_of_the_run(saved: Any) -> None:
    folder, straight, count = saved
    again = Run(lr=77.0, optimizers=count)
    reports = resume_accelerate(again.accelerator, folder, policy(optimizer="fresh"))
    assert len(reports) == count
    assert again.clock() == 0
    again.train(4)
    assert again.rates == straight.rates[4:]
    assert again.clock() == 4


def test_everything_restored_is_the_run_itself(saved: Any) -> None:
    folder, straight, count = saved
    again = Run(lr=77.0, optimizers=count)
    resume_accelerate(again.accelerator, folder, policy())
    again.train(4)
    assert again.rates == straight.rates[4:]
    assert torch.equal(again.model.weight, straight.model.weight)


def test_a_fresh_scheduler_starts_at_the_new_rate(saved: Any) -> None:
    folder, _, count = saved
    again = Run(lr=2.0, optimizers=count)
    rate = again.optimizer.param_groups[0]["lr"]
    resume_accelerate(again.accelerator, folder, policy(scheduler="fresh"))
    assert again.optimizer.param_groups[0]["lr"] == rate
    assert again.clock() == 4


@pytest.mark.parametrize("action", ["fresh", "restore"])
def test_random_numbers_are_the_policys(saved: Any, action: str) -> None:
    folder, _, count = saved
    again = Run(optimizers=count)
    random.seed(123)
    torch.manual_seed(123)
    there = random.getstate(), torch.get_rng_state()
    resume_accelerate(again.accelerator, folder, policy(rng=action))
    assert (random.getstate() == there[0]) == (action == "fresh")
    assert torch.equal(torch.get_rng_state(), there[1]) == (action == "fresh")


def test_a_refusal_changes_nothing(saved: Any, tmp_path: Path) -> None:
    folder, _, count = saved
    for file in folder.iterdir():
        if file.name != "scheduler.bin":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    again = Run(optimizers=count)
    weight = again.model.weight.clone()
    with pytest.raises(CheckpointError, match="scheduler"):
        resume_accelerate(again.accelerator, tmp_path, policy(optimizer="fresh"))
    assert torch.equal(again.model.weight, weight)
    assert again.accelerator._optimizers


def test_its_wrapper_is_unwrapped() -> None:
    run = Run()
    run.train(2)
    reset_optimizer_states(run.optimizer)
    assert run.clock() == 0


@pytest.mark.parametrize("build", [torch.optim.AdamW, torch.optim.NAdam])
def test_a_reset_through_the_wrapper_is_fresh(build: Any) -> None:
    def wrapped(parameters: Parameters) -> Trial:
        return trial_of(Accelerator(cpu=True).prepare(build(parameters, lr=0.01)), parameters)

    assert_reset_is_fresh(wrapped)
