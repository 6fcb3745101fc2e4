"""What a checkpoint holds, part by part, without loading it.

A plugin that reads a format of its own imports from here: :class:`CheckpointReader`, which it returns
from the hook ``miles_reset_checkpoint_readers``, and what that needs.
"""

from miles_reset.checkpoint.files import TorchFile, number, part_of, plain_parts
from miles_reset.checkpoint.reader import CheckpointReader, SafeGlobal, Source
from miles_reset.checkpoint.saved import Checkpoint, Presence, Saved, check_bits, tensors_of
from miles_reset.checkpoint.sharded import ShardedFolder

__all__ = [
    "Checkpoint",
    "CheckpointReader",
    "Presence",
    "SafeGlobal",
    "Saved",
    "ShardedFolder",
    "Source",
    "TorchFile",
    "check_bits",
    "number",
    "part_of",
    "plain_parts",
    "tensors_of",
]
