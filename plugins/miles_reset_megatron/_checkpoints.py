"""How the checkpoints of Megatron and of miles are read.

Megatron saves its arguments, an ``argparse.Namespace``, in the file that holds all the rest. It is read only
where the policy allows that name: ``allow = ["argparse.Namespace"]``.
"""

import json
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from miles_reset import CheckpointError
from miles_reset.checkpoint import (
    Checkpoint,
    CheckpointReader,
    Presence,
    Saved,
    ShardedFolder,
    Source,
    number,
    part_of,
)

_TRACKER = "latest_checkpointed_iteration.txt"
_SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "cp": "context_parallel_size",
}


def _folder(path: Path) -> Path:
    """Return the folder that the tracker names, or the path itself where there is no tracker."""
    tracker = path / _TRACKER
    if not tracker.is_file():
        return path
    text = tracker.read_text(errors="replace").strip()
    if text == "release":
        return path / text
    return path / f"iter_{int(text):07d}" if text.isdecimal() else tracker


def _read_folder(path: Path) -> Path:
    folder = _folder(path)
    if folder.name == _TRACKER:
        raise CheckpointError(str(folder), "", "names no iteration, and not release.")
    if not folder.is_dir():
        raise CheckpointError(str(path / _TRACKER), "", f"names {folder.name}, which is not there.")
    return folder


def _is_fsdp(path: Path) -> bool:
    folder = _folder(path)
    model = folder / "model"
    return (model / ".metadata").is_file() or (model.is_dir() and (folder / "meta.json").is_file())


def _is_sharded(folder: Path) -> bool:
    return (folder / "metadata.json").is_file()


def _is_megatron(path: Path) -> bool:
    if not path.is_dir() or _is_fsdp(path):
        return False
    return (path / _TRACKER).is_file() or _is_sharded(path) or any(map(Path.is_dir, path.glob("mp_rank_*")))


def _open_megatron(source: Source) -> Checkpoint:
    folder = _read_folder(source.path)
    opened = _open_torch_dist if _is_sharded(folder) else _open_torch
    if opened is _open_torch and (folder / ".metadata").is_file():
        opened = _open_torch_dcp
    return opened(Source(folder, source.rank, source.world_size, source.allow), str(source.path))


def _open_torch(source: Source, path: str) -> Checkpoint:
    """Take this rank's file, by Megatron's default order of ranks: tp, ep, dp, pp, the first fastest."""
    found = {}
    for folder in source.path.glob("mp_rank_*"):
        if match := re.fullmatch(r"mp_rank_(\d+)(?:_(\d+))?(?:_(\d+))?", folder.name):
            found[tuple(int(n) for n in match.groups(default="0"))] = folder.name
    if not found:
        raise CheckpointError(str(source.path), "", "has no mp_rank_ folders.")
    tp, pp, ep = (1 + max(ranks[i] for ranks in found) for i in range(3))
    first = found[min(found)]
    sizes = _sizes(source.file(f"{first}/model_optim_rng.pt").part("args"))
    if pp > 1 and sizes.get("pp") == 1:  # two numbers may mean an expert rank
        found = {(t, e, p): name for (t, p, e), name in found.items()}
        pp, ep = ep, pp
    tp, pp = max(tp, sizes.get("tp", 1)), max(pp, sizes.get("pp", 1))
    mine = (source.rank % tp, _pipeline_rank(source, pp), source.rank // tp % ep)
    name = found.get(mine, "mp_rank_{:02d}_{:03d}_{:03d}".format(*mine))
    state = source.file(f"{name}/model_optim_rng.pt")
    parts = {
        "optimizer": state.part("optimizer"),
        "scheduler": state.part("opt_param_scheduler", "lr_scheduler"),
        "iteration": state.part("iteration"),
        "rng": state.part("rng_state"),
        "args": state.part("args"),
        "model": state.part("model", "model0"),
    }
    shards = source.file(f"{name}/distrib_optim.pt")
    if shards.path.exists():
        parts["distrib_optim"] = shards.part()
    layout = {"tp": tp, "pp": pp, **({"ep": ep} if ep > 1 else {})}
    return _told(path, source, parts, "torch", sizes | layout)


def _open_torch_dist(source: Source, path: str) -> Checkpoint:
    """Read the part that is not sharded; shards of the optimizer come back by Megatron's own loading."""
    folder = ShardedFolder(source.path, source.allow)
    common = source.file("common.pt").part()
    if common.presence is Presence.FILE_ABSENT:
        saved = folder.part("common_state/shard_0_1")
        common = Saved(saved.where, saved.presence, partial(_first, saved), saved.detail)
    content = common.read() if common.there else None
    name = common.where

    def part(*keys: str) -> Saved:
        return part_of(content, keys, name) if common.there else common

    sizes = _sizes(part("args"))
    tp, pp = sizes.get("tp", 1), sizes.get("pp", 1)
    mine = (_pipeline_rank(source, pp), source.rank % tp)
    rng = folder.part("rng_state/shard_{}.{}_{}.{}".format(*mine, pp, tp))
    if not rng.there:
        shards = [key for key in folder.keys if key.startswith("rng_state/")]
        rng = folder.part(*(shards if len(shards) == 1 else ["rng_state"]))
    parts = {
        "optimizer": part("optimizer"),
        "scheduler": part("opt_param_scheduler", "lr_scheduler"),
        "iteration": part("iteration"),
        "rng": Saved(rng.where, rng.presence, partial(_first, rng), rng.detail, rng.size),
        "args": part("args"),
    }
    return _told(path, source, parts, "torch_dist", sizes)


def _open_torch_dcp(source: Source, path: str) -> Checkpoint:
    folder = ShardedFolder(source.path, source.allow)
    parts = {
        "optimizer": folder.part("optimizer"),
        "scheduler": folder.part("opt_param_scheduler"),
        "iteration": folder.part("iteration"),
        "rng": folder.part("rng_state"),
        "args": folder.part("args"),
    }
    return Checkpoint(path, "megatron", parts, iteration_unit="step", facts={"kind": "torch_dcp"})


def _pipeline_rank(source: Source, pp: int) -> int:
    return source.rank // max(1, source.world_size // pp)


def _told(
    path: str, source: Source, parts: Mapping[str, Saved], kind: str, layout: Mapping[str, int]
) -> Checkpoint:
    facts = {"folder": source.path.name, "kind": kind}
    args = parts["args"]
    if args.there and (size := getattr(args.read(), "world_size", None)):
        facts["saved by ranks"] = str(size)
    if kind == "torch_dist":
        facts["optimizer"] = "its tensors are sharded over files, and come back by Megatron's own loading"
    return Checkpoint(path, "megatron", parts, layout=layout, iteration_unit="step", facts=facts)


def _first(saved: Saved) -> Any:
    """Return what Megatron puts into a list, as it does each object that is no tensor."""
    content = saved.read()
    return content[0] if isinstance(content, list) and len(content) == 1 else content


def _sizes(args: Saved) -> dict[str, int]:
    held = args.read() if args.there else None
    found = {name: getattr(held, key, None) for name, key in _SIZES.items()}
    return {name: size for name, size in found.items() if isinstance(size, int)}


def _is_miles_fsdp(path: Path) -> bool:
    return path.is_dir() and _is_fsdp(path)


def _open_miles_fsdp(source: Source) -> Checkpoint:
    folder = _read_folder(source.path)
    meta = folder / "meta.json"
    rng = Source(folder, allow=source.allow).file(f"rng_rank_{source.rank}.pt")
    if not rng.path.exists():  # as it was before each rank had its own
        rng = Source(folder, allow=source.allow).file("rng.pt")

    def part(name: str, key: str, inside: str) -> Saved:
        return ShardedFolder(folder / name, source.allow).part(key, inside=(inside,))

    parts = {
        "optimizer": part("optimizer", "optim_state", "optim"),
        "scheduler": part("lr_scheduler", "lr_scheduler_state", "lr_scheduler"),
        "iteration": number(meta, lambda text: json.loads(text)["rollout_id"]),
        "rng": rng.part(),
        "model": part("model", "model_state", "model"),
    }
    facts = {"folder": folder.name}
    told = number(meta, json.loads)
    if told.there and isinstance(told.read(), dict):
        facts |= {key: str(value) for key, value in told.read().items() if key != "timestamp"}
    return Checkpoint(str(source.path), "miles fsdp", parts, iteration_unit="rollout", facts=facts)


def _adapter(path: Path) -> Path:
    return path / "adapter" if (path / "adapter").is_dir() else path


def _is_adapter(path: Path) -> bool:
    folder = _adapter(path)
    if _is_megatron(path) or _is_miles_fsdp(path):
        return False
    return any(folder.glob("adapter_megatron_*.pt")) or any(folder.glob("training_state_rank*.pt"))


def _open_adapter(source: Source) -> Checkpoint:
    folder = _adapter(source.path)
    here = Source(folder, source.rank, source.world_size, source.allow)
    state = here.file(f"training_state_rank{source.rank}.pt")
    weights = here.file(f"adapter_megatron_rank{source.rank}.pt").part()
    facts = {"folder": folder.name}
    old = sorted(folder.glob("adapter_megatron_tp*_pp*.pt"))
    if weights.presence is Presence.FILE_ABSENT and old:
        facts["layout"] = f"an older one: {len(old)} files by tensor and pipeline rank, and no training state"
        tp = {int(match[1]) for file in old if (match := re.search(r"_tp(\d+)_", file.name))}
        pipeline = source.rank // max(1, source.world_size // max(1, len(old) // max(1, len(tp))))
        mine = folder / f"adapter_megatron_tp{source.rank % max(1, len(tp))}_pp{pipeline}.pt"
        weights = here.file((mine if mine.exists() else old[0]).name).part()
    if (folder / "adapter_config.json").is_file():
        facts["adapter"] = "adapter_config.json, as Hugging Face PEFT writes it, is there too"
    parts = {
        "optimizer": state.part("optimizer"),
        "scheduler": state.part("opt_param_scheduler"),
        "iteration": state.part("iteration"),
        "model": weights,
    }
    return Checkpoint(str(source.path), "miles lora adapter", parts, iteration_unit="rollout", facts=facts)


READERS = [
    CheckpointReader("megatron", _is_megatron, _open_megatron),
    CheckpointReader("miles fsdp", _is_miles_fsdp, _open_miles_fsdp),
    CheckpointReader("miles lora adapter", _is_adapter, _open_adapter),
]
