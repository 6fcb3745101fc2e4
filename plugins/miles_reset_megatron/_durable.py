"""Files that several ranks write into one folder, all of them or none.

Each rank writes its files under staged names. When all are on disk, rank 0 writes the manifest: from then
on the save counts. Then each rank gives its files their own names. Whenever the job is killed, the folder
holds the old files, or the new ones, some of which may still have their staged names.
"""

import contextlib
import json
import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from miles_reset import CheckpointError, ResetError
from miles_reset.agree import agree, exchange

MANIFEST = "miles_reset_manifest.json"
_STAGED = ".staged"


@dataclass(frozen=True)
class Manifest:
    """What a whole save consists of.

    Attributes:
        save: What tells this save from others into the same folder.
        world_size: The number of ranks that saved it.
        files: The size and the rank of each file, by name.
        told: What else was said about it: the iteration, the parallel layout.
    """

    save: str
    world_size: int
    files: Mapping[str, tuple[int, int]]
    told: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> "Manifest | None":
        """Return the folder's manifest, if it has one.

        Raises:
            CheckpointError: It has one that is none.
        """
        path = folder / MANIFEST
        try:
            held = json.loads(path.read_text())
            files = {str(name): (int(one["bytes"]), int(one["rank"])) for name, one in held["files"].items()}
            if held["version"] != 1 or any(Path(name).name != name for name in files):
                raise ValueError(f"version {held['version']!r}, files {sorted(files)}")
            return cls(str(held["save"]), int(held["world_size"]), files, dict(held["told"]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(str(path), "", f"cannot be read: {error!r}.") from error

    def text(self) -> str:
        """Return it as JSON."""
        files = {name: {"bytes": size, "rank": rank} for name, (size, rank) in sorted(self.files.items())}
        held = {"version": 1, "save": self.save, "world_size": self.world_size, "files": files}
        return json.dumps({**held, "told": dict(self.told)}, indent=1)

    def find(self, folder: Path, name: str) -> Path | None:
        """Return where a file of the save is; None if it has no such file.

        Raises:
            CheckpointError: The file is not there, or has another size.
        """
        if name not in self.files:
            return None
        staged = folder / _staged(name, self.save)
        path = staged if staged.exists() else folder / name
        try:
            size = path.stat().st_size
        except OSError as error:
            problem = f"is named in {MANIFEST} and cannot be opened: {error.strerror}."
            raise CheckpointError(str(path), "", problem) from error
        if size != self.files[name][0]:
            problem = (
                f"has {size:,} bytes; {MANIFEST} says {self.files[name][0]:,}, so it is of another save."
            )
            raise CheckpointError(str(path), "", problem)
        return path


def _staged(name: str, save: str) -> str:
    return f"{name}.{save}{_STAGED}"


def unfinished(folder: Path) -> list[str]:
    """Return the names of files that a save left before it counted."""
    return sorted(path.name for path in folder.glob(f"*{_STAGED}"))


def save_all(
    folder: Path,
    files: Mapping[str, Callable[[BinaryIO], Any]],
    told: Mapping[str, Any],
    *,
    rank: int,
    obsolete: Iterable[str] = (),
    group: Any = None,
) -> None:
    """Write files, on all ranks or on none. Call it on all ranks.

    Args:
        folder: Where; it is made if need be.
        files: What writes each file, by name. Names must differ between ranks.
        told: What else the manifest says.
        rank: This rank.
        obsolete: Patterns of this rank's files that an earlier save may have left.
        group: The ranks; all, by default.

    Raises:
        CheckpointError: A file cannot be written.
        RankDisagreementError: Another rank cannot write its files, or does not answer.
    """
    refused: ResetError | None = None
    sizes: dict[str, int] = {}
    saves = exchange(secrets.token_hex(4), group=group)
    save = saves[min(saves)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _finish_earlier(folder, rank)
        for name, write in files.items():
            sizes[name] = _written(folder / _staged(name, save), write)
        _sync_folder(folder)
    except ResetError as error:
        refused = error
    except Exception as error:  # noqa: BLE001  # other ranks wait for this one's verdict
        refused = CheckpointError(str(folder), "", f"cannot be written: {error!r}.")
    try:
        agree(refused, group=group)
        by_rank = exchange({name: (size, rank) for name, size in sizes.items()}, group=group)
    except ResetError:
        _remove(folder, [_staged(name, save) for name in files])
        raise
    refused = None
    if rank == min(by_rank):
        listed = {name: one for held in by_rank.values() for name, one in held.items()}
        refused = _commit(folder, Manifest(save, len(by_rank), listed, told))
    agree(refused, group=group)  # where it fails, the save may count: the staged files stay
    for name in files:
        (folder / _staged(name, save)).replace(folder / name)
    left = [path.name for pattern in obsolete for path in folder.glob(pattern)]
    _remove(folder, [name for name in left if name not in files])
    _sync_folder(folder)
    agree(None, group=group)


def _commit(folder: Path, manifest: Manifest) -> ResetError | None:
    staged = folder / _staged(MANIFEST, manifest.save)
    try:
        _written(staged, lambda file: file.write(manifest.text().encode()))
        staged.replace(folder / MANIFEST)
    except OSError as error:
        return CheckpointError(str(folder), "", f"cannot be written: {error!r}.")
    with contextlib.suppress(OSError):  # it counts already
        _sync_folder(folder)
    return None


def _finish_earlier(folder: Path, rank: int) -> None:
    """Give this rank's files of an earlier save their names, if it counts; remove what does not count."""
    if (manifest := Manifest.read(folder)) is not None:
        for name, (_, owner) in manifest.files.items():
            staged = folder / _staged(name, manifest.save)
            if owner == rank and staged.exists():
                staged.replace(folder / name)
    own = (f"_rank{rank}.", f"_rank{rank}_", *([MANIFEST] if not rank else []))
    _remove(folder, [name for name in unfinished(folder) if any(part in name for part in own)])


def _written(path: Path, write: Callable[[BinaryIO], Any]) -> int:
    with path.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def _sync_folder(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _remove(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        with contextlib.suppress(OSError):
            (folder / name).unlink()
