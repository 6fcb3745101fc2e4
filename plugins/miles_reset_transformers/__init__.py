"""What Hugging Face's Trainer saves and how it resumes by a policy, and what its optimizers remember.

::

    from miles_reset_transformers import use_policy

    use_policy(trainer, ResumePolicy.from_file("resume.toml")).train(resume_from_checkpoint=True)
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_reset import StateSchema, UnwrapRule, clock, history, hookimpl, momentum, variance
from miles_reset.checkpoint import Checkpoint, CheckpointReader, Source, number

if TYPE_CHECKING:
    from miles_reset_transformers.trainer import ResumePolicyCallback, use_policy

__all__ = ["ResumePolicyCallback", "use_policy"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from miles_reset_transformers import trainer  # which imports transformers

    return getattr(trainer, name)


def _is_transformers(path: Path) -> bool:
    return (path / "trainer_state.json").is_file()


def _open(source: Source) -> Checkpoint:
    path = source.path
    own = source.file(f"rng_state_{source.rank}.pth")
    rng = own if source.world_size > 1 or own.path.exists() else source.file("rng_state.pth")
    parts = {
        "optimizer": source.file("optimizer.pt").part(),
        "scheduler": source.file("scheduler.pt").part(),
        "iteration": number(path / "trainer_state.json", lambda text: json.loads(text)["global_step"]),
        "rng": rng.part(),
        "grad_scaler": source.file("scaler.pt").part(),
    }
    facts = {}
    if states := len(list(path.glob("rng_state_*.pth"))):
        facts["saved by ranks"] = str(states)
    for name in ("optimizer.bin", "optimizer_0", "latest"):
        if (path / name).exists():
            facts["optimizer"] = f"{name} is what FSDP or DeepSpeed wrote, and comes back by them"
    return Checkpoint(str(path), "transformers", parts, iteration_unit="step", facts=facts)


@hookimpl
def miles_reset_schemas() -> list[StateSchema]:
    """Return the schemas of transformers, read off version 5.24; AdamW is of versions before 5."""
    return [
        StateSchema("transformers.optimization.Adafactor",
            momentum("exp_avg"), variance("exp_avg_sq"),
            variance("exp_avg_sq_row"), variance("exp_avg_sq_col"), history("RMS"), clock("step")),
        StateSchema("transformers.optimization.AdamW",
            momentum("exp_avg"), variance("exp_avg_sq"), clock("step")),
    ]  # fmt: skip


def _held(wrapper: Any) -> list[tuple[str, Any]] | None:
    """List the optimizers that step in hooks, one for each parameter."""
    held = wrapper.optimizer_dict
    return None if held is None else [(str(number), child) for number, child in enumerate(held.values())]


@hookimpl
def miles_reset_unwrap_rules() -> list[UnwrapRule]:
    """Return the rule of what stands for the optimizers of a Trainer that steps layer by layer."""
    return [UnwrapRule("transformers.trainer_pt_utils.LayerWiseDummyOptimizer", _held)]


@hookimpl
def miles_reset_checkpoint_readers() -> list[CheckpointReader]:
    """Return the reader of the Trainer's checkpoint-N folders."""
    return [CheckpointReader("transformers", _is_transformers, _open)]
