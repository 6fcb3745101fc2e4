"""A tiny model that Accelerate trains."""

import torch
from accelerate import Accelerator


class Run:
    """A model, and one optimizer or more with a scheduler each."""

    def __init__(self, lr: float = 0.5, optimizers: int = 1) -> None:
        torch.manual_seed(0)
        self.accelerator = Accelerator(cpu=True)
        self.model = self.accelerator.prepare(torch.nn.Linear(3, optimizers))
        self.optimizers, self.schedulers = [], []
        for i, parameter in enumerate([list(self.model.parameters())] if optimizers == 1 else
                                      [[p] for p in self.model.parameters()]):  # fmt: skip
            optimizer = torch.optim.AdamW(parameter, lr=lr * (i + 1))
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr * (i + 1), total_steps=20)
            optimizer, scheduler = self.accelerator.prepare(optimizer, scheduler)
            self.optimizers.append(optimizer)
            self.schedulers.append(scheduler)
        self.optimizer, self.scheduler = self.optimizers[0], self.schedulers[0]
        self.rates: list[list[float]] = []

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.rates.append([optimizer.param_groups[0]["lr"] for optimizer in self.optimizers])
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            self.accelerator.backward(self.model(torch.ones(2, 3)).square().mean())
            for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
                optimizer.step()
                scheduler.step()

    def clock(self) -> int:
        """Return how many steps the first optimizer remembers."""
        state = self.optimizer.optimizer.state.values()
        return max((int(entry["step"]) for entry in state if "step" in entry), default=0)
