"""Every test starts on one thread and from the same random numbers; a census runs more of them."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

Hold = Callable[[Any], None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--census", type=Path, help="run all variants of all classes, and write what was found")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--census")
    if path and not hasattr(config, "workerinput"):
        from census import Census

        config.pluginmanager.register(Census(path))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is for a census alone."""
    if not config.getoption("--census"):
        left_out = [item for item in items if item.get_closest_marker("census")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("census")]


@pytest.fixture(autouse=True)
def repeatable() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)


@pytest.fixture
def hold(request: pytest.FixtureRequest) -> Hold:
    """Return what holds a case to the law of a reset; in a census it also records what was found."""

    def hold(case: Any) -> None:
        if request.config.getoption("--census"):
            from census import begin, look_into

            found = begin(case)
            request.node.user_properties.append(("census", vars(found)))
            look_into(case, found)
        case.assert_reset_is_fresh()

    return hold


@pytest.fixture
def nothing_is_compiled() -> Iterator[None]:
    """Run what a library compiles as it is written: to compile it would take minutes."""
    with torch.compiler.set_stance("force_eager"):
        yield
