"""What Hugging Face's Trainer writes is read part by part."""

import json
from pathlib import Path

import pytest
import torch

from miles_reset import open_checkpoint
from miles_reset.checkpoint import Presence

pytest.importorskip("transformers")
from hf_trainer import train


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, object]:
    folder = tmp_path_factory.mktemp("run")
    return folder / "checkpoint-4", train(folder, steps=4, save=4)


def test_each_part(saved: tuple[Path, object]) -> None:
    path, trainer = saved
    found = open_checkpoint(path)
    assert (found.format, found.iteration_unit) == ("transformers", "step")
    assert found.read("iteration") == 4
    live = trainer.optimizer.state_dict()
    state = found.read("optimizer")
    assert state["param_groups"] == live["param_groups"]
    assert torch.equal(state["state"][0]["exp_avg"], live["state"][0]["exp_avg"])
    assert found.read("scheduler") == trainer.lr_scheduler.state_dict()
    assert {"python", "numpy", "cpu"} <= found.read("rng").keys()
    assert found.part("grad_scaler").presence is Presence.FILE_ABSENT


def test_a_rank_without_a_file_and_a_torn_state(saved: tuple[Path, object], tmp_path: Path) -> None:
    for file in saved[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert open_checkpoint(tmp_path, rank=1, world_size=2).part("rng").presence is Presence.FILE_ABSENT
    (tmp_path / "trainer_state.json").write_text(json.dumps({}))
    (tmp_path / "optimizer.pt").write_bytes(saved[0].joinpath("optimizer.pt").read_bytes()[:100])
    found = open_checkpoint(tmp_path)
    assert found.part("iteration").presence is Presence.TORN
    assert found.part("optimizer").presence is Presence.TORN
