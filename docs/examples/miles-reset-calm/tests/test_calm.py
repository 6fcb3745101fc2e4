"""Hold the schema to the law, with the real optimizer and the installed plugin."""

from functools import partial

import pytest
from calm import Calm

from miles_reset.testing import assert_reset_is_fresh


@pytest.mark.parametrize("options", [{}, {"lr": 0.5, "beta": 0.99}])
def test_a_reset_calm_steps_like_a_fresh_one(options: dict[str, float]) -> None:
    assert_reset_is_fresh(partial(Calm, **options))
