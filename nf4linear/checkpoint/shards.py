"""safetensors files, tensor by tensor: headers are read whole, data only when a tensor is asked for.

The header is parsed here because unpack must give back what a library reader hides: the order of the keys, the order
of the metadata and the exact bytes of tensors of every dtype. Files are opened read-only and nothing is memory-mapped,
so a file that shrinks under the reader is an error and not a crash.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_MAX_HEADER = 100_000_000  # bytes; the safetensors library's own limit
_COPY_CHUNK = 16 << 20  # bytes

# safetensors dtype names that this project computes with; any other dtype is only ever copied as bytes.
TORCH_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I8": torch.int8, "U8": torch.uint8,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
FLOAT_DTYPE_NAMES = ("F32", "F16", "BF16")  # of plain weights and of statistics; all widen to float32 exactly


class CheckpointError(ValueError):
    """A checkpoint that cannot be read as asked; the message names file, layer or key, and the next step."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a safetensors file: `dtype` by its safetensors name, `begin` and `end` relative to the data."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    @property
    def torch_dtype(self) -> torch.dtype | None:
        return TORCH_DTYPES.get(self.dtype)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Shard:
    """Header of one safetensors file; `entries` in the order of their bytes."""

    path: Path
    metadata: dict[str, str] | None
    entries: tuple[Entry, ...]
    data_start: int


def read_header(path: Path) -> Shard:
    """Parse and check the header of a safetensors file; raises CheckpointError if the file is damaged or cut short."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            length = struct.unpack("<Q", file.read(8))[0] if size >= 8 else -1
            if not 0 <= length <= min(_MAX_HEADER, size - 8):
                raise CheckpointError(f"{path}: not a safetensors file, or cut short ({size} bytes)")
            header = json.loads(file.read(length).decode("utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: the safetensors header is damaged ({error})") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the safetensors header is damaged (not a JSON object)")
    metadata = header.pop("__metadata__", None)
    entries = sorted((_entry(path, key, item) for key, item in header.items()), key=lambda e: (e.begin, e.end))
    _check_coverage(path, entries, size - 8 - length)
    return Shard(path, metadata, tuple(entries), 8 + length)


def _entry(path: Path, key: str, item: Any) -> Entry:
    try:
        begin, end = item["data_offsets"]
        entry = Entry(key, item["dtype"], tuple(item["shape"]), begin, end)
        whole = all(type(value) is int and value >= 0 for value in (begin, end, *entry.shape))
        dtype = entry.torch_dtype
        if not whole or not isinstance(entry.dtype, str) or (dtype and entry.numel * dtype.itemsize != entry.nbytes):
            raise ValueError(f"{entry.dtype} {list(entry.shape)} at {begin}:{end}")
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path}: the safetensors header entry of {key!r} is damaged ({error})") from error
    return entry


def _check_coverage(path: Path, entries: list[Entry], data_bytes: int) -> None:
    position = 0
    for entry in entries:
        if entry.begin != position:
            raise CheckpointError(f"{path}: tensor {entry.key!r} starts at byte {entry.begin}, expected {position}")
        position = entry.end
    if position != data_bytes:
        raise CheckpointError(
            f"{path}: holds {data_bytes} bytes of tensors, its header promises {position}; "
            "the file is cut short or damaged, download or copy it again"
        )


class Checkpoint:
    """The safetensors files of a folder as one mapping from key to tensor, iterable by key. Use as a context manager.

    `files` names them where they are not those of the usual names (a variant, say).
    Raises CheckpointError for a folder without safetensors weights, a missing shard, a key in two shards, or an index
    that does not agree with the files.
    """

    def __init__(self, folder: Path, files: Sequence[str] | None = None) -> None:
        self.folder = folder
        indexed = files is None and (folder / INDEX_FILE).is_file()
        self.index_text = _read_text(folder / INDEX_FILE) if indexed else None
        weight_map = self._weight_map()
        names = self._shard_names(weight_map) if files is None else files
        self.shards = tuple(read_header(folder / name) for name in names)
        self._where: dict[str, tuple[Shard, Entry]] = {}
        self._files: dict[Path, Any] = {}
        for shard in self.shards:
            for entry in shard.entries:
                if entry.key in self._where:
                    other = self._where[entry.key][0].path.name
                    raise CheckpointError(f"{shard.path}: key {entry.key!r} is also in {other}")
                self._where[entry.key] = (shard, entry)
        for key, name in (weight_map or {}).items():
            if key not in self._where or self._where[key][0].path.name != name:
                raise CheckpointError(f"{folder / INDEX_FILE}: key {key!r} is not in {name}")

    def _shard_names(self, weight_map: dict[str, str] | None) -> list[str]:
        if weight_map is None:
            if (self.folder / SINGLE_FILE).is_file():
                return [SINGLE_FILE]
            raise CheckpointError(_no_weights(self.folder))
        names = sorted(set(weight_map.values()))
        for name in names:
            if not (self.folder / name).is_file():
                raise CheckpointError(f"{self.folder}: {INDEX_FILE} names {name}, which is not there")
        return names

    def _weight_map(self) -> dict[str, str] | None:
        """Key -> file of the index; None without one."""
        if self.index_text is None:
            return None
        try:
            weight_map = json.loads(self.index_text)["weight_map"]
            if not all(isinstance(name, str) and Path(name).name == name for name in weight_map.values()):
                raise ValueError("file names must be plain names inside the folder")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{self.folder / INDEX_FILE}: not a safetensors index ({error})") from error
        return weight_map

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def __contains__(self, key: str) -> bool:
        return key in self._where

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def entry(self, key: str) -> Entry:
        return self._where[key][1]

    def total_bytes(self) -> int:
        return sum(entry.nbytes for _, entry in self._where.values())

    def tensor(self, key: str) -> Tensor:
        """The tensor of `key`, read into memory of its own. Only for dtypes in TORCH_DTYPES."""
        entry = self.entry(key)
        if entry.torch_dtype is None:
            raise CheckpointError(f"{self.locate(key)} has dtype {entry.dtype}, which nf4linear cannot compute with")
        if entry.nbytes == 0:
            return torch.empty(entry.shape, dtype=entry.torch_dtype)
        data, position = bytearray(entry.nbytes), 0
        for chunk in self.chunks(key):
            data[position : position + len(chunk)] = chunk
            position += len(chunk)
        return torch.frombuffer(data, dtype=torch.uint8).view(entry.torch_dtype).view(entry.shape)

    def chunks(self, key: str) -> Iterator[bytes]:
        """The bytes of `key` in pieces of a few MiB."""
        shard, entry = self._where[key]
        file = self._files.get(shard.path)
        if file is None:
            file = self._files[shard.path] = open(shard.path, "rb")  # noqa: SIM115 closed by __exit__
        file.seek(shard.data_start + entry.begin)
        left = entry.nbytes
        while left:
            chunk = file.read(min(left, _COPY_CHUNK))
            if not chunk:
                raise CheckpointError(f"{self.locate(key)} ends early; the file changed while it was read")
            left -= len(chunk)
            yield chunk

    def locate(self, key: str) -> str:
        """`file: key` for messages."""
        return f"{self._where[key][0].path}: key {key!r}" if key in self._where else f"{self.folder}: key {key!r}"


def _no_weights(folder: Path) -> str:
    pickles = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern))
    if pickles:
        return (
            f"{folder}: holds only pickled weights ({pickles[0]}), which can run code when read and are never opened "
            "here; load the model where you trust it and save it with save_pretrained to get safetensors"
        )
    if (folder / "adapter_config.json").is_file():
        return f"{folder}: is an adapter, not a model; merge it into its base model first"
    return f"{folder}: no {SINGLE_FILE} or {INDEX_FILE}; give the folder of a saved model"


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; raises CheckpointError naming the file when it is missing or not one."""
    try:
        value = json.loads(_read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value
