"""unpack: a packed checkpoint back into a bitsandbytes (or a plain) one."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import reference, reorder
from ..formats import FourBitSpec, WeightSpec, bitsandbytes_has, check_tables
from ..hub import no_folder
from ..progress import Progress
from ..sizes import parse_size
from . import bnb_keys
from .architecture import read_architecture
from .folders import SOURCE_CARD, check_apart, copy_small_files, source_fingerprint
from .packed import SOURCE_FILE, PackedFolder, SourceRecord, parse_config
from .shard_plan import ShardPlan, Stored, Unit, copied, plan_shards, stored, write_index, write_shards
from .shards import DTYPE_NAMES, INDEX_FILE, TORCH_DTYPES, CheckpointError, read_json
from .writer import OutputFolder, layout_entries, write_atomic, write_json

_PLAIN_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_CHANGED = "the folder was changed after it was packed; --synthesize writes a checkpoint of the values it has now"


@dataclass
class UnpackResult:
    """What unpack wrote; `exact` says that every tensor is byte for byte the one that was packed."""

    folder: Path
    layers: int
    exact: bool
    notes: list[str] = field(default_factory=list)


@dataclass
class _Output:
    shards: list[ShardPlan]
    quantization_config: dict[str, Any] | None
    index: str | None = None  # text of the source's own index file; None: write one where it is needed
    exact: bool = False
    notes: list[str] = field(default_factory=list)


def unpack_checkpoint(
    src: str | Path,
    dst: str | Path,
    *,
    synthesize: bool = False,
    dequantize: str | None = None,
    max_shard_size: str | int = "5GB",
    force: bool = False,
    progress: bool = True,
) -> UnpackResult:
    """Write the packed checkpoint in `src` to the new folder `dst` in bitsandbytes' format.

    With the nf4linear_source.json of a bitsandbytes source, tensors, key order, file split and metadata are those of
    the source. A checkpoint that was plain before becomes a valid bitsandbytes one; so does one without
    nf4linear_source.json if `synthesize` asks for it. `dequantize` ("bfloat16", "float16", "float32") writes plain
    weights instead. Writing is atomic and goes on after a kill, as in `pack_checkpoint`.

    Raises CheckpointError (a ValueError) naming file, layer and key.
    """
    if dequantize is not None and dequantize not in _PLAIN_DTYPES:
        raise ValueError(f"dequantize must be one of {', '.join(_PLAIN_DTYPES)}; got {dequantize!r}")
    shard_bytes = parse_size(max_shard_size)
    source_folder = Path(src).expanduser().resolve()
    if not source_folder.is_dir():
        raise CheckpointError(no_folder(src, "the folder of a packed checkpoint"))
    destination = Path(dst).expanduser().resolve()
    check_apart(source_folder, destination)
    with PackedFolder(source_folder, _shapes(source_folder, synthesize or dequantize is not None)) as packed:
        packed.check()
        options = {"unpack": [synthesize, dequantize, shard_bytes]}
        out = OutputFolder(destination, source_fingerprint(packed.checkpoint) | options, force)
        out.check_free()
        restores = packed.source is not None and packed.source.source_format == "bitsandbytes"
        if restores and not synthesize and dequantize is None:
            output = _restored(packed, packed.source)
        else:
            output = _synthesized(packed, dequantize, shard_bytes)
        total = sum(shard.nbytes for shard in output.shards)
        with out.writing(total) as folder, Progress("Unpacking", total, progress) as bar:
            write_shards(out, output.shards, packed.checkpoint, bar)
            if output.index is None:
                write_index(out, output.shards)
            else:
                write_atomic(folder / INDEX_FILE, output.index)
            copy_small_files(source_folder, folder, card=(SOURCE_CARD, "README.md"))
            write_json(folder / "config.json", _config(packed, output, dequantize))
    return UnpackResult(destination, len(packed.layers), output.exact, output.notes)


def _shapes(folder: Path, synthesize: bool) -> dict[str, tuple[int, int]] | None:
    """Layer shapes for a folder without a source record, from its model; None where the record has them."""
    if (folder / SOURCE_FILE).is_file():
        return None
    parse_config(read_json(folder / "config.json"), str(folder / "config.json"))
    if not synthesize:
        raise CheckpointError(
            f"{folder}: {SOURCE_FILE} is missing, so the bytes of the original cannot be restored; --synthesize writes "
            "a bitsandbytes checkpoint that is equal in value"
        )
    return read_architecture(folder).shapes


def _restored(packed: PackedFolder, source: SourceRecord) -> _Output:
    """The source's files as they were: same split, key order, metadata, dtypes and shapes."""
    output = _Output([], source.quantization_config, source.index, exact=True)
    owner: dict[str, bnb_keys.BnbLayer | str] = {}  # layer, or the name of one that pack itself quantized
    for name, fields in source.layers.items():
        if "dtype" not in fields:
            layer = bnb_keys.from_record(name, packed.known_spec(name), fields)
            owner |= dict.fromkeys(layer.keys, layer)
        elif not fields.get("untied"):
            owner[name + ".weight"] = name
            output.exact = False
            output.notes.append(f"{name}.weight was quantized by pack and is written dequantized, not as it was")
    listed = {key for file in source.files for key, _, _ in file["tensors"]}
    copied_keys = {key for key in packed.checkpoint if not packed.is_packed_key(key)}
    if lost := sorted((owner.keys() | copied_keys) - listed):
        raise CheckpointError(f"{packed.folder / SOURCE_FILE}: lists no key {lost[0]!r}; {_CHANGED}")
    for file in source.files:
        tensors = {key: (dtype, tuple(shape)) for key, dtype, shape in file["tensors"]}
        units = list(_file_units(packed, tensors, owner))
        outputs = {key: where for unit in units for key, where in unit.outputs.items()}
        entries = layout_entries((key, *outputs[key]) for key in tensors)
        output.shards.append(ShardPlan(file["name"], file["metadata"], entries, units))
    return output


def _file_units(
    packed: PackedFolder,
    tensors: dict[str, tuple[str, tuple[int, ...]]],
    owner: dict[str, bnb_keys.BnbLayer | str],
) -> Iterator[Unit]:
    by_layer: dict[str, dict[str, Stored]] = {}
    for key, (dtype, shape) in tensors.items():
        if (of := owner.get(key)) is not None:
            name = of if isinstance(of, str) else of.name
            by_layer.setdefault(name, {})[key] = stored(dtype, shape)
            continue
        if key not in packed.checkpoint:
            raise CheckpointError(f"{packed.folder}: key {key!r} of the source is missing; {_CHANGED}")
        entry = packed.checkpoint.entry(key)
        if (entry.dtype, entry.shape) != (dtype, shape):
            raise CheckpointError(
                f"{packed.checkpoint.locate(key)} is {entry.dtype} {list(entry.shape)}, it was {dtype} {list(shape)}; "
                f"{_CHANGED}"
            )
        yield copied(packed.checkpoint, key)
    for name, outputs in by_layer.items():
        of = owner[next(iter(outputs))]
        if isinstance(of, str):
            ((dtype, _, _),) = outputs.values()
            yield Unit(name, outputs, functools.partial(_dequantized, packed, name, TORCH_DTYPES[dtype], False))
        else:
            yield Unit(name, outputs, functools.partial(_bnb_tensors, packed, of, outputs))


def _canonical(packed: PackedFolder, name: str, spec: WeightSpec) -> dict[str, Tensor]:
    where = f"{packed.checkpoint.locate(name + '.qweight')}, layer {name!r}"
    try:
        canonical = reorder.unpack(spec, packed.tensors(name), where)
        check_tables(spec, canonical, where)
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    return canonical


def _bnb_tensors(
    packed: PackedFolder, layer: bnb_keys.BnbLayer, outputs: dict[str, Stored]
) -> Iterator[tuple[str, Tensor]]:
    canonical = _canonical(packed, layer.name, layer.spec)
    if layer.nested_offset is not None:
        recorded = torch.tensor(layer.nested_offset, dtype=torch.float32)
        if not torch.equal(recorded, canonical["nested_offset"]):
            raise CheckpointError(
                f"{packed.checkpoint.locate(layer.name + '.nested_offset')} of layer {layer.name!r} is "
                f"{canonical['nested_offset'].item()!r}, the source had {recorded.item()!r}; {_CHANGED}"
            )
    for key, tensor in bnb_keys.stored_tensors(layer, canonical):
        if key in outputs:
            dtype, shape, _ = outputs[key]
            try:
                yield key, bnb_keys.as_stored(layer, key, tensor, dtype, shape)
            except (RuntimeError, ValueError) as error:
                raise CheckpointError(f"{packed.folder / SOURCE_FILE}: key {key!r}: {error}; {_CHANGED}") from error


def _dequantized(packed: PackedFolder, name: str, dtype: torch.dtype, transposed: bool) -> Iterator[tuple[str, Tensor]]:
    spec = packed.known_spec(name)
    weight = reference.dequantize(spec, _canonical(packed, name, spec), dtype)
    yield name + ".weight", weight.T if transposed else weight


def _synthesized(packed: PackedFolder, dequantize: str | None, shard_bytes: int) -> _Output:
    """A new checkpoint of the same values: bitsandbytes' keys, or plain weights with `dequantize`."""
    records = {} if packed.source is None else packed.source.layers
    specs = {name: packed.known_spec(name) for name in packed.layers if not records.get(name, {}).get("untied")}
    four_bit = any(isinstance(spec, FourBitSpec) for spec in specs.values())
    model_dtype = _PLAIN_DTYPES.get(str(dequantize or packed.config.get(_dtype_field(packed.config))), torch.bfloat16)
    units, kept, plain = [], [], []
    for name, spec in specs.items():
        dtype = _PLAIN_DTYPES.get(records.get(name, {}).get("dtype", ""), model_dtype)
        if dequantize is None and _fits_bnb(spec, four_bit):
            layer = bnb_keys.synthesized(name, spec, packed.nested_offset(name), dtype)
            outputs = {key: stored(*where) for key, where in bnb_keys.stored_layout(layer).items()}
            units.append(Unit(name, outputs, functools.partial(_bnb_tensors, packed, layer, outputs)))
            kept.append(spec)
            continue
        dtype = model_dtype if dequantize else dtype
        transposed = bool(records.get(name, {}).get("transposed"))
        shape = (spec.k, spec.n) if transposed else (spec.n, spec.k)
        outputs = {name + ".weight": stored(DTYPE_NAMES[dtype], shape)}
        units.append(Unit(name, outputs, functools.partial(_dequantized, packed, name, dtype, transposed)))
        plain.append(records.get(name, {}).get("module", name))
    units += [copied(packed.checkpoint, key) for key in packed.checkpoint if not packed.is_packed_key(key)]
    config = None
    if kept:
        config = bnb_keys.quantization_config(kept, [*packed.rules.not_converted, *plain], model_dtype)
    output = _Output(plan_shards(units, shard_bytes, {"format": "pt"}), config, exact=False)
    if plain and dequantize is None:
        output.notes.append(
            f"{len(plain)} layers have no form beside {'4' if four_bit else '8'}-bit ones in one bitsandbytes "
            f"checkpoint and are written dequantized ({plain[0]}, ...)"
        )
    return output


def _fits_bnb(spec: WeightSpec, four_bit: bool) -> bool:
    """Whether bitsandbytes can hold this weight in a checkpoint of 4-bit (or else 8-bit) layers."""
    return bitsandbytes_has(spec) and isinstance(spec, FourBitSpec) == four_bit


def _dtype_field(config: dict[str, Any]) -> str:
    return "torch_dtype" if "torch_dtype" in config else "dtype"


def _config(packed: PackedFolder, output: _Output, dequantize: str | None) -> dict[str, Any]:
    """config.json as it was before pack, with the quantization_config of what is written now."""
    config = dict(packed.config)
    for key, value in (packed.source.config_changes if packed.source else {}).items():
        config[key] = value
        if value is None:
            del config[key]
    if output.quantization_config is None:
        del config["quantization_config"]
    else:
        config["quantization_config"] = output.quantization_config
    if dequantize is not None:
        config[_dtype_field(config)] = dequantize
    return config
