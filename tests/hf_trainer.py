"""A tiny model, and Hugging Face's Trainer over it."""

from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.layer(x)
        return {"loss": ((out - labels) ** 2).mean(), "logits": out}


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"x": torch.tensor([1.0, i / 12, -1.0]), "labels": torch.tensor([float(i)])}


class Watch(TrainerCallback):
    """Notes, before each step, its rate and how many steps the optimizer remembers."""

    def __init__(self) -> None:
        self.rates: dict[int, float] = {}
        self.clocks: dict[int, int] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **live: Any) -> None:
        inner = live["optimizer"].optimizer
        self.rates[state.global_step + 1] = inner.param_groups[0]["lr"]
        held = [int(entry["step"]) for entry in inner.state.values() if "step" in entry]
        self.clocks[state.global_step + 1] = max(held, default=0)


def build(folder: Path, steps: int, save: int, lr: float = 0.5, **more: Any) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        save_steps=save,
        learning_rate=lr,
        lr_scheduler_type="linear",
        warmup_steps=0,
        per_device_train_batch_size=4,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="steps",
        logging_strategy="no",
        **more,
    )
    trainer = Trainer(Model(), arguments, train_dataset=Rows())
    trainer.watch = Watch()
    trainer.add_callback(trainer.watch)
    return trainer


def train(folder: Path, steps: int, save: int, **more: Any) -> Trainer:
    trainer = build(folder, steps, save, **more)
    trainer.train()
    return trainer
