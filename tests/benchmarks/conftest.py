"""Time what a reset takes, side by side with what it is held against."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import pytest
import torch
from benchmarks.ratios import Ratio, table
from pytest_benchmark.fixture import BenchmarkFixture

CORES = 2
ROUNDS = 31
WARMUP = 2
RATIOS = pytest.StashKey[list[Ratio]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[RATIOS] = []
    config.option.benchmark_quiet = True  # one table: ours


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.stash[RATIOS]:
        terminalreporter.section("ratios of medians")
        terminalreporter.write_line("\n".join(table(config.stash[RATIOS])))


@pytest.fixture(autouse=True)
def two_cores(repeatable: None) -> None:
    torch.set_num_threads(CORES)


Note = Callable[[Ratio], None]


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Note:
    """Return a function that puts a ratio into the table, and holds it to its bound."""

    def put(ratio: Ratio) -> None:
        request.config.stash[RATIOS].append(ratio)
        assert ratio.holds, f"{ratio.case}: {ratio.value:.2f} of {ratio.against}, not {ratio.bound} at most"

    return put


@dataclass
class Scales:
    """Weighs a function against another one, or against a limit, and notes the ratio of medians.

    The garbage collector runs as it does in any process.
    """

    benchmark: BenchmarkFixture
    note: Note

    def weigh(
        self,
        case: str,
        ours: Callable[[], object],
        against: str,
        other: Callable[[], object],
        *,
        bound: float,
        aim: float | None = None,
        rounds: int = ROUNDS,
    ) -> None:
        """Hold the time of one function against that of another.

        They take turns, so that what else happens on the machine slows both down alike.
        """
        others = []

        def time_other() -> None:
            start = perf_counter()
            other()
            others.append(perf_counter() - start)

        median = self._median(ours, rounds, setup=time_other)
        self.note(Ratio(case, against, statistics.median(others[WARMUP:]), median, bound, aim))

    def limit(self, case: str, ours: Callable[[], object], against: str, seconds: float) -> None:
        """Hold the time of a function against a fixed one.

        Mark the benchmark with ``timer=process_time``: nothing that could slow down alike is measured
        beside it, so what else happens on the machine must not count.
        """
        self.note(Ratio(case, against, seconds, self._median(ours, ROUNDS), bound=1.0))

    def _median(
        self, ours: Callable[[], object], rounds: int, setup: Callable[[], None] | None = None
    ) -> float:
        self.benchmark.pedantic(ours, setup=setup, rounds=rounds, warmup_rounds=WARMUP)
        median: float = self.benchmark.stats["median"]
        return median


@pytest.fixture
def scales(benchmark: BenchmarkFixture, note: Note) -> Scales:
    if benchmark.disabled:
        pytest.skip("benchmarks are disabled")
    return Scales(benchmark, note)
