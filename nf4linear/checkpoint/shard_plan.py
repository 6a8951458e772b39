"""Which tensors go into which output file, and the loop that writes them one layer at a time."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..progress import Progress
from .shards import INDEX_FILE, SINGLE_FILE, TORCH_DTYPES, Checkpoint, Entry
from .writer import OutputFolder, ShardWriter, layout_entries, write_json

Stored = tuple[str, tuple[int, ...], int]  # dtype name, shape, bytes


@dataclass(frozen=True)
class Unit:
    """Keys that are made together: one quantized layer, or one tensor that is copied (`produce` None).

    `produce()` yields (key, tensor) for at least every key of `outputs`; nothing is read before it is called.
    """

    name: str
    outputs: Mapping[str, Stored]
    produce: Callable[[], Iterable[tuple[str, Tensor]]] | None = None

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, _, nbytes in self.outputs.values())


@dataclass(frozen=True)
class ShardPlan:
    name: str
    metadata: Mapping[str, str] | None
    entries: Sequence[Entry]
    units: Sequence[Unit]

    @property
    def title(self) -> str:
        """The name as a progress bar has room for it."""
        return self.name.removesuffix(".safetensors")

    @property
    def nbytes(self) -> int:
        return self.entries[-1].end if self.entries else 0


def stored(dtype: str, shape: tuple[int, ...]) -> Stored:
    return dtype, tuple(shape), TORCH_DTYPES[dtype].itemsize * math.prod(shape)


def copied(checkpoint: Checkpoint, key: str) -> Unit:
    entry = checkpoint.entry(key)
    return Unit(key, {key: (entry.dtype, entry.shape, entry.nbytes)})


def natural_key(name: str) -> list[tuple[int, str | int]]:
    """Sort key that puts layers.2 before layers.10."""
    return [(1, int(part)) if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]


def plan_shards(units: Iterable[Unit], max_bytes: int, metadata: Mapping[str, str]) -> list[ShardPlan]:
    """Units in natural order of their names, filled into files of at most `max_bytes` unless one unit is larger."""
    groups: list[list[Unit]] = [[]]
    filled = 0
    for unit in sorted(units, key=lambda u: natural_key(u.name)):
        if groups[-1] and filled + unit.nbytes > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(unit)
        filled += unit.nbytes
    count = len(groups)
    names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)] if count > 1 else [SINGLE_FILE]
    return [ShardPlan(name, metadata, _aligned(group), group) for name, group in zip(names, groups, strict=True)]


def _aligned(units: Iterable[Unit]) -> list[Entry]:
    """Entries by falling element size, so that every tensor starts at a multiple of its own."""
    rows = [(key, *where) for unit in units for key, where in unit.outputs.items()]
    rows.sort(key=lambda row: (-TORCH_DTYPES[row[1]].itemsize if row[1] in TORCH_DTYPES else -8, natural_key(row[0])))
    return layout_entries(rows)


def write_shards(out: OutputFolder, shards: Sequence[ShardPlan], source: Checkpoint, progress: Progress) -> None:
    """Write every shard an earlier run has not finished. At any time one layer is in memory."""
    for shard in shards:
        if out.has(shard.name):
            progress.note(f"{shard.name}: complete from an earlier run")
            progress.advance(shard.nbytes, shard.title)
            continue
        with ShardWriter(out.partial / shard.name, shard.entries, shard.metadata) as writer:
            for unit in shard.units:
                _write_unit(writer, unit, source)
                progress.advance(unit.nbytes, shard.title)


def _write_unit(writer: ShardWriter, unit: Unit, source: Checkpoint) -> None:
    if unit.produce is None:
        for key in unit.outputs:
            writer.write_chunks(key, source.chunks(key))
        return
    for key, tensor in unit.produce():
        if key in unit.outputs:
            writer.write(key, tensor)


def write_index(out: OutputFolder, shards: Sequence[ShardPlan]) -> None:
    """The index file that loaders need when there is more than one shard."""
    if len(shards) > 1:
        weight_map = {entry.key: shard.name for shard in shards for entry in shard.entries}
        total = sum(shard.nbytes for shard in shards)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(out.partial / INDEX_FILE, index)
