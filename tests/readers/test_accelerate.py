"""What Accelerate writes is read part by part."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from miles_reset import open_checkpoint
from miles_reset.checkpoint import Presence

pytest.importorskip("accelerate")
from tiny_accelerate import Run


def test_each_part(tmp_path: Path) -> None:
    run = Run()
    run.train(4)
    run.accelerator.register_for_checkpointing(Counter())
    run.accelerator.save_state(str(tmp_path / "c"))
    there = random.getstate(), np.random.get_state(), torch.get_rng_state()
    found = open_checkpoint(tmp_path / "c")
    assert found.format == "accelerate"
    live = run.optimizer.state_dict()
    assert found.read("optimizer")["param_groups"] == live["param_groups"]
    assert torch.equal(found.read("optimizer")["state"][0]["exp_avg"], live["state"][0]["exp_avg"])
    assert found.read("scheduler") == run.scheduler.state_dict()
    assert found.read("custom_checkpoint_0") == {"count": 3}
    rng = found.read("rng")
    assert rng["python"] == there[0]
    assert np.array_equal(rng["numpy"][1], there[1][1])
    assert torch.equal(rng["cpu"], there[2])
    assert found.part("grad_scaler").presence is Presence.FILE_ABSENT
    assert found.part("iteration").presence is Presence.KEY_ABSENT
    assert open_checkpoint(tmp_path / "c", rank=1, world_size=2).part("rng").presence is Presence.FILE_ABSENT


def test_more_than_one_optimizer(tmp_path: Path) -> None:
    run = Run(optimizers=2)
    run.train(2)
    run.accelerator.save_state(str(tmp_path / "c"))
    found = open_checkpoint(tmp_path / "c")
    assert found.read("optimizer_1")["param_groups"][0]["lr"] == run.optimizers[1].param_groups[0]["lr"]
    assert found.read("scheduler_1") == run.schedulers[1].state_dict()


class Counter:
    def state_dict(self) -> dict[str, Any]:
        return {"count": 3}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass
