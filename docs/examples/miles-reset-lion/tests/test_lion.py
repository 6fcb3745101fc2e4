"""Hold the schemas to the law, with the real optimizers and the installed plugin."""

import importlib

import pytest

from miles_reset.testing import assert_reset_is_fresh


@pytest.mark.parametrize("module", ["lion_pytorch", "foreach", "cautious_lion"])
def test_a_reset_lion_steps_like_a_fresh_one(module: str) -> None:
    lion = importlib.import_module(f"lion_pytorch.{module}").Lion
    assert_reset_is_fresh(lambda parameters: lion(parameters, lr=1e-3, weight_decay=0.1))
