"""A tiny Lightning module, and a trainer over it."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer


class Model(LightningModule):
    """Trained by one optimizer, or by two in turn."""

    def __init__(self, lr: float = 0.5, two: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 1)
        self.other = torch.nn.Linear(3, 1)
        self.lr = lr
        self.two = two
        self.automatic_optimization = not two

    def training_step(self, batch: torch.Tensor, i: int) -> Any:
        if not self.two:
            return self.layer(batch).square().mean()
        for optimizer, layer in zip(self.optimizers(), (self.layer, self.other), strict=True):
            optimizer.zero_grad()
            self.manual_backward(layer(batch).square().mean())
            optimizer.step()
        for scheduler in self.lr_schedulers():
            scheduler.step()
        return None

    def configure_optimizers(self) -> Any:
        layers = [self.layer, self.other] if self.two else [self.layer]
        optimizers = [
            torch.optim.AdamW(layer.parameters(), lr=self.lr * (i + 1)) for i, layer in enumerate(layers)
        ]
        configs = [
            {"scheduler": torch.optim.lr_scheduler.ExponentialLR(one, 0.9), "interval": "step"}
            for one in optimizers
        ]
        return optimizers, configs


class Watch(Callback):
    """Notes, before each batch, the rates and how many steps the optimizers remember."""

    def __init__(self) -> None:
        self.rates: dict[int, list[float]] = {}
        self.clocks: dict[int, list[int]] = {}

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, i: int) -> None:
        step = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        self.rates[step] = [one.param_groups[0]["lr"] for one in trainer.optimizers]
        self.clocks[step] = [
            max((int(entry["step"]) for entry in one.state.values() if "step" in entry), default=0)
            for one in trainer.optimizers
        ]


def fit(
    folder: Path, steps: int, *callbacks: Callback, lr: float = 0.5, two: bool = False, **more: Any
) -> tuple[Trainer, Model, Watch]:
    """Train, from a checkpoint if ``ckpt_path`` is given, and save at the end."""
    ckpt_path = more.pop("ckpt_path", None)
    model, watch = Model(lr, two), Watch()
    trainer = Trainer(
        max_steps=steps,
        max_epochs=-1,
        accelerator="cpu",
        logger=more.pop("logger", False),
        enable_checkpointing=more.pop("enable_checkpointing", False),
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*callbacks, watch],
        **more,
    )
    rows = torch.arange(36.0).reshape(12, 3) / 36
    trainer.fit(
        model, torch.utils.data.DataLoader(rows, batch_size=4), ckpt_path=ckpt_path, weights_only=True
    )
    trainer.save_checkpoint(folder / "last.ckpt")
    return trainer, model, watch
