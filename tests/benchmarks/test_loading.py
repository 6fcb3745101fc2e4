"""The time of the import, of the registry, and of a reset beside many plugins."""

import subprocess
import sys
from functools import partial
from statistics import median
from time import process_time

import pytest
from benchmarks.conftest import Note, Scales
from benchmarks.ratios import Ratio
from large import HybridStandIn, InventedPlugin

from miles_reset import load_registry, reset_optimizer_states

PLUGINS = [InventedPlugin(number, schemas=15) for number in range(30)]
PROCESSES = 7
IMPORT = """
from time import perf_counter
import torch
start = perf_counter()
import miles_reset
print(perf_counter() - start)
"""


def test_the_import_adds_little_to_that_of_torch(note: Note) -> None:
    times = []
    for _ in range(1 + PROCESSES):  # the first one may have to compile
        done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
        times.append(float(done.stdout))
    note(Ratio("import miles_reset after torch", "0.2 s", 0.2, median(times[1:]), bound=1.0))


@pytest.mark.benchmark(timer=process_time)
def test_the_registry_of_many_plugins_is_built_in_no_time(scales: Scales) -> None:
    """Without looking for installed ones: how long that takes depends on all that is installed."""
    build = partial(load_registry, plugins=PLUGINS, entry_points=False)
    assert len(build().claims) == 30 * 15
    scales.limit("registry of 30 plugins of 15 schemas", build, "30 ms", 0.030)


@pytest.mark.benchmark(timer=process_time)
def test_the_registry_of_the_installed_plugins_is_found_in_no_time(scales: Scales) -> None:
    assert load_registry().claims
    scales.limit("registry of the installed plugins", load_registry, "30 ms", 0.030)


def test_plugins_do_not_slow_a_reset(scales: Scales) -> None:
    hybrid = HybridStandIn(5_000)
    few, many = load_registry(), load_registry(plugins=PLUGINS)
    scales.weigh(
        "5,000 leaves beside 30 plugins", lambda: reset_optimizer_states(hybrid, registry=many),
        "the installed plugins alone", lambda: reset_optimizer_states(hybrid, registry=few), bound=1.05,
    )  # fmt: skip
