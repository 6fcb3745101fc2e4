"""The states of random number generators, as trainers save them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from miles_reset.checkpoint.saved import check_sizes
from miles_reset.errors import CheckpointError

_NAMES = {
    "python": ("python", "random", "random_rng_state", "random_state"),
    "numpy": ("numpy", "np", "np_rng_state", "numpy_random_seed"),
    "cpu": ("cpu", "torch", "torch_rng_state", "torch_manual_seed"),
    "cuda": ("cuda", "cuda_rng_state", "torch_cuda_manual_seed"),
}
"""The keys of a mapping's own, of Megatron (``..._rng_state``), and of Accelerate (``..._seed``)."""


def check_rng(state: Any, where: str) -> None:
    """Try saved states on generators that nobody uses.

    Raises:
        CheckpointError: They are no states of generators.
    """
    found = _known(state)
    check_sizes(found, where, "rng")
    left_to_the_trainer = isinstance(state, Mapping) and not state
    if not found and not left_to_the_trainer:
        raise CheckpointError(where, "rng", "holds no state of a random number generator that is known.")
    try:
        _set(found, random.Random().setstate, np.random.RandomState().set_state, torch.Generator().set_state)
        cuda = found.get("cuda", [])
        for one in cuda if isinstance(cuda, (list, tuple)) else [cuda]:
            if not isinstance(one, torch.Tensor) or one.dtype is not torch.uint8:
                raise TypeError("no state of a CUDA device")
    except Exception as error:
        raise CheckpointError(where, "rng", f"cannot be restored: {error!r}.") from error


def restore_rng(state: Any) -> None:
    """Bring the random number generators of Python, numpy, torch and CUDA to a saved state."""
    found = _known(state)
    _set(found, random.setstate, np.random.set_state, torch.set_rng_state)
    if "cuda" in found and torch.cuda.is_available():
        cuda = found["cuda"]
        if isinstance(cuda, (list, tuple)):
            torch.cuda.set_rng_state_all(list(cuda)[: torch.cuda.device_count()])
        else:
            torch.cuda.set_rng_state(cuda)


def _known(state: Any) -> dict[str, Any]:
    if isinstance(state, (list, tuple)) and len(state) == 1:  # Megatron's, of one data parallel rank
        state = state[0]
    if not isinstance(state, Mapping):
        return {}
    keys = {kind: next((name for name in names if name in state), None) for kind, names in _NAMES.items()}
    return {kind: state[key] for kind, key in keys.items() if key is not None}


def _set(
    found: Mapping[str, Any],
    python: Callable[[Any], Any],
    numpy: Callable[[Any], Any],
    cpu: Callable[[Any], Any],
) -> None:
    if "python" in found:
        version, numbers, gauss = found["python"]
        python((version, tuple(numbers), gauss))
    if "numpy" in found:
        numpy(found["numpy"])
    if "cpu" in found:
        cpu(found["cpu"].clone())
