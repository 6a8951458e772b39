"""Checkpoint folders: pack, unpack, look into. Only `bnb_keys` knows bitsandbytes' key names."""

from .describe import Description, describe
from .pack import PackResult, pack_checkpoint
from .packed import PackedFolder, validate_packed
from .shards import CheckpointError
from .unpack import UnpackResult, unpack_checkpoint

__all__ = [
    "CheckpointError",
    "Description",
    "PackResult",
    "PackedFolder",
    "UnpackResult",
    "describe",
    "pack_checkpoint",
    "unpack_checkpoint",
    "validate_packed",
]
