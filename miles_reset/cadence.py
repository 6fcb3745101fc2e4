"""When a run resets its optimizer: at each count once, also across a resume."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from miles_reset.agree import rank_and_world
from miles_reset.policy import ResetSchedule
from miles_reset.registry import Registry
from miles_reset.report import ResetReport
from miles_reset.reset import reset_optimizer_states

logger = logging.getLogger("miles_reset")


class ResetClock:
    """Resets an optimizer when a policy's ``[reset]`` says so. It is saved and restored as a part of its own.

    Call it after each unit, and save it after that. What was due at the saved count and had not been done is
    done at the next call, and what had been done is not done again. One that was never saved begins with the
    count before its first call: what was due earlier is not made up for::

        clock = ResetClock(policy.reset)
        start = plan_resume(policy, path, ..., extras={"reset_clock": clock}).apply().iteration
        for step in range(start, steps):
            ...
            clock(optimizer, step + 1)
    """

    def __init__(self, schedule: ResetSchedule, *, log: Callable[[str], Any] | None = None) -> None:
        """Make a clock at which nothing has been counted yet.

        Args:
            schedule: When to reset.
            log: Where the receipt goes on rank 0: a trainer's own logger, say. By default the library's.
        """
        self.schedule = schedule
        self.last: int | None = None
        self._log = log or logger.info

    def due(self, count: int) -> bool:
        """Say whether a reset is due once ``count`` units are done; also one that was passed over."""
        last = count - 1 if self.last is None else self.last
        every = self.schedule.every
        passed = every is not None and count // every > max(last, 0) // every
        return passed or any(last < at <= count for at in self.schedule.at)

    def __call__(
        self, optimizer: Any, count: int, *, unit: str | None = None, registry: Registry | None = None
    ) -> ResetReport | None:
        """Reset the optimizer if that is due once ``count`` units are done.

        Args:
            optimizer: See :func:`miles_reset.reset_optimizer_states`.
            count: How many units are done.
            unit: What is counted. Where it is not what the policy counts, nothing is done.
            registry: See :func:`miles_reset.reset_optimizer_states`.

        Returns:
            The receipt, if it was reset.
        """
        if unit is not None and unit != self.schedule.unit:
            return None
        report = reset_optimizer_states(optimizer, registry=registry) if self.due(count) else None
        self.done(count)
        if report is not None and rank_and_world()[0] == 0:
            self._log(f"optimizer reset at {self.schedule.unit} {count}: {report.summary('reset')}")
        return report

    def done(self, count: int) -> None:
        """Note that this count was reached, and what was due until then was done."""
        self.last = count if self.last is None else max(self.last, count)

    def state_dict(self) -> dict[str, Any]:
        """Return how far it has counted."""
        return {"last": self.last, "unit": self.schedule.unit}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where a saved one had counted; one that counted something else says nothing."""
        self.last = state["last"] if state.get("unit") == self.schedule.unit else None
