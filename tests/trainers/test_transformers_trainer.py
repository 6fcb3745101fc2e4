"""Hugging Face's Trainer resumes by a policy: the rate of the uninterrupted run, with a fresh optimizer."""

import logging
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from miles_reset import CheckpointError, PolicyError, ResumePolicy

pytest.importorskip("transformers")
from hf_trainer import build, train

from miles_reset_transformers import use_policy


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("run")
    return folder / "checkpoint-4", train(folder, steps=8, save=4)


def resumed(path: Path, folder: Path, policy: dict[str, Any], **more: Any) -> Any:
    trainer = build(folder, steps=8, save=100, **more)
    use_policy(trainer, ResumePolicy.from_dict(policy)).train(resume_from_checkpoint=str(path))
    return trainer


def test_a_fresh_optimizer_goes_on_at_the_rate_of_the_run(whole: Any, tmp_path: Path) -> None:
    path, straight = whole
    trainer = resumed(path, tmp_path, {"optimizer": "fresh"}, lr=77.0)
    assert trainer.watch.rates == {step: straight.watch.rates[step] for step in range(5, 9)}
    assert trainer.watch.clocks == {5: 0, 6: 1, 7: 2, 8: 3}
    assert straight.watch.clocks[5] == 4


def test_everything_restored_is_the_run_itself(whole: Any, tmp_path: Path) -> None:
    path, straight = whole
    trainer = resumed(path, tmp_path, {})
    assert trainer.watch.rates == {step: straight.watch.rates[step] for step in range(5, 9)}
    assert trainer.watch.clocks == {5: 4, 6: 5, 7: 6, 8: 7}
    assert torch.equal(trainer.model.layer.weight, straight.model.layer.weight)


def test_a_fresh_scheduler_starts_at_the_new_rate(whole: Any, tmp_path: Path) -> None:
    trainer = resumed(whole[0], tmp_path, {"scheduler": "fresh"}, lr=2.0)
    assert trainer.watch.rates[5] == 2.0
    assert trainer.watch.clocks[5] == 4


def test_resets_follow_the_schedule_once_each(
    whole: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "miles_reset")
    trainer = resumed(whole[0], tmp_path, {"reset": {"every": 2}})
    assert trainer.watch.clocks == {5: 0, 6: 1, 7: 0, 8: 1}  # 4 was due when it was saved
    done = [r.getMessage() for r in caplog.records if r.getMessage().startswith("optimizer reset")]
    values = "6 values in 1 optimizer reset."
    assert done == [f"optimizer reset at step {step}: {values}" for step in (4, 6, 8)]
    told = [entry["step"] for entry in trainer.state.log_history if entry.get("optimizer_reset_values") == 6]
    assert told == [4, 6, 8], "the trainer's own log has them too"
    callback = next(one for one in trainer.callback_handler.callbacks if hasattr(one, "last_reset"))
    assert callback.resumed.iteration == 4
    assert callback.last_reset.changed == 6


def test_a_run_that_stops_at_a_reset_resets_as_one_that_does_not(tmp_path: Path) -> None:
    policy = ResumePolicy.from_dict({"reset": {"at": [3, 4]}})
    straight = use_policy(build(tmp_path / "a", steps=6, save=4), policy)
    straight.train()
    trainer = use_policy(build(tmp_path / "b", steps=6, save=100), policy)
    trainer.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-4"))
    assert straight.watch.clocks == {1: 0, 2: 1, 3: 2, 4: 0, 5: 0, 6: 1}
    assert trainer.watch.clocks == {5: 0, 6: 1}
    assert torch.equal(trainer.model.layer.weight, straight.model.layer.weight)


def test_epochs_are_counted_too(tmp_path: Path) -> None:
    policy = ResumePolicy.from_dict({"reset": {"every": 1, "unit": "epoch"}})
    trainer = use_policy(build(tmp_path / "a", steps=7, save=6), policy)  # three steps an epoch
    trainer.train()
    assert trainer.watch.clocks == {1: 0, 2: 1, 3: 2, 4: 0, 5: 1, 6: 2, 7: 0}
    again = use_policy(build(tmp_path / "b", steps=7, save=100), policy)
    again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-6"))
    assert again.watch.clocks == {7: 0}  # saved before its epoch ended


@pytest.mark.parametrize("action", ["fresh", "restore"])
def test_random_numbers_are_the_policys(whole: Any, tmp_path: Path, action: str) -> None:
    trainer = build(tmp_path, steps=8, save=100)
    use_policy(trainer, ResumePolicy.from_dict({"rng": action}))
    random.seed(123)
    there = random.getstate()
    trainer._load_optimizer_and_scheduler(None)
    trainer.create_optimizer_and_scheduler(8)
    trainer._load_optimizer_and_scheduler(str(whole[0]))
    assert random.getstate() == there, "the Trainer brings them back later"
    trainer._load_rng_state(str(whole[0]))
    assert (random.getstate() == there) == (action == "fresh")


def test_what_must_come_back_and_was_not_saved_is_refused(whole: Any, tmp_path: Path) -> None:
    for file in whole[0].iterdir():
        if file.name != "scheduler.pt":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(CheckpointError, match="scheduler"):
        resumed(tmp_path, tmp_path / "out", {"optimizer": "fresh"})
    resumed(tmp_path, tmp_path / "out", {"scheduler": "restore-if-present"})


@pytest.mark.parametrize(
    "policy", [{"iteration": 3}, {"iteration": "fresh"}, {"reset": {"every": 1, "unit": "rollout"}}]
)
def test_what_a_trainer_does_not_do_is_refused(tmp_path: Path, policy: dict[str, Any]) -> None:
    with pytest.raises(PolicyError):
        use_policy(build(tmp_path, steps=1, save=1), ResumePolicy.from_dict(policy))


def test_the_plugin_alone_imports_no_library() -> None:
    plugins = "miles_reset_transformers, miles_reset_lightning, miles_reset_accelerate"
    code = f"import sys, {plugins}; print(*sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"transformers", "lightning", "pytorch_lightning", "accelerate"} & set(told.stdout.split())
