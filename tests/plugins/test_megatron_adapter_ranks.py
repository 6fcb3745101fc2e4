"""Adapters over two ranks: one verdict, and nothing changed on any of them where one refuses."""

import contextlib
import importlib.util
import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import run_ranks

from miles_reset import RankDisagreementError, ResumePolicy
from miles_reset_megatron import load_lora_adapter, save_lora_adapter

pytestmark = pytest.mark.slow


class Counter:
    """A scheduler of the simplest kind, which is no torch one."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.count = optimizer, 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Job:
    def __init__(self, value: float) -> None:
        self.model = torch.nn.Module()
        self.model.lora_a = torch.nn.Parameter(torch.full((3,), value))
        self.optimizer = torch.optim.SGD([self.model.lora_a], lr=0.1, momentum=0.9)
        self.optimizer.state[self.model.lora_a]["momentum_buffer"] = torch.full((3,), value)
        self.scheduler = Counter(self.optimizer)

    def save(self, folder: Path, iteration: int) -> None:
        self.scheduler.count = iteration
        save_lora_adapter(
            self.model, folder, optimizer=self.optimizer, opt_param_scheduler=self.scheduler,
            iteration=iteration,
        )  # fmt: skip

    def load(self, folder: Path, **options: Any) -> tuple[bool, int | None]:
        return load_lora_adapter(
            self.model, folder, optimizer=self.optimizer, opt_param_scheduler=self.scheduler, **options
        )

    def holds(self) -> tuple[float, float, int]:
        held = self.optimizer.state[self.model.lora_a]["momentum_buffer"]
        return float(self.model.lora_a.detach()[0]), float(held[0]), self.scheduler.count


def once(action: Any) -> None:
    """Let rank 0 do something to the files between two barriers."""
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        action()
    torch.distributed.barrier()


def refuses(folder: Path, *said: str, **options: Any) -> None:
    job = Job(0.0)
    with pytest.raises(RankDisagreementError) as caught:
        job.load(folder, **options)
    for words in said:
        assert words in str(caught.value), str(caught.value)
    assert job.holds() == (0.0, 0.0, 0), "something was changed"


def on_two_ranks(base: str) -> None:
    rank, folder = torch.distributed.get_rank(), Path(base)
    Job(1.0 + rank).save(folder / "a", 3)
    job = Job(0.0)
    assert job.load(folder / "a") == (True, 3)
    assert job.holds() == (1.0 + rank, 1.0 + rank, 3)

    with pytest.raises(RankDisagreementError, match="different values of iteration"):
        Job(7.0).save(folder / "a", 4 + rank)
    with (
        mock.patch.object(os, "fsync", side_effect=OSError("disk full")) if rank else mock.MagicMock(),
        pytest.raises(RankDisagreementError, match=r"ranks \[1\] refuse.*disk full"),
    ):
        Job(7.0).save(folder / "a", 4)
    assert not list((folder / "a").glob(f"*_rank{rank}.pt.*"))
    job = Job(0.0)
    assert job.load(folder / "a") == (True, 3)
    assert job.holds() == (1.0 + rank, 1.0 + rank, 3)

    for name in ("adapter_megatron_rank1.pt", "training_state_rank1.pt"):
        lacks = folder / f"lacks-{name}"
        once(lambda to=lacks: shutil.copytree(folder / "a", to))
        once(lambda to=lacks, name=name: (to / name).unlink())
        refuses(lacks, "ranks [1] refuse", f"{name} is named in miles_reset_manifest.json", "rank 0: ready")
        once(lambda to=lacks: (to / "miles_reset_manifest.json").unlink())
        if name.startswith("adapter"):
            refuses(
                lacks, "ranks [1] refuse", f"{name} is not there; the folder has adapter_megatron_rank0.pt"
            )
        else:
            strict = ResumePolicy.from_dict({"optimizer": "restore"})
            refuses(lacks, "different values of the saved optimizer", policy=strict)
            refuses(lacks, "different values of the saved optimizer", "is 'the file is not there'")

    def older() -> None:
        state = torch.load(folder / "b" / "training_state_rank1.pt", weights_only=True)
        torch.save({**state, "iteration": 2}, folder / "b" / "training_state_rank1.pt")
        (folder / "b" / "miles_reset_manifest.json").unlink()

    once(lambda: shutil.copytree(folder / "a", folder / "b"))
    once(older)
    refuses(folder / "b", "they have different values of iteration", "rank 0: iteration is 3", "is 2")

    def of_three() -> None:
        shutil.copy(folder / "c" / "adapter_megatron_rank0.pt", folder / "c" / "adapter_megatron_rank2.pt")
        (folder / "c" / "miles_reset_manifest.json").unlink()

    once(lambda: shutil.copytree(folder / "a", folder / "c"))
    once(of_three)
    refuses(folder / "c", "ranks [0, 1] refuse", "was saved by at least 3 ranks, and this run has 2")
    refuses(folder / "a", "they have different values of policy", load_optimizer=bool(rank))
    own = folder / f"of-rank-{rank}"
    once(lambda: shutil.copytree(folder / "a", folder / "of-rank-0"))
    refuses(own, "they have different values of the adapter", "is not there")
    held = json.loads((folder / "a" / "miles_reset_manifest.json").read_text())
    assert held["world_size"] == 2
    assert {one["rank"] for one in held["files"].values()} == {0, 1}
    if importlib.util.find_spec("megatron"):  # in one go: to start the ranks takes longer
        sharded(folder)
    a_rank_that_dies(folder / "a")


def a_rank_that_dies(folder: Path) -> None:
    """End rank 1 while it writes: the save does not count, and rank 0 does not wait for ever."""
    if torch.distributed.get_rank():
        os.fsync = lambda number: os._exit(0)
    before = (folder / "miles_reset_manifest.json").read_text()
    with pytest.raises(RankDisagreementError, match="not every rank answered"):
        Job(7.0).save(folder, 4)
    assert (folder / "miles_reset_manifest.json").read_text() == before
    for rank in range(2):
        held = torch.load(folder / f"adapter_megatron_rank{rank}.pt", weights_only=True)
        assert held["lora_a"].tolist() == [1.0 + rank] * 3


def test_all_ranks_load_or_none(tmp_path: Path) -> None:
    run_ranks(on_two_ranks, 2, str(tmp_path))
    job = Job(0.0)
    with pytest.raises(Exception, match="was saved by 2 ranks, and this run has 1"):
        job.load(tmp_path / "a")
    assert job.holds() == (0.0, 0.0, 0)


def sharded(base: Path) -> None:
    """Bring moments and masters that are shared out over the ranks back on both of them."""
    warnings.simplefilter("ignore")
    from megatron_cpu import build, megatron_session, te_like

    with megatron_session():
        for name in ("distributed_bf16", "distributed_fused"):
            context = te_like if name.endswith("fused") else contextlib.nullcontext
            one, two, folder = build(name), build(name), base / name
            for i in range(2):
                one.step(i)
            with context():
                save_lora_adapter(
                    one.ddp, folder, optimizer=one.optimizer, iteration=5, is_adapter=lambda name: True
                )
                assert load_lora_adapter(
                    two.ddp, folder, optimizer=two.optimizer, is_adapter=lambda name: True
                ) == (True, 5)  # fmt: skip
            for i in range(2, 4):
                one.step(i)
                two.step(i)
            pairs = zip(one.net.parameters(), two.net.parameters(), strict=True)
            assert all(torch.equal(*pair) for pair in pairs), name
            files = {path.name for path in folder.glob("optimizer_param_state_*")}
            assert files == {"optimizer_param_state_rank0_optimizer0.pt"}
            once(lambda folder=folder, files=files: (folder / files.pop()).unlink())
            with pytest.raises(RankDisagreementError, match=r"ranks \[0\] refuse"):
                load_lora_adapter(two.ddp, folder, optimizer=two.optimizer, is_adapter=lambda name: True)
