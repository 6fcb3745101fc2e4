"""LoRA adapters of a Megatron model, in the folder layout of miles: saved whole, loaded whole or not at all.

The folder holds, for each rank R, ``adapter_megatron_rankR.pt`` (its parameters by name) and
``training_state_rankR.pt`` (``iteration``, ``optimizer``, ``opt_param_scheduler``). What is added here, miles
passes over: the key ``miles_reset`` in the training state, and a manifest, by which a save counts.
"""

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch

from miles_reset import CheckpointError, PolicyError, Registry, ResetError, default_registry, plan_resume
from miles_reset import reset_optimizer_states as reset
from miles_reset.agree import agree, exchange, once_per_job, rank_and_world
from miles_reset.checkpoint import Checkpoint, Presence, SafeGlobal, Saved, TorchFile, check_bits, part_of
from miles_reset.policy import ResumePolicy
from miles_reset.receipt import ResumeReport
from miles_reset_megatron import _layout
from miles_reset_megatron._durable import MANIFEST, Manifest, save_all, unfinished

logger = logging.getLogger("miles_reset")

_OURS = "miles_reset"
_PEFT = ("adapter_config.json", "adapter_model.bin", "adapter_model.safetensors")
_PARTS = ("optimizer", "scheduler", "iteration")

Model = torch.nn.Module | Sequence[torch.nn.Module]


def is_adapter(name: str) -> bool:
    """Say whether a parameter of this name belongs to an adapter, as Megatron-Bridge names them."""
    return "lora_" in name or (".adapter." in name and ("linear_in" in name or "linear_out" in name))


def save_lora_adapter(
    model: Model,
    adapter_path: str | os.PathLike[str],
    *,
    optimizer: Any = None,
    opt_param_scheduler: Any = None,
    iteration: int | None = None,
    save_optimizer: bool = True,
    iteration_unit: str = "rollout",
    extras: Mapping[str, Any] | None = None,
    is_adapter: Callable[[str], bool] = is_adapter,
    group: Any = None,
) -> Path:
    """Save the adapter and the training state, on all ranks or on none. Call it on all ranks.

    Args:
        model: The model, or its chunks.
        adapter_path: The folder, which all ranks see. A save into one that holds another takes its place.
        optimizer: What steps the adapter.
        opt_param_scheduler: Megatron's scheduler, or another.
        iteration: The iteration that is done.
        save_optimizer: Whether the optimizer's state is saved; ``--no-save-optim`` is the other way.
        iteration_unit: What the iteration counts.
        extras: Further parts by name: what has ``state_dict``.
        is_adapter: Says whether a parameter of this name is saved.
        group: The ranks; all, by default.

    Returns:
        The folder.

    Raises:
        CheckpointError: There is no adapter, or something cannot be written. What was saved before is whole.
        RankDisagreementError: Another rank refuses.
    """
    folder, (rank, world) = Path(adapter_path), rank_and_world()
    refused: ResetError | None = None
    weights: dict[str, torch.Tensor] = {}
    state: dict[str, Any] = {"iteration": iteration, "optimizer": None, "opt_param_scheduler": None}
    kept = optimizer if save_optimizer else None
    shared = list(_layout.sharing(kept)) if kept is not None else []
    names = [_shared_name(_layout.root_of(child), index) for index, child in shared]
    try:
        live = _parameters(model).items()
        weights = {name: held.detach().cpu().clone() for name, held in live if is_adapter(name)}
        state["optimizer"] = _without_classes(kept.state_dict()) if kept is not None else None
        state["opt_param_scheduler"] = opt_param_scheduler.state_dict() if opt_param_scheduler else None
        state[_OURS] = {
            "version": 1, "world_size": world, "layout": _layout.layout(), "iteration_unit": iteration_unit,
            "shared": names, "extras": {name: part.state_dict() for name, part in (extras or {}).items()},
        }  # fmt: skip
    except Exception as error:  # noqa: BLE001  # other ranks wait for this one's verdict
        refused = CheckpointError(str(folder), "", f"cannot be made: {error!r}.")
    agree(refused, {"iteration": iteration}, group=group)
    if not any(exchange(len(weights), group=group).values()):
        raise CheckpointError(str(folder), "model", "cannot be made: the model has no adapter.")
    files = {_weights_name(rank): _writer(weights)}
    if optimizer is not None or opt_param_scheduler is not None or iteration is not None or extras:
        files[_state_name(rank)] = _writer(state)
    try:
        for name, (_, child) in zip(names, shared, strict=True):
            gathered = child.get_parameter_state_dp_zero()  # all ranks take part in it
            if _layout.root_of(child) == rank:
                files[name] = _writer(gathered)
    except Exception as error:  # noqa: BLE001  # as above
        refused = CheckpointError(str(folder), "optimizer", f"cannot be made: {error!r}.")
    agree(refused, group=group)
    told = {"iteration": iteration, "iteration_unit": iteration_unit, "layout": _layout.layout()}
    obsolete = [_state_name(rank), _shared_name(rank, "*")]
    save_all(folder, files, told, rank=rank, obsolete=obsolete, group=group)
    _log(logging.INFO, f"saved {len(weights)} tensors of an adapter to {folder}")
    return folder


def load_lora_adapter(
    model: Model,
    adapter_path: str | os.PathLike[str],
    *,
    optimizer: Any = None,
    opt_param_scheduler: Any = None,
    load_optimizer: bool = True,
    policy: ResumePolicy | None = None,
    extras: Mapping[str, Any] | None = None,
    is_adapter: Callable[[str], bool] = is_adapter,
    group: Any = None,
    registry: Registry | None = None,
) -> tuple[bool, int | None]:
    """Load an adapter, and of the training state what the policy says, on all ranks or on none.

    Where the optimizer does not come back, its master weights are refreshed from the loaded weights, so that
    the first step goes on from them. Parts about which no choice was made come back if they were saved.

    Args:
        model: The model, or its chunks, with the adapter's layers in it.
        adapter_path: The folder that was saved, by this function's counterpart or by miles.
        optimizer: The live optimizer. Without it, no master weights can be refreshed.
        opt_param_scheduler: The live scheduler, just built.
        load_optimizer: Whether the optimizer's state may come back; ``--no-load-optim`` is the other way.
            Scheduler and iteration come back in both cases.
        policy: What comes back. Without one, an adapter that is not there is no error.
        extras: Further live parts by name: what has ``load_state_dict``.
        is_adapter: Says whether a parameter of this name must be in the file.
        group: The ranks; all, by default.
        registry: Where plugins' records are looked up; the installed plugins by default.

    Returns:
        Whether an adapter was loaded, and the iteration, if one was saved or the policy sets one.

    Raises:
        CheckpointError: The adapter, or a part that must come back, is not there, torn, or does not fit.
        PolicyError: The policy says that the optimizer comes back, and ``load_optimizer`` that it does not.
        RankDisagreementError: Another rank refuses.
    """
    where, folder = registry or default_registry(), Path(adapter_path)
    refused: ResetError | None = None
    found: _Found | str = ""
    try:
        policy = _settled(policy, load_optimizer)
        found = _find(folder, _parameters(model), is_adapter, policy, optimizer, where)
    except ResetError as error:
        refused = error
    facts = {"the adapter": found.kind if isinstance(found, _Found) else found}
    if isinstance(found, _Found):
        parts = found.checkpoint.parts.items()
        facts |= {f"the saved {name}": str(part.presence) for name, part in parts}
    agree(refused, facts, group=group)
    assert policy is not None
    if isinstance(found, str):
        _log(logging.WARNING, f"{found} Nothing was loaded.")
        return False, None
    if not any(exchange(len(found.weights), group=group).values()):
        raise CheckpointError(str(folder), "model", "holds no tensors, on any rank.")
    plan = plan_resume(
        policy, found.checkpoint, optimizer=optimizer, scheduler=opt_param_scheduler,
        extras=extras, group=group, registry=where,
    )  # fmt: skip
    before = [(live, live.detach().clone()) for live, _ in found.weights]
    try:
        _copy(found.weights)
        report = plan.apply()
    except BaseException:
        _copy(before)
        raise
    outcome = {line.part: line.outcome for line in report.parts}
    if outcome["optimizer"] == "restore":
        found.scatter()
        _copy(found.weights)  # to load the state of a HybridDeviceOptimizer, Megatron takes a random step
        if found.shared and policy.reset.on_resume:
            reset(optimizer, registry=where)
    _tell(folder, found.weights, report, policy)
    fresh = policy.iteration == "fresh"
    return True, report.iteration if fresh or outcome["iteration"] in ("restore", "set") else None


def _settled(policy: ResumePolicy | None, load_optimizer: bool) -> ResumePolicy:
    """Return the policy with what is left open filled in: what an adapter may be saved without."""
    policy = ResumePolicy.from_dict({"on_missing": "fresh"}) if policy is None else policy
    if not load_optimizer:
        policy = policy.infer({"optimizer": "fresh"}, "load_optimizer is False")
        if policy.optimizer != "fresh":
            problem = f"{policy.chosen_by('optimizer')} says {policy.optimizer}, and load_optimizer is False."
            raise PolicyError("optimizer", problem)
    return policy.infer(dict.fromkeys(_PARTS, "restore-if-present"), "an adapter may be saved without it")


@dataclass
class _Found:
    """What was found in a folder, and checked.

    Attributes:
        kind: How its files are named.
        weights: Each live parameter with its saved weights.
        checkpoint: The rest, part by part.
        shared: Each optimizer that shares out its state, with that state where this rank scatters it.
    """

    kind: str
    weights: list[tuple[torch.Tensor, torch.Tensor]]
    checkpoint: Checkpoint
    shared: list[tuple[Any, Any]]

    def scatter(self) -> None:
        """Give the optimizers that share out their state their moments and master weights."""
        for child, content in self.shared:
            keys = getattr(child, "optimizer_state_keys", ("exp_avg", "exp_avg_sq"))  # 0.16 knows Adam alone
            with torch.no_grad(), _only(child.optimizer, keys):
                child.load_parameter_state_from_dp_zero(content)
            hand_down = getattr(child.optimizer, "_sync_hdo_state_to_sub_optimizers", None)
            if hand_down is not None:  # a HybridDeviceOptimizer steps with what those inside it hold
                hand_down()
                for group in child.optimizer.param_groups:
                    group.pop("step", None)  # copied down before each step, it would stop their counts


@contextlib.contextmanager
def _only(optimizer: Any, keys: Iterable[str]) -> Iterator[None]:
    """Take the tensors of other keys out of the state for a while.

    They are the steps of torch's optimizers, which Megatron restores before, and looks for once more. It
    gives all parameters one and the same tensor, which each of them would count on: they get their own.
    """
    taken: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    kept = {*keys, "master_param"}
    for state in optimizer.state.values():
        others = [key for key, held in state.items() if key not in kept and torch.is_tensor(held)]
        taken += [(state, key, state.pop(key)) for key in others]
    try:
        yield
    finally:
        for state, key, held in taken:
            state[key] = held.clone()


def _find(
    folder: Path,
    live: Mapping[str, torch.Tensor],
    is_adapter: Callable[[str], bool],
    policy: ResumePolicy,
    optimizer: Any,
    registry: Registry,
) -> _Found | str:
    """Look at this rank's files without changing anything; say why, if there is no adapter to load."""
    names = _names(folder)
    if "adapter" in names and not any(name.startswith("adapter_megatron_") for name in names):
        folder = folder / "adapter"
        names = _names(folder)
    rank, world = rank_and_world()
    manifest = Manifest.read(folder) if names else None
    if manifest is not None:
        _layout.check(str(folder / MANIFEST), manifest.world_size, manifest.told.get("layout"))
    path, kind = _weights_path(folder, names, manifest, rank)
    if path is None:
        return _absent(folder, names, kind, policy)
    saved_by = {int(name[21:-3]) for name in names if name.startswith("adapter_megatron_rank")
                and name.endswith(".pt") and name[21:-3].isdecimal()}  # fmt: skip
    if manifest is None and saved_by and max(saved_by) >= world:
        problem = f"was saved by at least {max(saved_by) + 1} ranks, and this run has {world}."
        raise CheckpointError(str(folder), "", problem)
    allow = (*registry.table(SafeGlobal), *policy.allow)
    content = TorchFile(path, allow).content
    weights = _matched(content, live, is_adapter, path)
    check_bits(content, str(path), "adapter")
    checkpoint, expected = _training_state(folder, manifest, rank, allow)
    shared: list[tuple[Any, Any]] = []
    if optimizer is not None and policy.optimizer in ("restore", "restore-if-present", "reset"):
        part = checkpoint.part("optimizer")
        if part.there:
            part = _as_loaded(optimizer, part)
            _check_masters(optimizer, part)
            if policy.optimizer != "reset":
                part, shared = _shared_state(folder, manifest, expected, optimizer, part, rank, allow)
            checkpoint = replace(checkpoint, parts={**checkpoint.parts, "optimizer": part})
    return _Found(kind, weights, checkpoint, shared)


def _names(folder: Path) -> set[str]:
    try:
        with os.scandir(folder) as entries:
            return {entry.name for entry in entries}
    except FileNotFoundError:
        return set()
    except OSError as error:
        raise CheckpointError(str(folder), "", f"cannot be opened: {error.strerror}.") from error


def _weights_path(
    folder: Path, names: set[str], manifest: Manifest | None, rank: int
) -> tuple[Path | None, str]:
    name = _weights_name(rank)
    if manifest is not None:
        path = manifest.find(folder, name)
        if path is None:
            raise CheckpointError(str(folder / MANIFEST), "", f"does not name {name}.")
        return path, "one file for each rank"
    if name in names:
        return folder / name, "one file for each rank"
    older = "adapter_megatron_tp{}_pp{}.pt".format(*_layout.tensor_and_pipeline_rank())
    if older in names:
        _log(
            logging.WARNING,
            f"{folder / older} is named by tensor and pipeline rank, as older versions of miles did: it is "
            "right only where ranks that share both hold equal adapters, so not with expert parallelism",
        )
        return folder / older, "one file for each tensor and pipeline rank"
    return None, name


def _absent(folder: Path, names: set[str], name: str, policy: ResumePolicy) -> str:
    """Say that there is no adapter, or refuse it: where a part of one is there, or the policy wants one."""
    parts = sorted(one for one in names if one.startswith(("adapter_megatron_", "training_state_rank")))
    if left := unfinished(folder):
        raise CheckpointError(str(folder), "", f"holds a save that was not finished: {', '.join(left)}.")
    if parts:
        raise CheckpointError(str(folder / name), "", f"is not there; the folder has {', '.join(parts[:8])}.")
    problem = "holds no adapter." if names else "is not there, or empty."
    if peft := sorted(names.intersection(_PEFT)):
        problem = (
            f"holds an adapter as Hugging Face PEFT writes it ({', '.join(peft)}). Its names and shapes are "
            f"not those of Megatron's shards, which are looked for in {name}: convert it by Megatron-Bridge."
        )
    if policy.on_missing == "refuse":
        raise CheckpointError(str(folder), "", problem)
    return f"Checkpoint: {folder} {problem}"


def _matched(
    content: Any, live: Mapping[str, torch.Tensor], is_adapter: Callable[[str], bool], path: Path
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pair the saved tensors with the live parameters of their names; refuse what does not fit."""
    if not isinstance(content, Mapping):
        raise CheckpointError(str(path), "model", f"is a {type(content).__name__}, not tensors by name.")
    needed = [name for name in live if is_adapter(name)]
    unknown = sorted(str(name) for name in content if name not in live)
    missing = sorted(name for name in needed if name not in content)
    if content and len(unknown) == len(content):
        problem = (
            f"has names that match nothing in the model: {_some(unknown)}. "
            f"The model's adapter has {_some(needed) or 'no parameters'}."
        )
        raise CheckpointError(str(path), "model", problem)
    if unknown or missing:
        said = f"missing are {_some(missing) or 'none'}, too many are {_some(unknown) or 'none'}"
        raise CheckpointError(str(path), "model", f"does not fit the model: {said}.")
    for name, saved in content.items():
        if not isinstance(saved, torch.Tensor):
            problem = f"has a {type(saved).__name__} as {name!r}."
            raise CheckpointError(str(path), "model", problem)
        if saved.shape != live[name].shape:
            problem = f"has {name!r} of shape {tuple(saved.shape)}; the model's is {tuple(live[name].shape)}."
            raise CheckpointError(str(path), "model", problem)
    return [(live[name], saved) for name, saved in content.items()]


def _training_state(
    folder: Path, manifest: Manifest | None, rank: int, allow: tuple[str, ...]
) -> tuple[Checkpoint, list[str] | None]:
    """Return the parts of the training state, and the names of the files that belong to the optimizer."""
    name = _state_name(rank)
    path = folder / name if manifest is None else manifest.find(folder, name)
    if path is None:  # what lies there under this name is of another save
        parts = dict.fromkeys(_PARTS, Saved(name, Presence.FILE_ABSENT))
        return Checkpoint(str(folder), "miles lora adapter", parts, iteration_unit="rollout"), None
    file = TorchFile(path, allow)
    parts = {
        "optimizer": file.part("optimizer"),
        "scheduler": file.part("opt_param_scheduler"),
        "iteration": file.part("iteration"),
    }
    ours = file.part(_OURS)
    told = ours.read() if ours.there else None
    told = told if isinstance(told, Mapping) else {}
    _layout.check(str(path), told.get("world_size"), told.get("layout"))
    if manifest is not None and ours.there and parts["iteration"].presence is not Presence.TORN:
        saved = file.content.get("iteration")
        if saved != manifest.told.get("iteration"):
            problem = f"is {saved}; {MANIFEST} says {manifest.told.get('iteration')}."
            raise CheckpointError(str(path), "iteration", problem)
    more = told.get("extras")
    for extra in more if isinstance(more, Mapping) else ():
        parts[str(extra)] = part_of(more, [extra], f"{name}[{_OURS!r}]['extras']")
    unit = told.get("iteration_unit")
    checkpoint = Checkpoint(
        str(folder),
        "miles lora adapter",
        parts,
        iteration_unit=unit if isinstance(unit, str) else "rollout",
    )
    shared = told.get("shared")
    return checkpoint, [str(one) for one in shared] if isinstance(shared, list) else None


def _as_loaded(optimizer: Any, part: Saved) -> Saved:
    """Return the part as the live optimizer loads it: one of Megatron's saves a list and loads a dict."""
    content = part.read()
    layer_wise = any(cls.__name__ == "LayerWiseDistributedOptimizer" for cls in type(optimizer).__mro__)
    if not (layer_wise and isinstance(content, list)):
        return part
    numbered = dict(enumerate(content))
    return replace(part, read=lambda: numbered)


def _check_masters(optimizer: Any, part: Saved) -> None:
    """Refuse master weights that are not those of the live optimizers: Megatron takes what is there."""
    children = getattr(optimizer, "chained_optimizers", None)
    content = part.read()
    if children is None or (len(children) == 1 and isinstance(content, Mapping)):
        children, content = children or [optimizer], [content]
    if isinstance(content, Mapping):
        content = [one for _, one in sorted(content.items())]
    if not isinstance(content, (list, tuple)) or len(content) != len(children):
        count = len(content) if isinstance(content, (list, tuple)) else type(content).__name__
        raise CheckpointError(part.where, "optimizer", f"is of {count} optimizers, not of {len(children)}.")
    for child, saved in zip(children, content, strict=True):
        masters = getattr(child, "fp32_from_float16_groups", None)
        held = saved.get("fp32_from_fp16_params") if isinstance(saved, Mapping) else None
        if masters is None or not isinstance(held, (list, tuple)):
            continue
        shapes = [[tuple(getattr(one, "shape", ())) for one in group] for group in held]
        wanted = [[tuple(one.shape) for one in group] for group in masters]
        if shapes != wanted:
            problem = f"has master weights of the shapes {shapes}; the live ones are {wanted}."
            raise CheckpointError(part.where, "optimizer", problem)


def _shared_state(
    folder: Path,
    manifest: Manifest | None,
    expected: list[str] | None,
    optimizer: Any,
    part: Saved,
    rank: int,
    allow: tuple[str, ...],
) -> tuple[Saved, list[tuple[Any, Any]]]:
    """Find what optimizers that share out their state need besides, and check it where it is read.

    A part whose moments are not there is not there: Megatron would go on with memory that nobody has set.
    """
    found: list[tuple[Any, Any]] = []
    lacking: list[str] = []
    children = list(_layout.sharing(optimizer))
    for index, child in children:
        root = _layout.root_of(child)
        name = _shared_name(root, index)
        if expected is not None and name in expected and root != rank:
            found.append((child, None))
            continue
        path = manifest.find(folder, name) if manifest is not None else folder / name
        if path is None or not path.exists():
            lacking.append(name)
            continue
        content = None
        if root == rank:
            content = TorchFile(path, allow).content
            _check_shared(child, content, path)
            check_bits(content, str(path), "optimizer")
        found.append((child, content))
    if not lacking:
        return part, found
    what = f"moments and master weights are in {', '.join(lacking)}, which is not there"
    if len(lacking) == len(children) and not expected:
        return Saved(lacking[0], Presence.FILE_ABSENT, detail=f"Its {what}."), []
    return Saved(part.where, Presence.TORN, detail=f"Its {what}."), []


def _check_shared(child: Any, content: Any, path: Path) -> None:
    """Refuse a state that is of other buffers: Megatron finds that out after some were scattered."""
    for index, ranges in enumerate(child.gbuf_ranges):
        for dtype in ranges:
            held = content.get(index) if isinstance(content, Mapping) else None
            one = held.get(dtype) if isinstance(held, Mapping) else None
            wanted = child.buffers[index].numel_unpadded
            if not isinstance(one, Mapping) or one.get("numel_unpadded") != wanted:
                has = one.get("numel_unpadded") if isinstance(one, Mapping) else "nothing"
                problem = f"has {has} of the {wanted} numbers of buffer {index}."
                raise CheckpointError(str(path), "optimizer", problem)


def _parameters(model: Model) -> dict[str, torch.Tensor]:
    """Return the parameters by name; where chunks have equal names, those of later chunks say of which."""
    chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
    found: dict[str, torch.Tensor] = {}
    for i, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            found[f"model_chunk{i}.{name}" if name in found else name] = parameter
    return found


@torch.no_grad()
def _copy(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for live, saved in pairs:
        live.copy_(saved)


def _without_classes(content: Any) -> Any:
    """Leave out classes: HybridDeviceOptimizer's groups name those that it was built with.

    Nothing needs them, and a file that names them is not read by who does not allow or have them.
    """
    if isinstance(content, Mapping):
        kept = {key: value for key, value in content.items() if not isinstance(value, type)}
        return {key: _without_classes(value) for key, value in kept.items()}
    return [_without_classes(one) for one in content] if isinstance(content, list) else content


def _writer(content: Any) -> Callable[[BinaryIO], None]:
    return lambda file: torch.save(content, file)


def _weights_name(rank: int) -> str:
    return f"adapter_megatron_rank{rank}.pt"


def _state_name(rank: int) -> str:
    return f"training_state_rank{rank}.pt"


def _shared_name(rank: int, index: int | str) -> str:
    return f"optimizer_param_state_rank{rank}_optimizer{index}.pt"


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:4])) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _log(level: int, message: str) -> None:
    logger.log(once_per_job(level), "%s", message)


def _tell(
    folder: Path,
    weights: Sequence[tuple[torch.Tensor, torch.Tensor]],
    report: ResumeReport,
    policy: ResumePolicy,
) -> None:
    _log(logging.INFO, f"loaded {len(weights)} tensors of an adapter from {folder}")
    for was, now in sorted({(str(saved.dtype), str(live.dtype)) for live, saved in weights}):
        if was != now:
            _log(logging.WARNING, f"weights of {folder} were saved as {was} and are loaded as {now}")
    for line in report.parts:
        if line.part in _PARTS and line.outcome == "fresh" and policy.action(line.part) != "fresh":
            _log(logging.WARNING, f"{line.part} of {folder} starts fresh: {line.reason}")
