"""How checkpoints of DeepSpeed are read.

By the layout that DeepSpeed's sources give, not by files that it wrote: ``latest`` names a folder. It holds
``mp_rank_XX_model_states.pt`` or ``zero_pp_rank_R_mp_rank_XX_model_states.pt`` (ZeRO 3), and, for ZeRO,
``[bf16_]zero_pp_rank_R_mp_rank_XX_optim_states.pt``. Data ranks are taken to follow each other, with model
ranks the faster: DeepSpeed's default where no pipeline is.
"""

import re
from pathlib import Path

from miles_reset import CheckpointError
from miles_reset.checkpoint import Checkpoint, CheckpointReader, Presence, Saved, Source

_STATES = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")


def _folder(path: Path) -> Path:
    latest = path / "latest"
    return path / latest.read_text(errors="replace").strip() if latest.is_file() else path


def _is_deepspeed(path: Path) -> bool:
    if not path.is_dir():
        return False
    return any(_STATES.fullmatch(file.name) for file in _folder(path).glob("*_states.pt")) or (
        (path / "latest").is_file() and any(path.glob("global_step*"))
    )


def _open(source: Source) -> Checkpoint:
    folder = _folder(source.path)
    found = [match for file in folder.glob("*_model_states.pt") if (match := _STATES.fullmatch(file.name))]
    if not found:
        raise CheckpointError(str(folder), "", "has no *_model_states.pt files.")
    here = Source(folder, source.rank, source.world_size, source.allow)
    models = 1 + max(int(match[2]) for match in found)
    data, model = divmod(source.rank, models)
    sharded = any(match[1] for match in found)
    state = here.file(f"{f'zero_pp_rank_{data}_' * sharded}mp_rank_{model:02d}_model_states.pt")
    parts: dict[str, Saved] = {
        "scheduler": state.part("lr_scheduler"),
        "iteration": state.part("global_steps"),
        "optimizer": state.part("optimizer"),
        "model": state.part("module"),
    }
    facts = {"folder": folder.name}
    if any(folder.glob("*zero_pp_rank_*_optim_states.pt")):
        names = [f"{kind}zero_pp_rank_{data}_mp_rank_{model:02d}_optim_states.pt" for kind in ("bf16_", "")]
        name = next((name for name in names if (folder / name).exists()), names[1])
        file = here.file(name)
        presence = Presence.PRESENT if file.path.exists() else Presence.FILE_ABSENT
        parts["optimizer"] = Saved(  # opened when it is needed: it holds classes of DeepSpeed's
            f"{name}['optimizer_state_dict']", presence, lambda: file.content["optimizer_state_dict"]
        )
        facts["optimizer"] = "it is partitioned over ranks, and comes back by DeepSpeed's own loading"
    return Checkpoint(str(source.path), "deepspeed", parts, iteration_unit="step", facts=facts)


READERS = [CheckpointReader("deepspeed", _is_deepspeed, _open)]
