"""Every test starts on one thread and from the same random numbers."""

import random

import pytest
import torch


@pytest.fixture(autouse=True)
def repeatable() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
