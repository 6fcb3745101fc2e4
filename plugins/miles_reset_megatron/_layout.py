"""Which rank this is, and how Megatron has sharded the model over the ranks."""

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from miles_reset import CheckpointError
from miles_reset.agree import rank_and_world

_SIZES = {
    "tp": "get_tensor_model_parallel_world_size",
    "pp": "get_pipeline_model_parallel_world_size",
    "cp": "get_context_parallel_world_size",
    "ep": "get_expert_model_parallel_world_size",
}


def _parallel_state() -> Any:
    """Return Megatron's, if it is in use: who has not imported it does not use it."""
    state = sys.modules.get("megatron.core.parallel_state")
    return state if state is not None and state.model_parallel_is_initialized() else None


def layout() -> dict[str, int]:
    """Return the sizes of the parallel dimensions; none where Megatron's are not in use."""
    state = _parallel_state()
    return {name: int(getattr(state, size)()) for name, size in _SIZES.items()} if state is not None else {}


def tensor_and_pipeline_rank() -> tuple[int, int]:
    """Return the ranks that older files are named by."""
    state = _parallel_state()
    if state is None:
        return 0, 0
    return state.get_tensor_model_parallel_rank(), state.get_pipeline_model_parallel_rank()


def check(path: str, saved_world: object, saved_layout: object) -> None:
    """Refuse what was saved by another number of ranks, or sharded otherwise.

    Raises:
        CheckpointError: It was.
    """
    _, world = rank_and_world()
    if isinstance(saved_world, int) and saved_world != world:
        problem = f"was saved by {saved_world} ranks, and this run has {world}."
        raise CheckpointError(path, "", problem)
    now = layout()
    saved = saved_layout if isinstance(saved_layout, Mapping) else {}
    if any(saved[name] != now[name] for name in saved.keys() & now.keys()):
        sizes = [" ".join(f"{name}={one[name]}" for name in now if name in one) for one in (saved, now)]
        raise CheckpointError(path, "", f"was saved with {sizes[0]}, and this run has {sizes[1]}.")


def sharing(optimizer: Any) -> Iterator[tuple[int, Any]]:
    """Yield the optimizers that share out their state over data-parallel ranks, with their index.

    Their ``state_dict`` has neither moments nor master weights: those are gathered and scattered.
    """
    children = getattr(optimizer, "chained_optimizers", None)
    for index, child in enumerate([optimizer] if children is None else children):
        if hasattr(child, "get_parameter_state_dp_zero") and not getattr(child, "is_stub_optimizer", False):
            yield index, child


def root_of(child: Any) -> int:
    """Return the rank that gathers such an optimizer's state."""
    import torch

    return int(torch.distributed.get_process_group_ranks(child.data_parallel_group)[0])
