"""pack: a bitsandbytes or plain checkpoint into a packed one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..cards import render_card
from ..progress import Progress
from ..sizes import parse_size
from .folders import (
    SOURCE_CARD,
    check_apart,
    copy_small_files,
    fetch_source,
    source_fingerprint,
)
from .packed import METADATA, SOURCE_FILE, SourceRecord, make_config
from .plan import PackOptions, Plan, make_plan
from .shard_plan import copied, plan_shards, write_index, write_shards
from .shards import Checkpoint, read_json
from .writer import OutputFolder, write_atomic, write_json


@dataclass
class PackResult:
    """What pack did: sizes in bytes of all weight files, and lines worth telling the user."""

    folder: Path
    layers: int
    bytes_before: int
    bytes_after: int
    notes: list[str] = field(default_factory=list)


def pack_checkpoint(
    src: str | Path,
    dst: str | Path,
    *,
    format: str | None = None,
    blocksize: int | None = None,
    double_quant: bool | None = None,
    skip: Sequence[str] = (),
    lm_head: str | None = None,
    max_shard_size: str | int = "5GB",
    force: bool = False,
    revision: str | None = None,
    progress: bool = True,
) -> PackResult:
    """Write the checkpoint in folder (or of hub model) `src` to the new folder `dst` in kernel order.

    A bitsandbytes 4-bit or 8-bit checkpoint keeps every code and scale, so `unpack_checkpoint` restores it byte for
    byte; a plain 16/32-bit one is quantized layer by layer (see PackOptions). `dst` appears when it is complete; an
    interrupted run goes on when it is repeated. At most one layer is in memory at a time.

    Raises CheckpointError (a ValueError) that names file, layer and key for a source that is damaged, incomplete or
    unsupported, and for a `dst` that exists (see `force`), and ValueError for options that do not fit.
    """
    options = PackOptions(format, blocksize, double_quant, tuple(skip), lm_head)
    shard_bytes = parse_size(max_shard_size)
    source_folder = fetch_source(src, revision)
    destination = Path(dst).expanduser().resolve()
    check_apart(source_folder, destination)
    config = read_json(source_folder / "config.json")
    with Checkpoint(source_folder) as source:
        fingerprint = source_fingerprint(source) | {"pack": repr(options), "shard_bytes": shard_bytes}
        out = OutputFolder(destination, fingerprint, force)
        out.check_free()
        plan = make_plan(source, config, options)
        plan.units += [copied(source, key) for key in source if key not in plan.replaced]
        shards = plan_shards(plan.units, shard_bytes, METADATA)
        total = sum(shard.nbytes for shard in shards)
        with out.writing(total) as folder, Progress("Packing", total, progress) as bar:
            write_shards(out, shards, source, bar)
            write_index(out, shards)
            copy_small_files(source_folder, folder, card=("README.md", SOURCE_CARD))
            quantization = make_config(plan.module_specs(), plan.not_converted)
            write_json(folder / SOURCE_FILE, _source_record(source, config, plan).to_json())
            result = PackResult(destination, len(plan.specs), source.total_bytes(), total, plan.notes)
            _write_card(source_folder, folder, src, config, plan, result)
            changes = {key: False for key in plan.config_changes}
            # Last, because loaders take a folder with a config.json for a model.
            write_json(folder / "config.json", config | changes | {"quantization_config": quantization})
    return result


def _source_record(source: Checkpoint, config: dict[str, Any], plan: Plan) -> SourceRecord:
    files = [
        {
            "name": shard.path.name,
            "metadata": shard.metadata,
            "tensors": [[entry.key, entry.dtype, list(entry.shape)] for entry in shard.entries],
        }
        for shard in source.shards
    ]
    return SourceRecord(
        plan.source_format,
        config.get("quantization_config"),
        source.index_text,
        files,
        plan.records,
        plan.config_changes,
    )


def _write_card(
    source_folder: Path, folder: Path, src: str | Path, config: dict[str, Any], plan: Plan, result: PackResult
) -> None:
    text = render_card(
        source_card=source_folder / "README.md",
        source_name=source_folder.name if Path(src).expanduser().is_dir() else str(src),
        config=config,
        specs=plan.specs,
        source_format=plan.source_format,
        bytes_before=result.bytes_before,
        bytes_after=result.bytes_after,
    )
    write_atomic(folder / "README.md", text)
