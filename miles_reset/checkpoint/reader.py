"""The record by which a plugin says how to read one format of checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from miles_reset.checkpoint.files import TorchFile
from miles_reset.checkpoint.saved import Checkpoint


@dataclass(frozen=True)
class Source:
    """What is to be read, and by whom.

    Attributes:
        path: The file or folder.
        rank: This rank.
        world_size: The number of ranks of this run.
        allow: Dotted names that may be unpickled.
    """

    path: Path
    rank: int = 0
    world_size: int = 1
    allow: tuple[str, ...] = ()

    def file(self, name: str | Path) -> TorchFile:
        """Return a file in the folder."""
        return TorchFile(self.path / name, self.allow)


@dataclass(frozen=True)
class CheckpointReader:
    """How to read one format.

    Attributes:
        target: The name of the format.
        matches: Says whether a file or folder is of this format, by names and first bytes.
        open: Returns what it holds, without reading it.
        general: Whether it takes what no other format claims.
        override: Whether it takes the place of another plugin's reader of the same name.
    """

    target: str
    matches: Callable[[Path], bool]
    open: Callable[[Source], Checkpoint]
    general: bool = False
    override: bool = False


@dataclass(frozen=True)
class SafeGlobal:
    """A class or function that a file may have unpickled: one that does nothing but hold data.

    Attributes:
        target: Its dotted name.
        override: Whether it may be named by another plugin too.
    """

    target: str
    override: bool = False
