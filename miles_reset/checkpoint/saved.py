"""What a checkpoint holds, part by part: whether it is there, where, and how to get it."""

from __future__ import annotations

import enum
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from miles_reset.errors import CheckpointError


class Presence(enum.StrEnum):
    """Whether a part was saved, and in which of four ways it was not."""

    PRESENT = "present"
    NULL = "null in the file"
    KEY_ABSENT = "no such key in the file"
    FILE_ABSENT = "the file is not there"
    TORN = "the file cannot be read"


@dataclass(frozen=True)
class Saved:
    """One part of a checkpoint.

    Attributes:
        where: The file, and the key in it.
        presence: Whether it is there.
        read: Returns its content. Tensors may be views of a file: what keeps them copies them.
        detail: What is wrong with it, if it cannot be read.
        size: The bytes of its tensors, if they are known without reading it.
    """

    where: str
    presence: Presence
    read: Callable[[], Any] = field(default=lambda: None, repr=False)
    detail: str = ""
    size: int | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of its tensors; they are not read for it."""
        if self.size is not None:
            return self.size
        return sum(tensor.nbytes for tensor in tensors_of(self.read())) if self.there else 0

    @property
    def there(self) -> bool:
        """Whether it can be read."""
        return self.presence is Presence.PRESENT


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds. Nothing of it is read but what names and places the parts.

    Attributes:
        path: The file or folder.
        format: The name of the reader that knows it.
        parts: What was saved, by part.
        world_size: The number of ranks that saved it, if it says so.
        layout: How it was sharded, if it says so: the sizes of the parallel dimensions.
        iteration_unit: What its iteration counts, if its format says so.
        facts: Further things worth knowing, in words.
    """

    path: str
    format: str
    parts: Mapping[str, Saved]
    world_size: int | None = None
    layout: Mapping[str, int] = field(default_factory=dict)
    iteration_unit: str | None = None
    facts: Mapping[str, str] = field(default_factory=dict)

    def part(self, name: str) -> Saved:
        """Return a part, which may not be there."""
        return self.parts.get(name, Saved(self.path, Presence.KEY_ABSENT))

    def read(self, name: str) -> Any:
        """Return what was saved of a part.

        Raises:
            CheckpointError: It is not there.
        """
        saved = self.part(name)
        if not saved.there:
            raise CheckpointError(saved.where, name, f"is not there: {saved.detail or saved.presence}.")
        return saved.read()

    def to_dict(self) -> dict[str, Any]:
        """Return what there is as plain data, without the content."""
        return {
            "path": self.path,
            "format": self.format,
            "world_size": self.world_size,
            "layout": dict(self.layout),
            "iteration_unit": self.iteration_unit,
            "facts": dict(self.facts),
            "parts": {
                name: {
                    "where": saved.where,
                    "presence": str(saved.presence),
                    "bytes": saved.nbytes,
                    "detail": saved.detail,
                }
                for name, saved in self.parts.items()
            },
        }


def tensors_of(content: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested dicts, lists and tuples."""
    waiting, met = [content], set()
    while waiting:
        item = waiting.pop()
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, (Mapping, list, tuple)) and id(item) not in met:
            met.add(id(item))
            waiting += item.values() if isinstance(item, Mapping) else item


CHECKSUMS = "_miles_reset_checksums"
"""The attribute of a tensor from a file that has the checksum and the size of each record there."""


def check_bits(content: Any, where: str, part: str) -> None:
    """Compare the tensors of a part with the checksums of the file that they are from, which reads them.

    Raises:
        CheckpointError: One is not what was saved.
    """
    met = set()
    for tensor in tensors_of(content):
        sums: frozenset[tuple[int, int]] = getattr(tensor, CHECKSUMS, frozenset())
        if not sums or not tensor.untyped_storage().nbytes():
            continue
        storage = tensor.untyped_storage()
        if storage.data_ptr() in met:
            continue
        met.add(storage.data_ptr())
        whole = tensor.detach().as_strided((storage.nbytes() // tensor.element_size(),), (1,), 0)
        raw = whole.view(torch.uint8).numpy()
        if (zlib.crc32(raw.data), storage.nbytes()) not in sums:
            problem = f"is torn: a tensor of shape {tuple(tensor.shape)} differs from its checksum."
            raise CheckpointError(where, part, problem)


def check_sizes(content: Any, where: str, part: str) -> None:
    """Refuse tensors that are larger than what was saved of them: a copy would take memory from nowhere.

    Raises:
        CheckpointError: There is one.
    """
    for tensor in tensors_of(content):
        plain = tensor.layout is torch.strided and not tensor.is_meta
        if plain and tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            problem = f"has a tensor of shape {tuple(tensor.shape)} that is larger than what was saved of it."
            raise CheckpointError(where, part, problem)
