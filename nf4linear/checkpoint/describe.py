"""describe: what a checkpoint folder holds, from its headers, and whether its scales and tables can be."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..cards import architecture_names, count_formats
from ..formats import WeightSpec
from ..hub import no_folder
from . import bnb_keys
from .packed import QUANT_METHOD, PackedFolder
from .shards import Checkpoint, CheckpointError, read_json
from .writer import JOB_FILE


@dataclass
class Description:
    """A folder in figures: `kind` is "packed", "bitsandbytes" or "plain"; sizes are bytes of tensors.

    `bits_per_weight` counts codes and all scales of the quantized layers; None when nothing is quantized.
    `problems` are messages; an empty list says that headers, index and config.json fit together
    and that the scales and tables of a packed checkpoint are sound.
    """

    path: str
    kind: str
    architecture: str
    format_version: int | None = None
    formats: dict[str, int] = field(default_factory=dict)
    quantized_weights: int = 0
    bits_per_weight: float | None = None
    bytes_codes: int = 0
    bytes_scales: int = 0
    bytes_other: int = 0
    skipped: list[str] = field(default_factory=list)
    files: dict[str, int] = field(default_factory=dict)
    restores_source: bool | None = None
    problems: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def describe(path: str | Path) -> Description:
    """Describe a folder with a packed, bitsandbytes or plain checkpoint. Of weights, only packed scales are read.

    Raises CheckpointError when the folder cannot be read at all; smaller faults are `problems` of the result.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise CheckpointError(no_folder(path, "the folder of a model"))
    if (folder / JOB_FILE).is_file() and folder.name.startswith("."):
        raise CheckpointError(f"{path}: is an unfinished run; start its command again to finish it")
    if not (folder / "config.json").exists():
        inside = [str(Path(path) / each.parent.name) for each in sorted(folder.glob("*/config.json"))]
        hint = f"; there are models in {' and '.join(inside[:4])}" if inside else ""
        raise CheckpointError(f"{path}: holds no config.json, so it is not the folder of a model{hint}")
    config = read_json(folder / "config.json")
    quantization = config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    result = Description(str(folder), "plain", architecture_names(config))
    if method == QUANT_METHOD:
        _describe_packed(folder, config, result)
    else:
        _describe_source(folder, result)
    return result


def _describe_packed(folder: Path, config: dict[str, Any], result: Description) -> None:
    result.kind = "packed"
    with PackedFolder(folder) as packed:
        result.format_version = config["quantization_config"]["format_version"]
        result.skipped = list(packed.rules.not_converted)
        result.restores_source = packed.source is not None and packed.source.source_format == "bitsandbytes"
        result.problems += packed.problems()
        specs, unknown = {}, 0
        for name in packed.layers:
            try:
                spec = packed.spec(name)
            except CheckpointError:  # among the problems already
                spec = None
            if spec is None:
                unknown += 1
            else:
                specs[name] = spec
        scales = {key for key in packed.checkpoint if packed.is_packed_key(key) and not key.endswith(".qweight")}
        _count(packed.checkpoint, specs, {f"{name}.qweight" for name in packed.layers}, scales, result)
        if unknown:
            result.formats["shape not recorded"] = unknown


def _describe_source(folder: Path, result: Description) -> None:
    with Checkpoint(folder) as checkpoint:
        try:
            layers = bnb_keys.find_layers(checkpoint)
        except CheckpointError as error:
            result.kind = "bitsandbytes"
            result.problems.append(str(error))
            layers = {}
        if layers:
            result.kind = "bitsandbytes"
        codes = {layer.weight_key for layer in layers.values()}
        scales = {key for layer in layers.values() for key in layer.keys} - codes
        _count(checkpoint, {name: layer.spec for name, layer in layers.items()}, codes, scales, result)


def _count(
    checkpoint: Checkpoint, specs: dict[str, WeightSpec], codes: set[str], scales: set[str], result: Description
) -> None:
    result.formats = count_formats(specs)
    result.bytes_codes = sum(checkpoint.entry(key).nbytes for key in codes)
    result.bytes_scales = sum(checkpoint.entry(key).nbytes for key in scales)
    result.bytes_other = checkpoint.total_bytes() - result.bytes_codes - result.bytes_scales
    result.quantized_weights = sum(spec.n * spec.k for spec in specs.values())
    if len(specs) == len(codes) and specs:
        result.bits_per_weight = 8 * (result.bytes_codes + result.bytes_scales) / result.quantized_weights
    result.files = {shard.path.name: shard.path.stat().st_size for shard in checkpoint.shards}
