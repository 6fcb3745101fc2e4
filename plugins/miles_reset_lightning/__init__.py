"""How checkpoints of Lightning are read, and how it resumes by a policy.

::

    from miles_reset_lightning import ResumePolicyCallback

    policy = ResumePolicy.from_file("resume.toml")
    Trainer(callbacks=[ResumePolicyCallback(policy)]).fit(model, ckpt_path="last.ckpt")
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_reset import hookimpl
from miles_reset.checkpoint import Checkpoint, CheckpointReader, Presence, Saved, Source, part_of

if TYPE_CHECKING:
    from miles_reset_lightning.trainer import ResumePolicyCallback

__all__ = ["ResumePolicyCallback", "opened"]

_SCALERS = ("MixedPrecision", "MixedPrecisionPlugin", "native_amp_scaling_state")


def __getattr__(name: str) -> Any:
    if name != "ResumePolicyCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from miles_reset_lightning import trainer  # which imports lightning

    return getattr(trainer, name)


def opened(path: str, content: Any) -> Checkpoint:
    """Return what a checkpoint holds that was loaded.

    The second optimizer is the part ``optimizer_1``, its scheduler ``scheduler_1``, and so on.
    """
    name = Path(path).name
    parts = {
        "iteration": part_of(content, ["global_step"], name),
        "epoch": part_of(content, ["epoch"], name),
        "grad_scaler": part_of(content, _SCALERS, name),
        "model": part_of(content, ["state_dict"], name),
        **_each("optimizer", "optimizer_states", content, name),
        **_each("scheduler", "lr_schedulers", content, name),
    }
    version = content.get("pytorch-lightning_version") if isinstance(content, Mapping) else None
    facts = {"lightning": str(version)} if version else {}
    return Checkpoint(path, "lightning", parts, iteration_unit="step", facts=facts)


def _each(part: str, key: str, content: Any, name: str) -> dict[str, Saved]:
    saved = part_of(content, [key], name)
    held = saved.read() if saved.there else None
    if not isinstance(held, (list, tuple)):
        return {part: saved}
    if not held:
        return {part: Saved(saved.where, Presence.KEY_ABSENT)}
    each = [part_of({key: one}, [key], name) for one in held]
    return {
        f"{part}_{i}" if i else part: Saved(f"{saved.where}[{i}]", one.presence, one.read)
        for i, one in enumerate(each)
    }


def _is_lightning(path: Path) -> bool:
    return path.suffix == ".ckpt" and path.is_file()


def _open(source: Source) -> Checkpoint:
    return opened(str(source.path), source.file("").content)


@hookimpl
def miles_reset_checkpoint_readers() -> list[CheckpointReader]:
    """Return the reader of Lightning's .ckpt files."""
    return [CheckpointReader("lightning", _is_lightning, _open)]
