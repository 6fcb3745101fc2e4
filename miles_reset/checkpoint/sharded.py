"""Folders that torch.distributed.checkpoint wrote: listed by their metadata, and read part by part.

The metadata is a pickle, and so is each value that is no tensor. The first may name torch's own metadata
classes alone, the others what torch's weights-only loading and the allow-list take.
"""

from __future__ import annotations

import importlib
import io
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from miles_reset.checkpoint.files import _resolve
from miles_reset.checkpoint.saved import Presence, Saved
from miles_reset.errors import CheckpointError, UnsafeCheckpointError

_METADATA = "torch.distributed.checkpoint.metadata"
_NAMES = {
    *(f"{_METADATA}.{name}" for name in (
        "Metadata", "MetadataIndex", "ChunkStorageMetadata", "TensorStorageMetadata",
        "BytesStorageMetadata", "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    *(f"torch.distributed.checkpoint.planner.{name}" for name in (
        "SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")),
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.distributed.checkpoint.filesystem._StoragePrefix",
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
    "torch.Size", "torch.serialization._get_layout", "collections.OrderedDict",
    "pathlib.Path", "pathlib.PosixPath", "pathlib.PurePosixPath", "pathlib._local.PosixPath",
}  # fmt: skip
"""What a metadata file may name: classes that hold data."""


class _Metadata(pickle.Unpickler):
    allow: tuple[str, ...] = ()

    def find_class(self, module: str, name: str) -> Any:
        dotted = f"{module}.{name}"
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if dotted not in _NAMES and dotted not in self.allow:
            raise _UnknownNameError(dotted)
        if module == "pathlib._local":  # where Python 3.13 keeps it, and others do not
            module = "pathlib"
        return getattr(importlib.import_module(module), name)


class _UnknownNameError(Exception):
    pass


@dataclass(frozen=True)
class ShardedFolder:
    """A folder with a file ``.metadata``. No tensor is read before its part is.

    Attributes:
        path: The folder.
        allow: Dotted names that may be unpickled besides what torch allows itself.
    """

    path: Path
    allow: tuple[str, ...] = ()

    @cached_property
    def metadata(self) -> Any:
        """What the folder holds, and in which of its files.

        Raises:
            CheckpointError: It is not there, or torn.
            UnsafeCheckpointError: It names something that is no metadata.
        """
        file = self.path / ".metadata"
        try:
            unpickler = _Metadata(io.BytesIO(file.read_bytes()))
            unpickler.allow = self.allow
            found = unpickler.load()
            for stored in (found.storage_data or {}).values():
                name = Path(stored.relative_path)
                if name.is_absolute() or ".." in name.parts:
                    raise ValueError(f"{name} is outside of the folder")
            dict(found.state_dict_metadata)
        except OSError as error:
            raise CheckpointError(str(file), "", f"cannot be read: {error.strerror or error}.") from error
        except _UnknownNameError as error:
            raise UnsafeCheckpointError(str(file), str(error)) from error
        except Exception as error:
            raise CheckpointError(str(file), "", f"is torn, or no metadata ({error!r}).") from error
        return found

    @cached_property
    def places(self) -> dict[str, tuple[Any, ...]]:
        """Where each entry is in the nested state dict that was saved."""
        places = self.metadata.planner_data
        known = places if isinstance(places, Mapping) else {}
        return {name: tuple(known.get(name, (name,))) for name in self.metadata.state_dict_metadata}

    @property
    def keys(self) -> list[str]:
        """The keys at the top of what was saved."""
        return list(dict.fromkeys(str(place[0]) for place in self.places.values()))

    def part(self, *keys: str, inside: tuple[str, ...] = ()) -> Saved:
        """Return what was saved under the first of some keys that is there.

        Args:
            keys: Keys at the top.
            inside: Further keys, from there down.
        """
        where = f"{self.path.name}[{keys[0]!r}]"
        if not (self.path / ".metadata").exists():
            return Saved(str(self.path.name), Presence.FILE_ABSENT)
        try:
            found = self._chosen(keys, inside)
        except UnsafeCheckpointError:
            raise
        except CheckpointError as error:
            return Saved(where, Presence.TORN, detail=str(error))
        if not found:
            return Saved(where, Presence.KEY_ABSENT)
        depth = 1 + len(inside)
        key = str(found[next(iter(found))][0])
        return Saved(
            f"{self.path.name}[{key!r}]",
            Presence.PRESENT,
            lambda: self.read(found, depth),
            size=sum(self._size(name) for name in found),
        )

    def _chosen(self, keys: Iterable[str], inside: tuple[str, ...]) -> dict[str, tuple[Any, ...]]:
        for key in keys:
            start = (key, *inside)
            found = {n: p for n, p in self.places.items() if tuple(map(str, p[: len(start)])) == start}
            if found:
                return found
        return {}

    def _size(self, name: str) -> int:
        entry = self.metadata.state_dict_metadata[name]
        return entry.size.numel() * entry.properties.dtype.itemsize if hasattr(entry, "size") else 0

    def read(self, places: Mapping[str, tuple[Any, ...]], depth: int) -> Any:
        """Read some entries, and put each where it was below a depth of the nested state dict."""
        flat = self._read(places)
        root: dict[Any, Any] = {}
        for name, place in places.items():
            _put(root, ("", *place[depth:]), flat[name])
        return _numbered(root[""])

    def _read(self, names: Iterable[str]) -> dict[str, Any]:
        from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        folder, known = self.path, self.metadata.state_dict_metadata

        class Planner(DefaultLoadPlanner):  # type: ignore[misc, unused-ignore]
            def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
                self.state_dict[read_item.dest_index.fqn] = loaded(value)

        def loaded(value: io.BytesIO) -> Any:
            try:
                with torch.serialization.safe_globals(_resolve(self.allow)):
                    return torch.load(value, map_location="cpu", weights_only=True)
            except pickle.UnpicklingError as error:
                with torch.serialization.safe_globals(_resolve(self.allow)):
                    value.seek(0)
                    asked = torch.serialization.get_unsafe_globals_in_checkpoint(value)
                if asked:
                    raise UnsafeCheckpointError(str(folder), sorted(asked)[0]) from error
                raise

        flat: dict[str, Any] = {
            name: torch.empty(known[name].size, dtype=known[name].properties.dtype)
            if hasattr(known[name], "size")
            else None
            for name in names
        }
        planner = Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
        reader = FileSystemReader(folder)
        try:
            planner.set_up_planner(flat, self.metadata, is_coordinator=True)
            reader.set_up_storage_reader(self.metadata, is_coordinator=True)
            reader.read_data(planner.create_local_plan(), planner).wait()
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(str(folder), "", f"is torn ({error!r}).") from error
        return flat


def _put(root: dict[Any, Any], place: tuple[Any, ...], value: Any) -> None:
    """Put a value at a place in nested dicts, and in lists where a step is a number."""
    held: Any = root
    for step, following in zip(place, (*place[1:], None), strict=True):
        fresh: Any = value if following is None else [] if isinstance(following, int) else {}
        if isinstance(held, list):
            held += [None] * (step + 1 - len(held))
            if following is None or held[step] is None:
                held[step] = fresh
        elif following is None or step not in held:
            held[step] = fresh
        held = held[step]


def _numbered(content: Any) -> Any:
    """Give an optimizer's parameters their numbers back, which are written as text."""
    if isinstance(content, dict):
        groups, state = content.get("param_groups"), content.get("state")
        if isinstance(groups, list) and isinstance(state, dict):
            ids = [key for group in groups if isinstance(group, dict) for key in group.get("params", ())]
            if ids and all(isinstance(key, int) for key in ids):
                content["state"] = {int(k) if str(k).isdigit() else k: v for k, v in state.items()}
    return content
