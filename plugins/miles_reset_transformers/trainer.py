"""Hugging Face's Trainer, resumed and reset by a policy."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformers import Trainer, TrainerCallback

from miles_reset import (
    PolicyError,
    ResetReport,
    ResumePolicy,
    ResumeReport,
    open_checkpoint,
    plan_resume,
    reset_optimizer_states,
)

logger = logging.getLogger("miles_reset")


class ResumePolicyCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Resets the optimizer when the policy's schedule says so: ``Trainer(callbacks=[...])``.

    The reset comes before the save at the same step. A run that resumes where one is due resets again, which
    changes nothing if it was done, and makes up for it if it was not.

    Attributes:
        policy: What is followed.
        resumed: The receipt of the resume, where :func:`use_policy` carried one out.
        last_reset: The receipt of the last reset.
    """

    def __init__(self, policy: ResumePolicy, log: Callable[[dict[str, float]], Any] | None = None) -> None:
        """Make a callback.

        Args:
            policy: Whose ``reset`` is followed; its unit is ``step`` or ``epoch``.
            log: Is told of each reset, besides the logger ``miles_reset``: the trainer's ``log``, say.
        """
        if policy.reset.unit not in ("step", "epoch"):
            raise PolicyError("reset.unit", f"is {policy.reset.unit!r}; the Trainer counts steps and epochs.")
        self.policy = policy
        self.resumed: ResumeReport | None = None
        self.last_reset: ResetReport | None = None
        self._log = log

    def on_train_begin(self, args: Any, state: Any, control: Any, **live: Any) -> None:
        """Make up for what was due when the checkpoint was saved."""
        if state.global_step and (self.policy.reset.unit == "step" or state.epoch == int(state.epoch)):
            self._reset_if_due(state, live)

    def on_step_end(self, args: Any, state: Any, control: Any, **live: Any) -> None:
        """Reset if it is due after this step."""
        if self.policy.reset.unit == "step":
            self._reset_if_due(state, live)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **live: Any) -> None:
        """Reset if it is due after this epoch."""
        if self.policy.reset.unit == "epoch":
            self._reset_if_due(state, live)

    def _reset_if_due(self, state: Any, live: dict[str, Any]) -> None:
        unit = self.policy.reset.unit
        done = state.global_step if unit == "step" else round(state.epoch)
        if self.policy.reset.due(done):
            self.last_reset = report = reset_optimizer_states(_inner(live["optimizer"]))
            if state.is_world_process_zero:
                logger.info("optimizer reset at %s %s: %s", unit, done, report.summary("reset"))
            if self._log is not None:
                self._log({"optimizer_reset_values": report.changed})


def use_policy(trainer: Trainer, policy: ResumePolicy) -> Trainer:
    """Make ``trainer.train(resume_from_checkpoint=...)`` follow a policy.

    The Trainer loads the weights, finds its place in the data, and brings the random numbers back at the
    right moment. What becomes of the optimizer, the scheduler and the loss scale is the policy's.

    Args:
        trainer: The trainer, before it trains.
        policy: What comes back, and when the optimizer is reset.

    Returns:
        The trainer, with a :class:`ResumePolicyCallback`, which has the receipts.

    Raises:
        PolicyError: The policy asks for what a Trainer does not do.
    """
    if policy.iteration not in ("restore", "restore-if-present"):
        problem = f"is {policy.iteration!r}; a Trainer that resumes always takes it from trainer_state.json."
        raise PolicyError("iteration", problem)
    if trainer.is_deepspeed_enabled:
        raise PolicyError("optimizer", "comes back by DeepSpeed itself, which knows no policy.")
    callback = ResumePolicyCallback(policy, trainer.log)
    trainer.add_callback(callback)
    load_rng = trainer._load_rng_state
    restores_rng = False

    def load_optimizer_and_scheduler(checkpoint: str | None) -> None:
        nonlocal restores_rng
        if checkpoint is None:
            return
        found = open_checkpoint(checkpoint, allow=policy.allow)
        later = replace(found.part("rng"), read=dict, size=0)  # the Trainer does it, when data were skipped
        found = replace(found, parts={**found.parts, "rng": later})
        scaler = getattr(trainer.accelerator, "scaler", None)
        plan = plan_resume(
            policy,
            found,
            optimizer=_inner(trainer.optimizer),
            scheduler=trainer.lr_scheduler,
            model=trainer.model,
            extras={"grad_scaler": scaler} if scaler is not None else {},
        )
        restores_rng = any(line.part == "rng" and line.outcome == "restore" for line in plan.parts)
        callback.resumed = plan.apply()

    def load_rng_state(checkpoint: str | None) -> None:
        if restores_rng:
            load_rng(checkpoint)

    trainer._load_optimizer_and_scheduler = load_optimizer_and_scheduler
    trainer._load_scaler = lambda checkpoint: None
    trainer._load_rng_state = load_rng_state
    return trainer


def _inner(optimizer: Any) -> Any:
    """Return the optimizer that Accelerate wrapped."""
    return getattr(optimizer, "optimizer", optimizer)
