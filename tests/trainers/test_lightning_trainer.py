"""Lightning resumes by a policy: the rate of the uninterrupted run, with a fresh optimizer."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from miles_reset import CheckpointError, PolicyError, ResumePolicy, open_checkpoint

pytest.importorskip("lightning")
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from tiny_lightning import fit

from miles_reset_lightning import ResumePolicyCallback

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
)


def by(policy: dict[str, Any]) -> ResumePolicyCallback:
    return ResumePolicyCallback(ResumePolicy.from_dict(policy))


@pytest.fixture(scope="module", params=[False, True], ids=["one", "two"])
def run(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, bool]:
    """A run of 8 batches, and the checkpoint of one that stopped after 4."""
    two, folder = request.param, tmp_path_factory.mktemp("run")
    (folder / "whole").mkdir()
    each = 2 if two else 1  # Lightning counts the steps of all optimizers
    fit(folder, 4 * each, two=two)
    return folder / "last.ckpt", fit(folder / "whole", 8 * each, two=two), two


def test_a_fresh_optimizer_goes_on_at_the_rate_of_the_run(run: Any, tmp_path: Path) -> None:
    path, (straight, _, watch), two = run
    again = fit(tmp_path, straight.max_steps, by({"optimizer": "fresh"}), lr=77.0, two=two, ckpt_path=path)[2]
    assert again.rates == {step: watch.rates[step] for step in range(5, 9)}
    assert [clocks[0] for clocks in again.clocks.values()] == [0, 1, 2, 3]
    assert again.clocks[5] == [0] * (1 + two)
    assert watch.clocks[5] == [4] * (1 + two)


def test_everything_restored_is_what_lightning_does_itself(run: Any, tmp_path: Path) -> None:
    path, (straight, _, watch), two = run
    model = fit(tmp_path, straight.max_steps, lr=77.0, two=two, ckpt_path=path)[1]
    _, mine, again = fit(tmp_path, straight.max_steps, by({}), lr=77.0, two=two, ckpt_path=path)
    assert again.rates == {step: watch.rates[step] for step in range(5, 9)}
    assert again.clocks == {step: watch.clocks[step] for step in range(5, 9)}
    assert torch.equal(mine.layer.weight, model.layer.weight)
    assert torch.equal(mine.other.weight, model.other.weight)


def test_a_fresh_scheduler_starts_at_the_new_rate(run: Any, tmp_path: Path) -> None:
    path, (straight, _, watch), two = run
    again = fit(tmp_path, straight.max_steps, by({"scheduler": "fresh"}), lr=2.0, two=two, ckpt_path=path)[2]
    assert again.rates[5] == [2.0, 4.0][: 1 + two]
    assert again.clocks[5] == watch.clocks[5]


def test_a_fresh_count_starts_at_0(run: Any, tmp_path: Path) -> None:
    path, _, two = run
    trainer, _, again = fit(tmp_path, 2, by({"iteration": "fresh"}), two=two, ckpt_path=path)
    assert trainer.global_step == 2
    assert again.clocks[1] == [4] * (1 + two)


def test_resets_follow_the_schedule(run: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, (straight, _, _), two = run
    caplog.set_level(logging.INFO, "miles_reset")
    policy = {"reset": {"every": 4 if two else 2}}
    again = fit(tmp_path, straight.max_steps, by(policy), two=two, ckpt_path=path)[2]
    assert [clocks[0] for clocks in again.clocks.values()] == [0, 1, 0, 1]  # 4 was due when it was saved
    done = [r.getMessage() for r in caplog.records if r.getMessage().startswith("optimizer reset")]
    optimizers = "2 optimizers" if two else "1 optimizer"
    values = f"{6 * (1 + two)} values in {optimizers} reset."
    assert done == [f"optimizer reset at step {step * (1 + two)}: {values}" for step in (4, 6, 8)]


def test_receipts_are_in_the_trainers_own_log_and_at_the_callback(run: Any, tmp_path: Path) -> None:
    path, (straight, _, _), two = run
    callback = by({"reset": {"at": [6 * (1 + two)]}})
    log = CSVLogger(tmp_path, name="", version="")
    fit(tmp_path, straight.max_steps, callback, two=two, ckpt_path=path, logger=log)
    lines = (tmp_path / "metrics.csv").read_text().splitlines()
    assert lines == ["optimizer_reset_values,step", f"{6 * (1 + two)},{6 * (1 + two)}"]
    assert [receipt.iteration for receipt in callback.resumed] == [4 * (1 + two)] * (1 + two)
    assert callback.last_reset.changed == 6 * (1 + two)


def test_a_reset_comes_before_the_save_at_the_same_step(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, filename="saved", every_n_train_steps=4, save_top_k=-1)
    watch = fit(tmp_path, 6, saver, by({"reset": {"at": [4]}}), enable_checkpointing=True)[2]
    assert [clocks[0] for clocks in watch.clocks.values()] == [0, 1, 2, 3, 0, 1]
    state = open_checkpoint(tmp_path / "saved.ckpt").read("optimizer")["state"]
    assert all(float(entry["step"]) == 0 for entry in state.values())


def test_a_batch_that_is_no_step_is_no_reset(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "miles_reset")
    fit(tmp_path, 3, by({"reset": {"at": [2]}}), accumulate_grad_batches=3)
    done = [r.getMessage() for r in caplog.records if r.getMessage().startswith("optimizer reset")]
    assert done == ["optimizer reset at step 2: 6 values in 1 optimizer reset."]


def test_epochs_are_counted_too(tmp_path: Path) -> None:
    policy = {"reset": {"every": 1, "unit": "epoch"}}
    watch = fit(tmp_path, 7, by(policy))[2]  # three steps an epoch
    assert [clocks[0] for clocks in watch.clocks.values()] == [0, 1, 2, 0, 1, 2, 0]


def test_what_must_come_back_and_was_not_saved_is_refused(tmp_path: Path) -> None:
    fit(tmp_path, 2)
    content = torch.load(tmp_path / "last.ckpt", weights_only=True)
    torch.save(content | {"lr_schedulers": []}, tmp_path / "less.ckpt")
    with pytest.raises(CheckpointError, match="scheduler"):
        fit(tmp_path, 4, by({"optimizer": "fresh"}), ckpt_path=tmp_path / "less.ckpt")


@pytest.mark.parametrize("policy", [{"iteration": 3}, {"reset": {"every": 1, "unit": "rollout"}}])
def test_what_lightning_does_not_do_is_refused(policy: dict[str, Any]) -> None:
    with pytest.raises(PolicyError):
        by(policy)
