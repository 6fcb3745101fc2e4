"""Ranks that do not agree: all refuse, by name, and nothing has changed on any."""

from __future__ import annotations

import copy
import os
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from miles_reset import (
    CheckpointError,
    RankDisagreementError,
    ResetError,
    ResumePolicy,
    plan_resume,
    reset_optimizer_states,
    reset_some_states,
)
from miles_reset.agree import agree

SHORT = timedelta(seconds=4)


def stepped(rate: float = 0.1) -> torch.optim.AdamW:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=rate)
    weight.grad = torch.ones(3)
    optimizer.step()
    return optimizer


def save(folder: Path, iteration: int = 3) -> Path:
    path = folder / f"state_rank{dist.get_rank()}.pt"
    torch.save({"optimizer": stepped(0.5).state_dict(), "iteration": iteration}, path)
    return path


def refuses(path: Path, policy: dict[str, Any] | None = None) -> dict[int, str]:
    """Return the verdicts with which all ranks refuse, once it is seen that nothing changed."""
    optimizer = stepped()
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(RankDisagreementError) as caught:
        plan_resume(
            ResumePolicy.from_dict({"scheduler": "fresh", **(policy or {})}),
            path,
            optimizer=optimizer,
            timeout=SHORT,
        )
    assert str(optimizer.state_dict()) == str(before)
    assert str(caught.value).endswith("Nothing was changed.")
    return caught.value.verdicts


def scenarios(folder: str) -> None:
    """Do all of it in one go: to start the ranks takes longer."""
    rank, world, path = dist.get_rank(), dist.get_world_size(), Path(folder)
    last = world - 1

    good = save(path)
    optimizer = stepped()
    plan = plan_resume(ResumePolicy(scheduler="fresh"), good, optimizer=optimizer)
    assert plan.apply().iteration == 3
    assert optimizer.param_groups[0]["lr"] == 0.5

    verdicts = refuses(path / "none" if rank == last else good)
    assert sorted(verdicts) == list(range(world))
    assert "is not there. To start without one" in verdicts[last]
    assert all(verdicts[other] == "ready" for other in range(last))

    verdicts = refuses(save(path, iteration=3 if rank else 2))
    assert verdicts[0] == "iteration is 2."
    assert verdicts[last] == "iteration is 3."

    good = save(path)
    verdicts = refuses(good, {"optimizer": "fresh"} if rank == last else {})
    assert '"optimizer": "fresh"' in verdicts[last]

    if rank == 0:
        good.write_bytes(good.read_bytes()[:300])
    verdicts = refuses(good)
    assert "is torn" in verdicts[0]
    assert verdicts[last] == "ready"

    group = dist.group.WORLD
    optimizer = stepped()
    if rank == last:
        next(iter(optimizer.state.values()))["unheard of"] = torch.ones(3)
    before = str(optimizer.state_dict())
    with pytest.raises(RankDisagreementError, match=rf"ranks \[{last}\] refuse.*'unheard of'"):
        reset_optimizer_states(optimizer, group=group)
    assert str(optimizer.state_dict()) == before
    with pytest.raises(RankDisagreementError, match=rf"ranks \[{last}\] refuse.*'unheard of'"):
        reset_some_states(optimizer, slots=["momentum"], group=group)
    with pytest.raises(RankDisagreementError, match=rf"ranks \[{last}\] refuse.*'speed'"):
        reset_some_states(stepped(), slots=["speed"] if rank == last else ["momentum"], group=group)
    assert str(optimizer.state_dict()) == before
    assert reset_optimizer_states(stepped(), group=group).changed == 3
    assert reset_some_states(stepped(), slots=["momentum"], group=group).fraction == 1


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_all_ranks_refuse_together(world: int, tmp_path: Path) -> None:
    run_ranks(scenarios, world, str(tmp_path))


def one_dies(folder: str) -> None:
    path = save(Path(folder))
    dist.barrier()
    if dist.get_rank() == 1:
        os._exit(0)
    start = monotonic()
    verdicts = refuses(path)
    assert verdicts == {0: "ready"}
    assert monotonic() - start < 30
    os._exit(0)  # the group cannot be ended: its other rank is gone


@pytest.mark.slow
def test_a_rank_that_dies_makes_the_others_refuse_in_time(tmp_path: Path) -> None:
    run_ranks(one_dies, 2, str(tmp_path))


def test_alone_a_refusal_is_itself() -> None:
    error = CheckpointError("here", "optimizer", "is torn.")
    with pytest.raises(ResetError) as caught:
        agree(error)
    assert caught.value is error
    agree(None, {"iteration": 3})
