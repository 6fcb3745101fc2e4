"""Show that `run_ranks` waits for all ranks, and says which one failed and how."""

import pytest
import ranks
import torch
from ranks import run_ranks


def fail_on_rank_one(text: str) -> None:
    if torch.distributed.get_rank() == 1:
        raise LookupError(text)
    torch.distributed.barrier()


@pytest.mark.slow
def test_failure_of_one_rank_ends_all_with_its_traceback() -> None:
    with pytest.raises(RuntimeError, match=r"rank 1 failed(.|\n)*LookupError: a fault of one rank"):
        run_ranks(fail_on_rank_one, 2, "a fault of one rank")


def test_ranks_that_take_too_long_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "RANKS_TIMEOUT", 0.1)
    with pytest.raises(TimeoutError, match="2 ranks still ran"):
        run_ranks(fail_on_rank_one, 2, "")
