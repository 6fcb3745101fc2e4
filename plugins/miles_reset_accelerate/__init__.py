"""How checkpoints of Accelerate are read, how it resumes by a policy, and how its optimizer is unwrapped.

::

    from miles_reset_accelerate import resume_accelerate

    resume_accelerate(accelerator, "checkpoint_0", policy)  # where accelerator.load_state("checkpoint_0") was
"""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_reset import UnwrapRule, hookimpl
from miles_reset.checkpoint import Checkpoint, CheckpointReader, Saved, Source, TorchFile

if TYPE_CHECKING:
    from miles_reset_accelerate.trainer import resume_accelerate

__all__ = ["resume_accelerate"]

_RNG = {
    "python": "random_state",
    "numpy": "numpy_random_seed",
    "cpu": "torch_manual_seed",
    "cuda": "torch_cuda_manual_seed",
}
"""Which random numbers are under which key."""


def __getattr__(name: str) -> Any:
    if name != "resume_accelerate":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from miles_reset_accelerate import trainer  # which imports what a plugin does not

    return getattr(trainer, name)


def _is_accelerate(path: Path) -> bool:
    return (path / "random_states_0.pkl").is_file()


def _open(source: Source) -> Checkpoint:
    """List the files. The second optimizer is the part ``optimizer_1``, and so on."""
    states = source.file(f"random_states_{source.rank}.pkl")
    rng = states.part()
    parts = {
        "optimizer": source.file("optimizer.bin").part(),
        "scheduler": source.file("scheduler.bin").part(),
        "grad_scaler": source.file("scaler.pt").part(),
        "rng": Saved(rng.where, rng.presence, partial(_rng, states), rng.detail),
        "accumulation_step": states.part("step"),
    }
    for kind in ("optimizer_*.bin", "scheduler_*.bin", "custom_checkpoint_*.pkl"):
        parts |= {file.stem: source.file(file.name).part() for file in sorted(source.path.glob(kind))}
    facts = {"saved by ranks": str(len(list(source.path.glob("random_states_*.pkl"))))}
    return Checkpoint(str(source.path), "accelerate", parts, facts=facts)


def _rng(states: TorchFile) -> dict[str, Any]:
    return {name: states.content[key] for name, key in _RNG.items() if key in states.content}


@hookimpl
def miles_reset_checkpoint_readers() -> list[CheckpointReader]:
    """Return the reader of the folders that save_state writes."""
    return [CheckpointReader("accelerate", _is_accelerate, _open)]


@hookimpl
def miles_reset_unwrap_rules() -> list[UnwrapRule]:
    """Return the rule of Accelerate's wrapper, whose state and groups are those of what it holds."""
    return [UnwrapRule("accelerate.optimizer.AcceleratedOptimizer", "optimizer")]
