"""Files that torch.save wrote: mapped into memory, and unpickled by an allow-list alone."""

from __future__ import annotations

import importlib
import json
import pickle
import sys
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from miles_reset.checkpoint.saved import CHECKSUMS, Presence, Saved, tensors_of
from miles_reset.errors import CheckpointError, UnsafeCheckpointError

_KEYS = {
    "optimizer": ("optimizer", "optimizer_state_dict", "optim", "optimizer_states"),
    "scheduler": (
        "scheduler",
        "lr_scheduler",
        "opt_param_scheduler",
        "scheduler_state_dict",
        "lr_schedulers",
    ),
    "iteration": ("iteration", "global_step", "step", "epoch"),
    "rng": ("rng", "rng_state"),
    "grad_scaler": ("grad_scaler", "scaler"),
    "model": ("model", "model_state_dict", "state_dict"),
}

_KNOWS_OLD_NAMES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 7)


@dataclass(frozen=True)
class TorchFile:
    """A file that ``torch.save`` wrote. It is opened when first asked, once.

    Its tensors are mapped: their bytes are read when they are used, and not before.

    Attributes:
        path: The file.
        allow: Dotted names that may be unpickled besides what torch allows itself.
    """

    path: Path
    allow: tuple[str, ...] = ()

    @cached_property
    def content(self) -> Any:
        """What is in the file.

        Raises:
            CheckpointError: It is not there, torn, or no file of torch's.
            UnsafeCheckpointError: It would import or call something that is not allowed.
        """
        try:
            size = self.path.stat().st_size
            mapped = zipfile.is_zipfile(self.path)
            sums = _checksums(self.path) if mapped else None
            with torch.serialization.safe_globals(self._allowed()):
                content = torch.load(self.path, map_location="cpu", mmap=mapped, weights_only=True)
            for tensor in tensors_of(content) if sums else ():
                setattr(tensor, CHECKSUMS, sums)  # they are compared where the tensor is read
            return content
        except OSError as error:
            raise CheckpointError(
                str(self.path), "", f"cannot be read: {error.strerror or error}."
            ) from error
        except pickle.UnpicklingError as error:
            raise self._unsafe(error) from error
        except Exception as error:
            what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            what = what.splitlines()[0]
            problem = "is empty." if not size else f"is torn, or no file of torch's ({what})."
            raise CheckpointError(str(self.path), "", problem) from error

    def _allowed(self) -> list[Any]:
        """Resolve what the allow-list names; a library is imported for it only if the file asks for that."""
        mapped = zipfile.is_zipfile(self.path)
        asked = torch.serialization.get_unsafe_globals_in_checkpoint(self.path) if mapped else []
        there = (name for name in self.allow if name.partition(".")[0] in sys.modules)
        return _resolve({*there, *(name for name in self.allow if name in asked)})

    def _unsafe(self, error: pickle.UnpicklingError) -> CheckpointError:
        try:
            with torch.serialization.safe_globals(self._allowed()):
                asked = torch.serialization.get_unsafe_globals_in_checkpoint(self.path)
        except Exception:  # noqa: BLE001  # it is no zip file, or torn: the first error says more
            asked = []
        if asked:
            return UnsafeCheckpointError(str(self.path), sorted(asked)[0])
        said = str(error).splitlines()[-1] if str(error) else "no reason given"
        return CheckpointError(str(self.path), "", f"is torn, or no file of torch's ({said}).")

    def part(self, *keys: str) -> Saved:
        """Return what the file has under the first of some keys that it has; the whole, if none is given."""
        name = self.path.name
        if not self.path.exists():
            return Saved(name, Presence.FILE_ABSENT)
        try:
            content = self.content
        except UnsafeCheckpointError:
            raise
        except CheckpointError as error:
            return Saved(name, Presence.TORN, detail=str(error))
        return part_of(content, keys, name)


def _checksums(path: Path) -> frozenset[tuple[int, int]]:
    """Return checksum and size of each record, having compared that of the pickle, which says what is where.

    A file may be written without: torch's ``set_crc32_options`` leaves them 0.
    """
    with zipfile.ZipFile(path) as archive:
        records = archive.infolist()
        if not any(record.CRC for record in records):
            return frozenset()
        for record in records:
            if record.filename.endswith("data.pkl"):
                if record.compress_type != zipfile.ZIP_STORED:
                    raise zipfile.BadZipFile("its pickle is compressed, which torch never does")
                archive.read(record)
        return frozenset((record.CRC, record.file_size) for record in records)


def part_of(content: Any, keys: Iterable[str], name: str) -> Saved:
    """Return what a mapping has under the first of some keys that it has."""
    keys = tuple(keys)
    if not keys:
        return Saved(name, Presence.PRESENT, lambda: content)
    if not isinstance(content, Mapping):
        return Saved(name, Presence.TORN, detail=f"{name} holds a {type(content).__name__}, not a mapping.")
    key = next((key for key in keys if key in content), None)
    if key is None:
        return Saved(f"{name}[{keys[0]!r}]", Presence.KEY_ABSENT)
    value = content[key]
    presence = Presence.NULL if value is None else Presence.PRESENT
    return Saved(f"{name}[{key!r}]", presence, lambda: value)


def plain_parts(content: Any, name: str) -> dict[str, Saved]:
    """Return the parts of a mapping under the keys that are usual, and the rest under their own."""
    parts = {part: part_of(content, keys, name) for part, keys in _KEYS.items()}
    if isinstance(content, Mapping):
        used = {key for keys in _KEYS.values() for key in keys}
        parts |= {str(key): part_of(content, [key], name) for key in content if key not in used}
    return parts


def number(path: Path, get: Callable[[str], Any] = int) -> Saved:
    """Return a number, or None, that a text file holds."""
    if not path.exists():
        return Saved(path.name, Presence.FILE_ABSENT)
    try:
        value = get(path.read_text())
    except (OSError, ValueError, KeyError, TypeError, json.JSONDecodeError) as error:
        return Saved(path.name, Presence.TORN, detail=f"{path} cannot be read: {error!r}.")
    return Saved(path.name, Presence.NULL if value is None else Presence.PRESENT, lambda: value)


def _resolve(names: Iterable[str]) -> list[Any]:
    """Import what the allow-list names; what is not installed here no file can be given."""
    found: list[Any] = []
    for name in names:
        module, _, rest = name.rpartition(".")
        try:
            one = getattr(importlib.import_module(module), rest)
        except (ImportError, AttributeError):
            continue
        if f"{getattr(one, '__module__', '')}.{getattr(one, '__qualname__', '')}" == name:
            found.append(one)
        elif _KNOWS_OLD_NAMES:
            found.append((one, name))  # numpy has moved since the file was written
    return found
