"""How torch's own two kinds of checkpoints are read, and what random number states are made of."""

from pathlib import Path

from miles_reset.checkpoint import (
    Checkpoint,
    CheckpointReader,
    SafeGlobal,
    Saved,
    ShardedFolder,
    Source,
    TorchFile,
    plain_parts,
)

_PARTS = {
    "optimizer": ("optimizer", "optim", "optimizer_state_dict", "optim_state"),
    "scheduler": ("scheduler", "lr_scheduler", "scheduler_state_dict", "lr_scheduler_state"),
    "iteration": ("iteration", "global_step", "step"),
    "rng": ("rng", "rng_state"),
    "grad_scaler": ("grad_scaler", "scaler"),
    "model": ("model", "model_state_dict", "model_state"),
}


def _is_file(path: Path) -> bool:
    return path.is_file()


def _open_file(source: Source) -> Checkpoint:
    content = TorchFile(source.path, source.allow).content
    return Checkpoint(str(source.path), "torch file", plain_parts(content, source.path.name))


def _is_sharded(path: Path) -> bool:
    return (path / ".metadata").is_file() and not (path / "metadata.json").exists()


def _open_sharded(source: Source) -> Checkpoint:
    folder = ShardedFolder(source.path, source.allow)
    parts: dict[str, Saved] = {part: folder.part(*keys) for part, keys in _PARTS.items()}
    used = {key for keys in _PARTS.values() for key in keys}
    parts |= {key: folder.part(key) for key in folder.keys if key not in used}
    return Checkpoint(str(source.path), "torch DCP", parts)


READERS = [
    CheckpointReader("torch file", _is_file, _open_file, general=True),
    CheckpointReader("torch DCP", _is_sharded, _open_sharded),
]

# Arrays of numbers, as numpy's random number generators save them. Older numpy named the module otherwise.
_NUMBERS = ("Bool", "Int8", "Int16", "Int32", "Int64", "UInt8", "UInt16", "UInt32", "UInt64")
SAFE_GLOBALS = [
    SafeGlobal(f"numpy.{name}")
    for name in (
        "ndarray", "dtype",
        "_core.multiarray._reconstruct", "core.multiarray._reconstruct",
        "_core.multiarray.scalar", "core.multiarray.scalar",
        *(f"dtypes.{name}DType" for name in (*_NUMBERS, "Float16", "Float32", "Float64")),
    )
]  # fmt: skip
