"""Hold the Megatron plugin to the law where two ranks share the work."""

import logging

import pytest
import torch
from ranks import run_ranks

pytest.importorskip("megatron.core")

from megatron_cpu import FIXTURES, UPSTREAM_WARNINGS, build, megatron_session, trial

from miles_reset import default_registry, reset_optimizer_states
from miles_reset.testing import assert_reset_is_fresh
from miles_reset.walk import walk

SHARING = [
    "distributed_bf16",
    "distributed_experts",
    "distributed_fused",
    "distributed_hybrid",
    "distributed_hybrid_aware",
    "distributed_hybrid_aware_fused",
    "muon_layer_wise",
    "muon_layer_wise_layout",
    "adaptive_muon_normuon",
]

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings(*UPSTREAM_WARNINGS)]


def on_both_ranks(names: list[str]) -> None:
    """Do all of it in one go: to start the ranks takes longer than to step every optimizer."""
    with megatron_session():
        for name in names:
            shares_the_work(name)
            reset_is_fresh(name)
        logs_once_per_job()


def shares_the_work(name: str) -> None:
    fixture = build(name)
    params = list(fixture.net.parameters())
    for i in range(2):
        fixture.step(i)
    for param in params:
        everywhere = [torch.empty_like(param) for _ in range(2)]
        torch.distributed.all_gather(everywhere, param.detach())
        assert torch.equal(*everywhere), f"{name}: the ranks hold different weights"
    leaves = walk(fixture.optimizer, default_registry()).leaves
    held = [param for leaf in leaves for group in leaf.obj.param_groups for param in group["params"]]
    assert elements(held) < elements(params), f"{name}: this rank does all the work"


def elements(params: list[torch.Tensor]) -> int:
    return sum(param.numel() for param in params)


def reset_is_fresh(name: str) -> None:
    round_trips = (False,) if FIXTURES[name].failure("round_trip") else (False, True)
    try:
        assert_reset_is_fresh(lambda _: trial(name), warmups=(3,), further=5, round_trips=round_trips)
    except AssertionError as error:
        error.add_note(name)
        raise


def logs_once_per_job() -> None:
    fixture = build("fp32_adam")
    fixture.step(0)
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("miles_reset")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    reset_optimizer_states(fixture.optimizer)
    logger.removeHandler(handler)
    assert len(records) == (torch.distributed.get_rank() == 0)


def test_reset_is_fresh_on_both_ranks() -> None:
    names = [
        name for name in SHARING if not FIXTURES[name].unavailable() and not FIXTURES[name].failure("build")
    ]
    run_ranks(on_both_ranks, 2, names)
