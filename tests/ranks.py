"""Run a test's function on several ranks at once, each a process of its own."""

import contextlib
import inspect
import multiprocessing
import os
import runpy
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection
from typing import Any

import torch

END_TOGETHER = timedelta(seconds=5)
"""How long a rank that is done waits for the others, which may still read from it."""

RANKS_TIMEOUT = 120.0
"""How many seconds `run_ranks` gives all its ranks together."""


def run_ranks(fn: Callable[..., None], world_size: int, *args: Any) -> None:
    """Run a function on several ranks, each in a gloo process group.

    Args:
        fn: A function at the top level of a test module. The ranks run that file to find it.
        world_size: The number of ranks.
        args: What to call the function with; it must be picklable.

    Raises:
        RuntimeError: A rank failed. The message holds its traceback.
        TimeoutError: The ranks were not done after `RANKS_TIMEOUT` seconds.
    """
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    spawn = multiprocessing.get_context("spawn")
    failures = spawn.SimpleQueue()
    call = (inspect.getfile(fn), fn.__name__, args)
    ranks = [
        spawn.Process(
            target=_run_rank, name=f"rank {rank}", args=(call, failures, rank, world_size, store.port)
        )
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    try:
        _wait(ranks, failures)
    finally:
        for process in ranks:
            process.kill()
            process.join()


def _run_rank(
    call: tuple[str, str, tuple[Any, ...]], failures: Any, rank: int, world_size: int, port: int
) -> None:
    file, name, args = call
    torch.set_num_threads(1)
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    try:
        runpy.run_path(file)[name](*args)
        store.set(f"rank {rank} is done", "")
        with contextlib.suppress(RuntimeError):  # one may have died, as some tests want it
            store.wait([f"rank {other} is done" for other in range(world_size)], END_TOGETHER)
    except BaseException:
        # Said before the group ends: its end breaks the connections of the other ranks.
        failures.put(f"rank {rank} failed:\n{traceback.format_exc()}")
        raise
    finally:
        torch.distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a thread of gloo's that is not joined yet would abort the process at its end


def _wait(ranks: list[Any], failures: Any) -> None:
    """Wait for all ranks, or for the first that fails."""
    deadline = time.monotonic() + RANKS_TIMEOUT
    running = {process.sentinel: process for process in ranks}
    while running:
        ended = connection.wait(list(running), deadline - time.monotonic())
        if not ended:
            raise TimeoutError(f"{len(running)} ranks still ran after {RANKS_TIMEOUT} s")
        for process in [running.pop(sentinel) for sentinel in ended]:
            process.join()
            if not failures.empty():
                raise RuntimeError(failures.get())
            if process.exitcode:
                raise RuntimeError(f"{process.name} ended with exit code {process.exitcode}")


_even_all_gather = torch.distributed.all_gather


def all_gather(outputs: list[Any], tensor: Any, group: Any = None, async_op: bool = False) -> Any:
    """Do as ``torch.distributed.all_gather``, also with tensors of uneven sizes, which gloo does not take."""
    if len({output.numel() for output in outputs}) == 1:
        return _even_all_gather(outputs, tensor, group=group, async_op=async_op)
    outputs[torch.distributed.get_rank(group)].copy_(tensor)
    for rank, output in enumerate(outputs):
        torch.distributed.broadcast(output, group=group, group_src=rank)
    return None
