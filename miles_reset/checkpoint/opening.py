"""From a path to what is there: the reader that knows the format, and its answer."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from miles_reset.agree import rank_and_world
from miles_reset.checkpoint.files import plain_parts
from miles_reset.checkpoint.reader import CheckpointReader, SafeGlobal, Source
from miles_reset.checkpoint.saved import Checkpoint, Saved
from miles_reset.discovery import default_registry
from miles_reset.errors import CheckpointError, ResetError
from miles_reset.registry import Registry


def open_checkpoint(
    path: str | os.PathLike[str] | Mapping[str, Any],
    *,
    rank: int | None = None,
    world_size: int | None = None,
    allow: Iterable[str] = (),
    registry: Registry | None = None,
) -> Checkpoint:
    """Find out what a checkpoint holds, without reading it.

    Args:
        path: A file, a folder, or a mapping that was loaded already.
        rank: Whose part of it; this process's, by default.
        world_size: The number of ranks of this run; that of this process, by default.
        allow: Dotted names that may be unpickled, besides those that plugins allow.
        registry: Where readers are looked up; the installed plugins by default.

    Raises:
        CheckpointError: It is not there, or no plugin knows its format.
        UnsafeCheckpointError: A file asks for something that is not allowed.
    """
    if isinstance(path, Mapping):
        return Checkpoint("a mapping", "mapping", plain_parts(path, "the mapping"))
    where = registry or default_registry()
    place = Path(path)
    try:
        place.resolve(strict=True)
        names = list(place.iterdir()) if place.is_dir() else [place]
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, before Python 3.13
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(str(place), "", f"cannot be opened: {reason}.") from error
    if not names:
        raise CheckpointError(str(place), "", "is an empty folder.")
    readers = [claim.record for claim in where.table(CheckpointReader).values()]
    found = [reader for reader in readers if not reader.general and reader.matches(place)]
    found = found or [reader for reader in readers if reader.general and reader.matches(place)]
    if len(found) != 1:
        known = ", ".join(reader.target for reader in found or readers) or "none"
        what = (
            "is of a format that could be any of" if found else "is of no format that a plugin reads. Known:"
        )
        raise CheckpointError(str(place), "", f"{what} {known}.")
    allowed = tuple(where.table(SafeGlobal)) + tuple(allow)
    here, world = rank_and_world()
    rank = here if rank is None else rank
    world_size = world if world_size is None else world_size
    try:
        checkpoint: Checkpoint = found[0].open(Source(place, rank, world_size, allowed))
        parts: Mapping[str, Any] = checkpoint.parts
        odd = [name for name, part in parts.items() if not isinstance(part, Saved)]
    except ResetError:
        raise
    except Exception as error:
        problem = f"cannot be read by the reader {found[0].target!r}: {error!r}."
        raise CheckpointError(str(place), "", problem) from error
    if odd:
        problem = f"is given by the reader {found[0].target!r} as another thing than Saved."
        raise CheckpointError(str(place), odd[0], problem)
    return checkpoint
