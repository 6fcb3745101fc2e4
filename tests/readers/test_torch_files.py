"""What torch.save and torch.distributed.checkpoint write is read part by part, and no pickle runs."""

import argparse
import os
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from plain_torch import nothing_allowed
from ranks import run_ranks

from miles_reset import CheckpointError, UnsafeCheckpointError, open_checkpoint
from miles_reset.checkpoint import Presence

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
]


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for _ in range(3):
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        scheduler.step()
    return model, optimizer, scheduler


def everything() -> dict[str, Any]:
    model, optimizer, scheduler = trained()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "iteration": 3,
        "rng": {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state()},
        "scaler": None,
        "note": "mine",
    }


def same(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(two, torch.Tensor) and torch.equal(one, two)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, two)
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(map(same, one, two))
    return bool(one == two)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_of_torch_save(tmp_path: Path, zipped: bool) -> None:
    saved = everything()
    torch.save(saved, tmp_path / "state.pt", _use_new_zipfile_serialization=zipped)
    found = open_checkpoint(tmp_path / "state.pt")
    assert found.format == "torch file"
    assert same(found.read("rng"), saved["rng"])
    assert same(found.read("optimizer"), saved["optimizer"])
    assert found.part("grad_scaler").presence is Presence.NULL
    assert found.part("lr").presence is Presence.KEY_ABSENT


def test_a_sharded_folder(tmp_path: Path) -> None:
    saved = everything()
    dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
    found = open_checkpoint(tmp_path)
    assert found.format == "torch DCP"
    for part in ("model", "optimizer", "scheduler", "iteration", "rng", "note"):
        assert same(found.read(part), saved[part]), part
    assert found.read("grad_scaler") is None
    assert found.part("optimizer").nbytes == 2 * 4 + 2 * 4 * (6 + 2)
    assert found.part("lr").presence is Presence.KEY_ABSENT


def test_a_listing_reads_no_part(tmp_path: Path) -> None:
    dcp.save(everything(), checkpoint_id=tmp_path, no_dist=True)
    for file in tmp_path.glob("*.distcp"):
        file.unlink()
    found = open_checkpoint(tmp_path)
    assert found.to_dict()["parts"]["optimizer"]["bytes"] == 72
    with pytest.raises(CheckpointError, match="is torn"):
        found.read("optimizer")


def save_on_ranks(folder: str) -> None:
    mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    whole = torch.arange(12.0).reshape(4, 3)
    split = torch.distributed.tensor.distribute_tensor(whole, mesh, [torch.distributed.tensor.Shard(0)])
    state = {"optimizer": {"state": {"weight": {"exp_avg": split}}, "param_groups": [{"params": ["weight"]}]}}
    dcp.save(state, checkpoint_id=folder)


@pytest.mark.slow
def test_shards_of_two_ranks_become_one_tensor(tmp_path: Path) -> None:
    run_ranks(save_on_ranks, 2, str(tmp_path))
    state = open_checkpoint(tmp_path).read("optimizer")
    assert torch.equal(state["state"]["weight"]["exp_avg"], torch.arange(12.0).reshape(4, 3))
    assert state["param_groups"] == [{"params": ["weight"]}]


class Runs:
    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


def test_hostile_metadata_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(Runs()))
    with pytest.raises(UnsafeCheckpointError, match=r"asks for posix\.system"):
        open_checkpoint(tmp_path / "c")
    assert not (tmp_path / "ran").exists()


def test_a_hostile_value_in_a_folder_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    dcp.save({"iteration": Runs(), "optimizer": {"a": 1}}, checkpoint_id=tmp_path / "c", no_dist=True)
    found = open_checkpoint(tmp_path / "c")
    assert found.read("optimizer") == {"a": 1}
    with pytest.raises(UnsafeCheckpointError, match=r"asks for posix\.system"):
        found.read("iteration")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("zipped", [True, False])
def test_a_hostile_file_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zipped: bool) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"a": Runs()}, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path / "a.pt")
    assert not (tmp_path / "ran").exists()


def test_a_namespace_is_refused_until_it_is_allowed(tmp_path: Path) -> None:
    torch.save({"args": argparse.Namespace(lr=1), "iteration": 2}, tmp_path / "a.pt")
    with nothing_allowed():
        with pytest.raises(UnsafeCheckpointError, match=r"argparse\.Namespace.*allow ="):
            open_checkpoint(tmp_path / "a.pt")
        found = open_checkpoint(tmp_path / "a.pt", allow=["argparse.Namespace"])
        assert found.read("args").lr == 1
        assert found.read("iteration") == 2


@pytest.mark.parametrize("content", [b"", b"no pickle", b"\x80\x04"])
def test_torn_metadata_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match="is torn"):
        open_checkpoint(tmp_path)


def test_metadata_that_leads_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    next(iter(metadata.storage_data.values())).relative_path = "../secret"
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="outside"):
        open_checkpoint(tmp_path)


def test_an_old_name_of_numpy_is_known(tmp_path: Path) -> None:
    torch.save({"rng": np.random.get_state()}, tmp_path / "new.pt", _use_new_zipfile_serialization=False)
    old = (tmp_path / "new.pt").read_bytes().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    assert b"numpy.core.multiarray" in old
    (tmp_path / "old.pt").write_bytes(old)
    with nothing_allowed():
        assert same(open_checkpoint(tmp_path / "old.pt").read("rng"), np.random.get_state())
