"""What Lightning writes is read part by part."""

from pathlib import Path

import pytest
import torch

from miles_reset import open_checkpoint
from miles_reset.checkpoint import Presence

pytest.importorskip("lightning")
from tiny_lightning import fit

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
)


def test_each_part(tmp_path: Path) -> None:
    trainer, model, _ = fit(tmp_path, 4)
    found = open_checkpoint(tmp_path / "last.ckpt")
    assert (found.format, found.iteration_unit) == ("lightning", "step")
    assert found.read("iteration") == 4
    assert found.read("epoch") == trainer.current_epoch
    live = trainer.optimizers[0].state_dict()
    assert found.read("optimizer")["param_groups"] == live["param_groups"]
    assert torch.equal(found.read("optimizer")["state"][0]["exp_avg"], live["state"][0]["exp_avg"])
    assert found.read("scheduler") == trainer.lr_scheduler_configs[0].scheduler.state_dict()
    assert torch.equal(found.read("model")["layer.weight"], model.layer.weight)
    assert found.part("grad_scaler").presence is Presence.KEY_ABSENT
    assert found.part("rng").presence is Presence.KEY_ABSENT


def test_two_optimizers(tmp_path: Path) -> None:
    trainer, _, _ = fit(tmp_path, 4, two=True)
    found = open_checkpoint(tmp_path / "last.ckpt")
    for i, (optimizer, scheduler) in enumerate([("optimizer", "scheduler"), ("optimizer_1", "scheduler_1")]):
        assert found.read(optimizer)["param_groups"] == trainer.optimizers[i].state_dict()["param_groups"]
        assert found.read(scheduler) == trainer.lr_scheduler_configs[i].scheduler.state_dict()


def test_weights_alone(tmp_path: Path) -> None:
    trainer, _, _ = fit(tmp_path, 1)
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    found = open_checkpoint(tmp_path / "weights.ckpt")
    assert found.part("optimizer").presence is Presence.KEY_ABSENT
    assert found.part("scheduler").presence is Presence.KEY_ABSENT


def test_a_scaler(tmp_path: Path) -> None:
    fit(tmp_path, 1)
    content = torch.load(tmp_path / "last.ckpt", weights_only=True)
    torch.save(content | {"MixedPrecision": {"scale": 4.0}}, tmp_path / "scaled.ckpt")
    assert open_checkpoint(tmp_path / "scaled.ckpt").read("grad_scaler") == {"scale": 4.0}
