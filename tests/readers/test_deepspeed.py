"""DeepSpeed's checkpoints are read by their layout."""

from pathlib import Path
from typing import Any

import pytest
import torch

from miles_reset import CheckpointError, open_checkpoint
from miles_reset.checkpoint import Presence


def write(folder: Path, name: str, content: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    torch.save(content, folder / name)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "latest").write_text("global_step8")
    return tmp_path


STATE = {"module": {}, "lr_scheduler": {"last_batch_iteration": 8}, "global_steps": 8, "optimizer": None}


def test_without_zero(root: Path) -> None:
    for rank in range(2):
        content = STATE | {"optimizer": {"rank": rank}}
        write(root / "global_step8", f"mp_rank_{rank:02d}_model_states.pt", content)
    for path in (root, root / "global_step8"):
        found = open_checkpoint(path, rank=1, world_size=2)
        assert (found.format, found.iteration_unit) == ("deepspeed", "step")
        assert found.read("iteration") == 8
        assert found.read("optimizer") == {"rank": 1}
        assert found.read("scheduler") == {"last_batch_iteration": 8}


@pytest.mark.parametrize("prefix", ["", "bf16_"])
def test_with_zero(root: Path, prefix: str) -> None:
    folder = root / "global_step8"
    write(folder, "mp_rank_00_model_states.pt", STATE)
    for rank in range(2):
        content = {"optimizer_state_dict": {"rank": rank}}
        write(folder, f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", content)
    assert open_checkpoint(root, rank=1, world_size=2).read("optimizer") == {"rank": 1}
    found = open_checkpoint(root, rank=2, world_size=3)
    assert found.part("optimizer").presence is Presence.FILE_ABSENT
    assert "partitioned" in found.facts["optimizer"]


def test_with_zero_3(root: Path) -> None:
    for rank in range(2):
        content = STATE | {"global_steps": 8 + rank}
        write(root / "global_step8", f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt", content)
    assert open_checkpoint(root, rank=1, world_size=2).read("iteration") == 9


def test_a_tag_that_leads_nowhere_is_refused(root: Path) -> None:
    (root / "global_step9").mkdir()
    with pytest.raises(CheckpointError, match="has no"):
        open_checkpoint(root)
