"""When a run resets: once at each count, none passed over, also where it was interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from miles_reset import ResumePolicy, plan_resume
from miles_reset.cadence import ResetClock
from miles_reset.policy import ResetSchedule

STEPS = 12


class Loop:
    """A plain training loop, which saves after each step and notes when it reset."""

    def __init__(self, policy: ResumePolicy, folder: Path) -> None:
        self.policy, self.path = policy, folder / "checkpoint.pt"
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.optimizer = torch.optim.AdamW([self.weight], lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.1, total_iters=STEPS)
        self.log: list[str] = []
        self.clock = ResetClock(policy.reset, log=self.log.append)
        self.start = 0

    def resume(self) -> Loop:
        saved = torch.load(self.path, weights_only=True)
        self.weight.data.copy_(saved["model"])
        live = {
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "extras": {"reset_clock": self.clock},
        }
        self.start = plan_resume(self.policy, self.path, **live).apply().iteration or 0
        return self

    def run(self, stop: int, *, dies_before_reset: bool = False) -> list[int]:
        """Train to a step; return the counts at which it reset."""
        resets = []
        for step in range(self.start, stop):
            self.weight.grad = torch.ones(3) * (step + 1)
            self.optimizer.step()
            self.scheduler.step()
            if dies_before_reset and step + 1 == stop:
                self.save(step + 1)
                break
            if self.clock(self.optimizer, step + 1, unit="step") is not None:
                resets.append(step + 1)
            self.save(step + 1)
        return resets

    def save(self, step: int) -> None:
        parts = {"optimizer": self.optimizer, "scheduler": self.scheduler, "reset_clock": self.clock}
        state = {name: part.state_dict() for name, part in parts.items()}
        torch.save({**state, "iteration": step, "model": self.weight.data}, self.path)


SCHEDULES: list[tuple[dict[str, Any], list[int]]] = [
    ({"every": 4}, [4, 8, 12]),
    ({"at": [1, 5, 6]}, [1, 5, 6]),
    ({"every": 5, "at": [6]}, [5, 6, 10]),
    ({}, []),
    ({"every": 2, "unit": "rollout"}, []),
]


@pytest.mark.parametrize(("schedule", "counts"), SCHEDULES)
@pytest.mark.parametrize("stopped", [1, 4, 5, 6, 7, 11])
def test_a_run_that_is_interrupted_resets_as_one_that_is_not(
    schedule: dict[str, Any], counts: list[int], stopped: int, tmp_path: Path
) -> None:
    policy = ResumePolicy.from_dict({"reset": schedule})
    whole, first, second = (Loop(policy, tmp_path) for _ in range(3))
    assert whole.run(STEPS) == counts
    before = first.run(stopped)
    after = second.resume().run(STEPS)
    assert before + after == counts
    assert torch.equal(whole.weight, second.weight)
    assert len(first.log) == len(before)
    assert all(line.startswith("optimizer reset at step ") for line in second.log)


def test_a_reset_that_was_due_and_not_done_is_done_once_after_the_resume(tmp_path: Path) -> None:
    policy = ResumePolicy.from_dict({"reset": {"every": 4}})
    Loop(policy, tmp_path).run(4, dies_before_reset=True)
    resumed = Loop(policy, tmp_path).resume()
    assert resumed.clock(resumed.optimizer, resumed.start, unit="step") is not None
    assert resumed.clock(resumed.optimizer, resumed.start, unit="step") is None
    assert resumed.run(STEPS) == [8, 12]


def test_a_reset_at_the_resume_comes_once(tmp_path: Path) -> None:
    policy = ResumePolicy.from_dict({"reset": {"every": 4, "on_resume": True}})
    Loop(policy, tmp_path).run(6)
    resumed = Loop(policy, tmp_path).resume()
    assert not resumed.optimizer.state
    assert resumed.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * (0.1 + 0.9 * 6 / STEPS))
    assert resumed.run(STEPS) == [8, 12]


def schedule_of(data: dict[str, Any]) -> ResetSchedule:
    return ResumePolicy.from_dict({"reset": data}).reset


class TestTheClock:
    def count(self, schedule: dict[str, Any], counts: list[int], saved_at: int | None = None) -> list[int]:
        """Return at which counts it resets; it is saved, and goes on in another run, where that is said."""
        clock = ResetClock(schedule_of(schedule))
        done = []
        for count in counts:
            if clock(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]), count) is not None:
                done.append(count)
            if count == saved_at:
                state = clock.state_dict()
                clock = ResetClock(schedule_of(schedule))
                clock.load_state_dict(state)
        return done

    @pytest.mark.parametrize("saved_at", [None, 3, 4, 5, 8])
    def test_once_at_each_count_also_across_a_resume(self, saved_at: int | None) -> None:
        resumed = [saved_at] if saved_at is not None else []
        counts = sorted([*range(1, 10), *resumed])  # a resume asks again at its count
        assert self.count({"every": 4}, counts, saved_at) == [4, 8]
        assert self.count({"at": [2, 8]}, counts, saved_at) == [2, 8]

    def test_what_was_passed_over_is_done(self) -> None:
        assert self.count({"every": 4}, [3, 6, 9, 12, 13]) == [6, 9, 12]
        assert self.count({"at": [5]}, [3, 6, 9]) == [6]

    def test_another_unit_is_not_counted(self) -> None:
        clock = ResetClock(schedule_of({"every": 1, "unit": "rollout"}))
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
        assert clock(optimizer, 4, unit="step") is None
        assert clock(optimizer, 4, unit="rollout") is not None

    def test_the_receipt_goes_to_the_trainers_logger_too(self) -> None:
        lines: list[str] = []
        clock = ResetClock(schedule_of({"at": [3]}), log=lines.append)
        clock(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]), 3)
        assert len(lines) == 1
        assert lines[0].startswith("optimizer reset at step 3")
