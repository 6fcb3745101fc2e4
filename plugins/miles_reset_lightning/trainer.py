"""Lightning's Trainer, resumed and reset by a policy."""

import logging
import sys
from typing import TYPE_CHECKING, Any

from miles_reset import (
    PolicyError,
    ResetReport,
    ResumePlan,
    ResumePolicy,
    ResumeReport,
    plan_resume,
    reset_optimizer_states,
)
from miles_reset.checkpoint import Checkpoint
from miles_reset_lightning import opened

if TYPE_CHECKING:
    from lightning.pytorch import Callback
elif "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    from pytorch_lightning import Callback
else:
    try:
        from lightning.pytorch import Callback
    except ImportError:
        from pytorch_lightning import Callback

logger = logging.getLogger("miles_reset")


class ResumePolicyCallback(Callback):  # type: ignore[misc, unused-ignore]
    """Makes ``trainer.fit(..., ckpt_path=...)`` follow a policy.

    Lightning loads the weights and its loops. What becomes of the optimizers, the schedulers and the loss
    scale is the policy's; Lightning saves no random numbers. The policy's ``reset`` is followed too: a reset
    comes before the save at the same step. A run that resumes where one is due resets again, which changes
    nothing if it was done, and makes up for it if it was not.

    Attributes:
        policy: What is followed.
        resumed: The receipts of the resume, one for each optimizer.
        last_reset: The receipt of the last reset, of all optimizers.
    """

    def __init__(self, policy: ResumePolicy) -> None:
        """Make a callback.

        Args:
            policy: What comes back, and when the optimizers are reset: in the unit ``step`` or ``epoch``.
        """
        super().__init__()
        if policy.reset.unit not in ("step", "epoch"):
            raise PolicyError("reset.unit", f"is {policy.reset.unit!r}; Lightning counts steps and epochs.")
        if isinstance(policy.iteration, int):
            problem = f"is {policy.iteration}; Lightning goes on where its loops were saved, or at 0 (fresh)."
            raise PolicyError("iteration", problem)
        self.policy = policy
        self.resumed: list[ResumeReport] = []
        self.last_reset: ResetReport | None = None
        self._saved: Checkpoint | None = None
        self._steps = 0

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Keep what the policy decides about from Lightning's own restoring."""
        if trainer.state.fn.value != "fit":
            return
        if trainer.strategy.restore_checkpoint_after_setup:
            name = type(trainer.strategy).__name__
            raise PolicyError("optimizer", f"comes back by {name} itself, which knows no policy.")
        self._saved = opened(str(trainer.ckpt_path), dict(checkpoint))
        checkpoint["optimizer_states"], checkpoint["lr_schedulers"] = [], []
        for key in (type(trainer.precision_plugin).__qualname__, "native_amp_scaling_state"):
            checkpoint.pop(key, None)
        if self.policy.iteration == "fresh":
            checkpoint.pop("loops", None)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Carry the policy out, once all is set up."""
        self._steps = trainer.global_step
        if self._saved is None:
            return
        plans = [self._plan(trainer, pl_module, i) for i in range(len(trainer.optimizers))]
        self.resumed = [plan.apply() for plan in plans]
        self._saved = None
        unit = self.policy.reset.unit
        done = self._steps if unit == "step" else trainer.current_epoch
        if done and self.policy.reset.due(done):
            self._reset(trainer, unit, done)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Reset if it is due after this step. A batch may be no step, or several."""
        steps = range(self._steps + 1, trainer.global_step + 1)
        self._steps = trainer.global_step
        if self.policy.reset.unit == "step" and any(map(self.policy.reset.due, steps)):
            self._reset(trainer, "step", self._steps)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Reset if it is due after this epoch."""
        if self.policy.reset.unit == "epoch" and self.policy.reset.due(trainer.current_epoch + 1):
            self._reset(trainer, "epoch", trainer.current_epoch + 1)

    def _plan(self, trainer: Any, module: Any, i: int) -> ResumePlan:
        """Plan for one optimizer, with its own scheduler."""
        assert self._saved is not None
        optimizer = trainer.optimizers[i]
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        mine = [j for j, scheduler in enumerate(schedulers) if scheduler.optimizer is optimizer]
        if len(mine) > 1:
            raise PolicyError("scheduler", f"is not clear: optimizer {i} has {len(mine)} schedulers.")
        names = {"optimizer": i, "scheduler": mine[0] if mine else None}
        parts = {name: saved for name, saved in self._saved.parts.items() if name not in names}
        for name, number in names.items():
            if number is not None:
                parts[name] = self._saved.part(name if number == 0 else f"{name}_{number}")
        saved = Checkpoint(self._saved.path, self._saved.format, parts, iteration_unit="step")
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        return plan_resume(
            self.policy,
            saved,
            optimizer=optimizer,
            scheduler=schedulers[mine[0]] if mine else None,
            model=module,
            extras={"grad_scaler": scaler} if scaler is not None else {},
        )

    def _reset(self, trainer: Any, unit: str, done: int) -> None:
        self.last_reset = report = reset_optimizer_states(trainer.optimizers)
        if trainer.is_global_zero:
            logger.info("optimizer reset at %s %s: %s", unit, done, report.summary("reset"))
        for own in trainer.loggers:
            own.log_metrics({"optimizer_reset_values": report.changed}, step=trainer.global_step)
