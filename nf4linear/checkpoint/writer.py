"""Writing: safetensors files tensor by tensor, and folders that appear only when they are complete.

A file is written under a temporary name, synced and renamed. A folder is built as a hidden sibling of its destination
and renamed at the end, so nothing unfinished ever has the destination's name. The sibling survives a kill: files in it
that carry their final name are complete, and a later run with the same fingerprint goes on after them.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, uint8

from .shards import CheckpointError, Entry

try:
    import fcntl
except ImportError:  # Windows: two runs into one folder are then not kept apart
    fcntl = None

_DISK_FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))
JOB_FILE = "nf4linear_job.json"


def layout_entries(tensors: Iterable[tuple[str, str, tuple[int, ...], int]]) -> list[Entry]:
    """Entries with offsets for (key, dtype name, shape, bytes) in the given order."""
    entries, position = [], 0
    for key, dtype, shape, nbytes in tensors:
        entries.append(Entry(key, dtype, tuple(shape), position, position + nbytes))
        position += nbytes
    return entries


class ShardWriter:
    """One safetensors file, written tensor by tensor in any order. Use as a context manager.

    The file gets its name when the block ends without an exception and every entry was written; otherwise the
    temporary file is removed.
    """

    def __init__(self, path: Path, entries: Iterable[Entry], metadata: Mapping[str, str] | None) -> None:
        self.path = path
        self._temporary = path.with_name(path.name + ".tmp")
        self._entries = {entry.key: entry for entry in entries}
        self._missing = set(self._entries)
        header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
        for e in self._entries.values():
            header[e.key] = {"dtype": e.dtype, "shape": list(e.shape), "data_offsets": [e.begin, e.end]}
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
        self._header = text + b" " * (-len(text) % 8)  # data starts at a multiple of 8 bytes

    def __enter__(self) -> ShardWriter:
        self._file = open(self._temporary, "wb")
        self._file.write(struct.pack("<Q", len(self._header)) + self._header)
        return self

    def write(self, key: str, tensor: Tensor) -> None:
        data = tensor.detach().cpu().contiguous().reshape(-1).view(uint8)
        self.write_chunks(key, [memoryview(data.numpy())])

    def write_chunks(self, key: str, chunks: Iterable[bytes | memoryview]) -> None:
        entry = self._entries[key]
        self._file.seek(8 + len(self._header) + entry.begin)
        written = sum(self._file.write(chunk) for chunk in chunks)
        if written != entry.nbytes:
            raise CheckpointError(f"{self.path}: {key!r} has {written} bytes, its header says {entry.nbytes}")
        self._missing.discard(key)

    def __exit__(self, exc_type: object, exc: object, tb: object) -> None:
        try:
            if exc_type is None:
                if self._missing:
                    raise CheckpointError(f"{self.path}: {sorted(self._missing)} were never written")
                _sync(self._file)
                self._file.close()
                os.replace(self._temporary, self.path)
                sync_folder(self.path.parent)
        finally:
            # Closing flushes, which fails again on a full disk; the first error is the one to report.
            with contextlib.suppress(OSError):
                self._file.close()
            self._temporary.unlink(missing_ok=True)


def write_atomic(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="utf-8", newline="") as file:
        file.write(text)
        _sync(file)
    os.replace(temporary, path)


def write_json(path: Path, value: Any) -> None:
    write_atomic(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` durable; a no-op where folders cannot be opened (Windows)."""
    with contextlib.suppress(PermissionError):
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


class OutputFolder:
    """The folder `dst` while it is being written: `partial` is where the files go.

    `fingerprint` (JSON) says what is being written from what; an unfinished earlier run is continued only if its
    fingerprint is the same. With `force` a different one is thrown away, and an existing `dst` is replaced at the end.
    """

    def __init__(self, dst: Path, fingerprint: Mapping[str, Any], force: bool) -> None:
        self.dst = dst
        self.partial = dst.parent / f".{dst.name}.nf4linear-partial"
        self._replaced = dst.parent / f".{dst.name}.nf4linear-replaced"
        self._fingerprint = json.loads(json.dumps(fingerprint))
        self._force = force

    def check_free(self) -> None:
        """Raise CheckpointError unless `dst` may be written."""
        if self.dst.is_dir() and os.path.ismount(self.dst):
            raise CheckpointError(f"{self.dst}: is a mount point and cannot appear all at once; give a folder in it")
        if self.dst.exists() and not self.dst.is_dir():
            raise CheckpointError(f"{self.dst}: is a file; give a folder that does not exist yet")
        if not self.dst.is_dir() or not any(self.dst.iterdir()):
            return
        if not self._force:
            raise CheckpointError(f"{self.dst}: exists and is not empty; choose another folder, or use --force")
        if not (self.dst / "config.json").is_file() or (self.dst / ".git").exists():
            raise CheckpointError(
                f"{self.dst}: is not just a model's folder (no config.json, or a git repository) and is not replaced "
                "even with --force; choose another folder, or remove it yourself"
            )

    @contextlib.contextmanager
    def writing(self, nbytes: int) -> Iterator[Path]:
        """Give `partial` to fill with about `nbytes`; rename it to `dst` if the block ends well, else keep it."""
        self.check_free()
        self.dst.parent.mkdir(parents=True, exist_ok=True)
        self._start()
        self._check_space(nbytes)
        with self._locked():
            for leftover in self.partial.glob("*.tmp"):
                leftover.unlink()
            try:
                yield self.partial
            except OSError as error:
                if error.errno not in _DISK_FULL:
                    raise
                raise CheckpointError(
                    f"{self.partial}: the disk is full; free some space and run the same command to go on, "
                    "or delete that folder"
                ) from error
            self._publish()

    def has(self, name: str) -> bool:
        """Whether an earlier run finished file `name`."""
        return (self.partial / name).is_file()

    def _start(self) -> None:
        job = self.partial / JOB_FILE
        if self.partial.is_dir():
            try:
                same = json.loads(job.read_text(encoding="utf-8")) == self._fingerprint
            except (OSError, ValueError):
                same = False  # killed before the job file was there
            # Without a finished shard there is nothing that another run could lose.
            if not same and not self._force and any(self.partial.glob("*.safetensors")):
                raise CheckpointError(
                    f"{self.partial}: an unfinished run from another source or with other options is there; "
                    "run that command again to finish it, or --force to throw it away"
                )
            if not same:
                with self._locked():
                    shutil.rmtree(self.partial)
        self.partial.mkdir(exist_ok=True)
        write_json(job, self._fingerprint)
        sync_folder(self.partial)

    def _check_space(self, nbytes: int) -> None:
        done = sum(path.stat().st_size for path in self.partial.glob("*.safetensors"))
        free = shutil.disk_usage(self.partial).free
        if nbytes - done > free:
            raise CheckpointError(
                f"{self.dst.parent}: {(nbytes - done) / 1e9:.2f} GB are to be written, {free / 1e9:.2f} GB are free"
            )

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        if not fcntl:
            yield
            return
        fd = os.open(self.partial, os.O_RDONLY)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise CheckpointError(f"{self.partial}: another run is writing there; wait or stop it") from error
            yield
        finally:
            os.close(fd)  # which also gives the lock back

    def _publish(self) -> None:
        self.check_free()  # again: something may have been put there meanwhile
        for path in self.partial.rglob("*"):
            if path.is_file():
                with open(path, "rb+") as file:
                    _sync(file)
        sync_folder(self.partial)
        if self.dst.is_dir() and any(self.dst.iterdir()):
            if self._replaced.exists():
                shutil.rmtree(self._replaced)
            os.replace(self.dst, self._replaced)
        elif self.dst.is_dir():
            self.dst.rmdir()
        os.replace(self.partial, self.dst)
        # Only now: without its job file an unfinished folder could not be continued.
        (self.dst / JOB_FILE).unlink()
        sync_folder(self.dst.parent)
        shutil.rmtree(self._replaced, ignore_errors=True)
