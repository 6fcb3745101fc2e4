"""Megatron's checkpoints and miles', written by megatron-core and torch where they write them."""

import argparse
import inspect
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from plain_torch import nothing_allowed

from miles_reset import CheckpointError, ResumePolicy, UnsafeCheckpointError, open_checkpoint, plan_resume
from miles_reset.checkpoint import Presence

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:Could not determine rank from torch.distributed:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of megatron-core, on import
]
ALLOW = ["argparse.Namespace"]
TRACKER = "latest_checkpointed_iteration.txt"


def rng() -> dict[str, Any]:
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
    }


def schedule(groups: list[dict[str, Any]], max_lr: float = 1.0) -> Any:
    module = pytest.importorskip("megatron.core.optimizer_param_scheduler")
    return module.OptimizerParamScheduler(
        optimizer=SimpleNamespace(param_groups=groups),
        init_lr=0.0,
        max_lr=max_lr,
        min_lr=0.1,
        lr_warmup_steps=2,
        lr_decay_steps=10,
        lr_decay_style="cosine",
        start_wd=0.0,
        end_wd=0.1,
        wd_incr_steps=10,
        wd_incr_style="linear",
        use_checkpoint_opt_param_scheduler=True,
        override_opt_param_scheduler=False,
    )


def state(tp: int = 1, pp: int = 1, ep: int = 1) -> dict[str, Any]:
    args = argparse.Namespace(
        world_size=tp * pp * ep,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
    )
    scheduler = schedule([{"lr": 0.0, "params": []}])
    scheduler.step(7)
    return {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": 7,
        "optimizer": {"optimizer": {"state": {}, "param_groups": [{"lr": 0.5, "params": []}]}},
        "opt_param_scheduler": scheduler.state_dict(),
    }


def write_torch(folder: Path, name: str, content: dict[str, Any]) -> None:
    (folder / name).mkdir(parents=True)
    torch.save(content | {"rng_state": [rng()], "model": {"w": torch.ones(2)}},
               folder / name / "model_optim_rng.pt")  # fmt: skip


def check(found: Any) -> None:
    assert found.format == "megatron"
    assert found.iteration_unit == "step"
    assert found.read("iteration") == 7
    assert found.read("scheduler")["num_steps"] == 7
    assert found.read("optimizer")["optimizer"]["param_groups"][0]["lr"] == 0.5
    held = found.read("rng")
    assert torch.equal((held[0] if isinstance(held, list) else held)["torch_rng_state"],
                       torch.get_rng_state())  # fmt: skip


@pytest.mark.parametrize(("text", "name"), [("7\n", "iter_0000007"), ("release", "release")])
def test_the_torch_format(tmp_path: Path, text: str, name: str) -> None:
    write_torch(tmp_path / name, "mp_rank_00", state())
    (tmp_path / TRACKER).write_text(text)
    for path in (tmp_path, tmp_path / name):
        found = open_checkpoint(path, allow=ALLOW)
        check(found)
        assert found.layout["tp"] == 1
        assert found.facts["folder"] == name
        assert found.facts["saved by ranks"] == "1"
    with nothing_allowed(), pytest.raises(UnsafeCheckpointError, match=r"argparse\.Namespace"):
        open_checkpoint(tmp_path)


def test_its_random_numbers_come_back(tmp_path: Path) -> None:
    write_torch(tmp_path / "iter_0000007", "mp_rank_00", state())
    drawn = random.random(), np.random.rand(), torch.rand(1)
    plan_resume(ResumePolicy.from_dict({"rng": "restore", "allow": ALLOW}), tmp_path / "iter_0000007").apply()
    assert drawn == (random.random(), np.random.rand(), torch.rand(1))


@pytest.mark.parametrize(
    ("sizes", "rank", "name"),
    [
        ((2, 2, 1), 3, "mp_rank_01_001"),
        ((2, 2, 1), 2, "mp_rank_00_001"),
        ((2, 1, 1), 1, "mp_rank_01"),
        ((1, 1, 2), 1, "mp_rank_00_001"),
        ((2, 1, 2), 2, "mp_rank_00_001"),
    ],
)
def test_a_rank_reads_its_own_file(tmp_path: Path, sizes: tuple[int, int, int], rank: int, name: str) -> None:
    tp, pp, ep = sizes
    names = {
        f"mp_rank_{t:02d}" + f"_{p:03d}" * (pp > 1) + f"_{e:03d}" * (ep > 1)
        for t in range(tp) for p in range(pp) for e in range(ep)
    }  # fmt: skip
    for each in names:
        write_torch(tmp_path / "iter_0000007", each, state(*sizes) | {"iteration": 7, "mine": each})
    found = open_checkpoint(tmp_path / "iter_0000007", rank=rank, world_size=tp * pp * ep, allow=ALLOW)
    check(found)
    assert found.part("iteration").where.startswith("model_optim_rng.pt")
    assert found.layout == {"tp": tp, "pp": pp, "ep": ep}
    assert (tmp_path / "iter_0000007" / name).is_dir()
    (tmp_path / "iter_0000007" / name / "model_optim_rng.pt").unlink()
    found = open_checkpoint(tmp_path / "iter_0000007", rank=rank, world_size=tp * pp * ep, allow=ALLOW)
    assert found.part("optimizer").presence is Presence.FILE_ABSENT


def test_a_rank_whose_folder_was_not_saved_has_no_file(tmp_path: Path) -> None:
    write_torch(tmp_path / "iter_0000007", "mp_rank_00", state(tp=2))
    found = open_checkpoint(tmp_path / "iter_0000007", rank=1, world_size=2, allow=ALLOW)
    assert found.part("optimizer").presence is Presence.FILE_ABSENT


@pytest.mark.parametrize(("text", "match"), [("8", "not there"), ("soon", "names no iteration")])
def test_a_tracker_that_leads_nowhere_is_refused(tmp_path: Path, text: str, match: str) -> None:
    write_torch(tmp_path / "iter_0000007", "mp_rank_00", state())
    (tmp_path / TRACKER).write_text(text)
    with pytest.raises(CheckpointError, match=match):
        open_checkpoint(tmp_path, allow=ALLOW)


def save_by_megatron(folder: Path) -> None:
    saving = pytest.importorskip("megatron.core.dist_checkpointing")
    if "async_strategy" not in inspect.signature(saving.save).parameters:
        pytest.skip("this megatron-core forks to write")
    from megatron_cpu import megatron_session

    with megatron_session():
        sharded = {
            "weight": saving.ShardedTensor.from_rank_offsets("weight", torch.ones(4), replica_id=0),
            "rng_state": saving.ShardedObject("rng_state", [rng()], (1, 1), (0, 0), replica_id=0),
        }
        saving.save(state() | sharded, str(folder), async_strategy="mcore")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("old", [False, True])
def test_the_torch_dist_format(tmp_path: Path, old: bool) -> None:
    folder = tmp_path / "iter_0000007"
    folder.mkdir()
    if old:  # as it was until 0.17: what is not sharded was in a file of its own
        sharded = {"weight": torch.ones(4), "rng_state/shard_0.0_1.1": [rng()]}
        dcp.save(sharded, checkpoint_id=folder, no_dist=True)
        torch.save(state(), folder / "common.pt")
        (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    else:
        save_by_megatron(folder)
    (tmp_path / TRACKER).write_text("7")
    with nothing_allowed(), pytest.raises(UnsafeCheckpointError, match=r"argparse\.Namespace"):
        open_checkpoint(tmp_path)
    found = open_checkpoint(tmp_path, allow=ALLOW)
    check(found)
    assert found.facts["kind"] == "torch_dist"
    straight = schedule([{"lr": 0.0, "params": []}])
    straight.step(7)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=9.0)
    scheduler = schedule(optimizer.param_groups, max_lr=9.0)
    scheduler.optimizer = optimizer
    policy = ResumePolicy.from_dict({"optimizer": "fresh"})
    report = plan_resume(policy, found, optimizer=optimizer, scheduler=scheduler).apply()
    assert report.iteration == 7
    assert optimizer.param_groups[0]["lr"] == straight.optimizer.param_groups[0]["lr"] == report.rates[0]
    assert found.layout == {"tp": 1, "pp": 1, "ep": 1}
    assert "weight" not in found.parts


def test_the_torch_dcp_format(tmp_path: Path) -> None:
    content = {key: value for key, value in state().items() if key != "args"}
    dcp.save(content | {"rng_state": [rng()]}, checkpoint_id=tmp_path / "iter_0000007", no_dist=True)
    (tmp_path / TRACKER).write_text("7")
    check(open_checkpoint(tmp_path))


@pytest.mark.parametrize("ranks", [True, False])
def test_miles_fsdp(tmp_path: Path, ranks: bool) -> None:
    folder = tmp_path / "iter_0000008"
    optimizer = {"state": {"w": {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 0.5, "params": ["w"]}]}
    for name, content in {
        "model": {"model_state": {"model": {"w": torch.ones(2)}}},
        "optimizer": {"optim_state": {"optim": optimizer}},
        "lr_scheduler": {"lr_scheduler_state": {"lr_scheduler": {"last_epoch": 8}}},
    }.items():
        dcp.save(content, checkpoint_id=folder / name, no_dist=True)
    torch.save({"torch": torch.get_rng_state()}, folder / ("rng_rank_0.pt" if ranks else "rng.pt"))
    meta = {"iteration": 8, "rollout_id": 7, "next_rollout_id": 8, "global_step": 14, "world_size": 1}
    (folder / "meta.json").write_text(json.dumps(meta))
    (tmp_path / TRACKER).write_text("8")
    for path in (tmp_path, folder):
        found = open_checkpoint(path)
        assert (found.format, found.iteration_unit) == ("miles fsdp", "rollout")
        assert found.read("iteration") == 7
        assert torch.equal(found.read("optimizer")["state"]["w"]["exp_avg"], torch.ones(2))
        assert found.read("optimizer")["param_groups"] == [{"lr": 0.5, "params": ["w"]}]
        assert found.read("scheduler") == {"last_epoch": 8}
        assert torch.equal(found.read("rng")["torch"], torch.get_rng_state())
        assert found.facts["next_rollout_id"] == "8"
    (folder / "optimizer" / ".metadata").unlink()
    (folder / "meta.json").write_text("{")
    found = open_checkpoint(tmp_path)
    assert found.part("optimizer").presence is Presence.FILE_ABSENT
    assert found.part("iteration").presence is Presence.TORN


def test_a_miles_lora_adapter(tmp_path: Path) -> None:
    folder = tmp_path / "iter_0000003" / "adapter"
    folder.mkdir(parents=True)
    for rank in range(2):
        torch.save({"a": torch.full((2,), rank)}, folder / f"adapter_megatron_rank{rank}.pt")
        torch.save({"iteration": 3 + rank, "optimizer": None, "opt_param_scheduler": {"num_steps": 5}},
                   folder / f"training_state_rank{rank}.pt")  # fmt: skip
    (folder / "adapter_config.json").write_text("{}")
    for path in (folder, folder.parent):
        found = open_checkpoint(path, rank=1, world_size=2)
        assert (found.format, found.iteration_unit) == ("miles lora adapter", "rollout")
        assert found.read("iteration") == 4
        assert found.part("optimizer").presence is Presence.NULL
        assert found.read("scheduler") == {"num_steps": 5}
        assert found.read("model")["a"].tolist() == [1, 1]
        assert "PEFT" in found.facts["adapter"]
    found = open_checkpoint(folder, rank=2, world_size=3)
    assert found.part("scheduler").presence is Presence.FILE_ABSENT


def test_an_older_miles_lora_adapter(tmp_path: Path) -> None:
    for tp in range(2):
        for pp in range(2):
            torch.save({"a": torch.tensor([tp, pp])}, tmp_path / f"adapter_megatron_tp{tp}_pp{pp}.pt")
    found = open_checkpoint(tmp_path, rank=2, world_size=4)
    assert found.format == "miles lora adapter"
    assert found.read("model")["a"].tolist() == [0, 1]
    assert found.part("optimizer").presence is Presence.FILE_ABSENT
    assert "an older one" in found.facts["layout"]
