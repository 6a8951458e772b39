"""A packed folder: its quantization_config, its keys, and nf4linear_source.json, all checked before they are used."""

from __future__ import annotations

import fnmatch
import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from ..formats import FORMAT_VERSION, PACKED_NAMES, WeightSpec, check_config_entry, spec_from_config, table_fault
from ..version import installed_version
from .shards import DTYPE_NAMES, Checkpoint, CheckpointError, read_json

QUANT_METHOD = "nf4linear"
SOURCE_FILE = "nf4linear_source.json"
VERSION_KEY = "nf4linear_format_version"
_WITHOUT_IT = "remove that file and unpack with --synthesize, which can do without it"
METADATA = {"format": "pt", VERSION_KEY: str(FORMAT_VERSION)}
# Names that parameters of other modules have too: alone they are no sign of a packed layer.
_COMMON_NAMES = frozenset({"scale", "code"})


@dataclass(frozen=True)
class ModuleRules:
    """Which format each layer has: `modules` and `modules_to_not_convert` of a quantization_config.

    `where` is the file they come from, for messages.
    """

    modules: Mapping[str, Mapping[str, Any]]
    not_converted: tuple[str, ...] = ()
    where: str = "quantization_config"

    def check_entries(self) -> None:
        """Raise CheckpointError naming the key of an entry that this version cannot read."""
        for key, entry in self.modules.items():
            try:
                check_config_entry(entry)
            except (ValueError, TypeError) as error:
                raise CheckpointError(f"{self.where}: modules[{key!r}]: {error}") from error

    def spec(self, name: str, entry: Mapping[str, Any], n: int, k: int) -> WeightSpec:
        """The spec of layer `name`, a weight [n, k], with `entry`. Raises CheckpointError if they do not fit."""
        try:
            return spec_from_config(entry, n, k)
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{self.where}: layer {name!r}: {error}") from error

    def entry(self, name: str) -> Mapping[str, Any] | None:
        """The entry of layer `name`: its exact name, else the longest glob that matches, else "default"."""
        if name in self.modules:
            return self.modules[name]
        glob = next((key for key in self._globs if fnmatch.fnmatchcase(name, key)), "default")
        return self.modules.get(glob)

    @functools.cached_property
    def _globs(self) -> tuple[str, ...]:
        """Keys that can match another name than their own, the longest first: most keys of a large model cannot."""
        return tuple(sorted((key for key in self.modules if set(key) & set("*?[")), key=len, reverse=True))


def parse_config(config: Mapping[str, Any], where: str) -> ModuleRules:
    """Rules of a config.json's quantization_config; raises CheckpointError for anything this version cannot read."""
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict) or quantization.get("quant_method") != QUANT_METHOD:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise CheckpointError(
            f"{where}: quant_method is {method!r}, expected {QUANT_METHOD!r}; pack the checkpoint first"
        )
    version = quantization.get("format_version")
    if type(version) is not int or version != FORMAT_VERSION:
        raise CheckpointError(
            f"{where}: format_version is {version!r}; this version of nf4linear reads {FORMAT_VERSION}. "
            "Update nf4linear, or pack the checkpoint again"
        )
    modules = quantization.get("modules")
    if not isinstance(modules, dict) or not all(isinstance(entry, dict) for entry in modules.values()):
        raise CheckpointError(f"{where}: quantization_config.modules must map names to formats; got {modules!r}")
    skipped = quantization.get("modules_to_not_convert") or []
    if not isinstance(skipped, list) or not all(isinstance(name, str) for name in skipped):
        raise CheckpointError(f"{where}: modules_to_not_convert must be a list of names; got {skipped!r}")
    return ModuleRules(modules, tuple(skipped), where)


def make_config(specs: Mapping[str, WeightSpec], not_converted: Sequence[str]) -> dict[str, Any]:
    """quantization_config for layers with these specs: the commonest format is the default, the others are named."""
    entries = {name: spec.to_config() for name, spec in specs.items()}
    counts = Counter(tuple(entry.items()) for entry in entries.values())
    default = dict(max(counts, key=counts.__getitem__, default=()))
    return {
        "quant_method": QUANT_METHOD,
        "format_version": FORMAT_VERSION,
        "plugin_version": installed_version(),
        "modules": {"default": default} | {name: entry for name, entry in entries.items() if entry != default},
        "modules_to_not_convert": list(not_converted),
    }


@dataclass(frozen=True)
class SourceRecord:
    """nf4linear_source.json: what only unpack needs.

    `files` lists the source's safetensors files: {"name", "metadata", "tensors": [[key, dtype, shape], ...]} in the
    order of their bytes; `index` is the text of its index file; `config_changes` the config.json fields that pack
    changed, with their old values (None: the field was absent).
    """

    source_format: str  # "bitsandbytes" or "plain"
    quantization_config: dict[str, Any] | None
    index: str | None
    files: list[dict[str, Any]]
    layers: dict[str, dict[str, Any]]
    config_changes: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"format_version": FORMAT_VERSION, **self.__dict__}

    @classmethod
    def read(cls, path: Path) -> SourceRecord | None:
        """None if the file is not there; raises CheckpointError if it is not what pack wrote."""
        if not path.is_file():
            return None
        value = read_json(path)
        if value.pop("format_version", None) != FORMAT_VERSION:
            raise CheckpointError(f"{path}: unknown format_version; update nf4linear, or {_WITHOUT_IT}")
        try:
            record = cls(**value)
            for layer in record.layers.values():
                if type(layer["n"]) is not int or type(layer["k"]) is not int:
                    raise TypeError("n and k must be integers")
            for file in record.files:
                if Path(file["name"]).name != file["name"]:
                    raise ValueError(f"file name {file['name']!r} leaves the folder")
                for key, dtype, shape in file["tensors"]:
                    if not (isinstance(key, str) and isinstance(dtype, str) and all(type(s) is int for s in shape)):
                        raise TypeError("tensors must be [key, dtype, shape]")
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{path}: damaged ({error}); {_WITHOUT_IT}") from error
        return record


class PackedFolder:
    """A packed checkpoint opened for reading; use as a context manager.

    `shapes` gives (out_features, in_features) of each layer, and nf4linear_source.json is not read then; without it
    they come from that file, and layers it does not know have an unknown spec.
    """

    def __init__(
        self,
        folder: Path,
        shapes: Mapping[str, tuple[int, int]] | None = None,
        files: Sequence[str] | None = None,
    ) -> None:
        self.folder = folder
        self.config = read_json(folder / "config.json")
        self.rules = parse_config(self.config, str(folder / "config.json"))
        self.source = SourceRecord.read(folder / SOURCE_FILE) if shapes is None else None
        recorded = {} if self.source is None else self.source.layers
        self._shapes = dict(shapes) if shapes is not None else {n: (r["n"], r["k"]) for n, r in recorded.items()}
        self.checkpoint = Checkpoint(folder, files)
        self.layers = tuple(key.removesuffix(".qweight") for key in self.checkpoint if key.endswith(".qweight"))
        self._layer_set = frozenset(self.layers)

    def __enter__(self) -> PackedFolder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.checkpoint.__exit__(*exc)

    def spec(self, name: str) -> WeightSpec | None:
        """The spec of a layer, None if its shape is not known. Raises CheckpointError if its entry is not readable."""
        entry = self.rules.entry(name)
        if entry is None:
            raise CheckpointError(f"{self.rules.where}: no format for layer {name!r} and no default")
        return self.rules.spec(name, entry, *self._shapes[name]) if name in self._shapes else None

    def known_spec(self, name: str) -> WeightSpec:
        """The spec of a layer; raises CheckpointError if nothing says what shape it has."""
        spec = self.spec(name)
        if spec is None or name not in self._layer_set:
            raise CheckpointError(f"{self.folder}: layer {name!r} is in only one of the weight files and {SOURCE_FILE}")
        return spec

    def nested_offset(self, name: str) -> float | None:
        key = name + ".nested_offset"
        return self.checkpoint.tensor(key).item() if key in self.checkpoint else None

    def is_packed_key(self, key: str) -> bool:
        name, _, part = key.rpartition(".")
        return part in PACKED_NAMES and name in self._layer_set

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Packed tensors of a layer, to be checked by reorder.unpack."""
        prefix = name + "."
        keys = (prefix + part for part in PACKED_NAMES)
        return {key.removeprefix(prefix): self.checkpoint.tensor(key) for key in keys if key in self.checkpoint}

    def check(self) -> None:
        """Raise CheckpointError with the first of `problems()`."""
        problems = list(self.problems())
        if problems:
            more = f"\n(and {len(problems) - 5} more)" if len(problems) > 5 else ""
            raise CheckpointError("\n".join(problems[:5]) + more)

    def problems(self) -> Iterator[str]:
        """What is wrong with the headers and the values of scales and tables, a message each; reads no codes."""
        for shard in self.checkpoint.shards:
            version = (shard.metadata or {}).get(VERSION_KEY, str(FORMAT_VERSION))
            if version != str(FORMAT_VERSION):
                yield f"{shard.path}: format version {version!r}; this version of nf4linear reads {FORMAT_VERSION}"
        if not self.layers:
            yield f"{self.folder}: config.json says {QUANT_METHOD}, but no file holds a qweight"
        expected_keys: set[str] = set()
        for name in self.layers:
            try:
                spec = self.spec(name)
            except CheckpointError as error:
                yield str(error)
                continue
            if spec is not None:
                expected_keys |= {f"{name}.{part}" for part in spec.packed_tensors()}
                yield from self._layer_problems(name, spec)
        yield from self._surplus(expected_keys)
        for name in sorted(set(self._shapes) - set(self.layers)):
            if self.rules.entry(name) is not None and self.source and name in self.source.layers:
                yield f"{self.folder}: layer {name!r} lacks {name + '.qweight'!r}; the checkpoint is incomplete"

    def _layer_problems(self, name: str, spec: WeightSpec) -> Iterator[str]:
        for part, expected in spec.packed_tensors().items():
            key = f"{name}.{part}"
            if key not in self.checkpoint:
                yield f"{self.folder}: layer {name!r} lacks {key!r}; the checkpoint is incomplete"
                continue
            entry = self.checkpoint.entry(key)
            if (entry.dtype, entry.shape) != (DTYPE_NAMES[expected.dtype], expected.shape):
                yield (
                    f"{self.checkpoint.locate(key)} is {entry.dtype} {list(entry.shape)}, "
                    f"expected {DTYPE_NAMES[expected.dtype]} {list(expected.shape)}"
                )
            elif expected.dtype.is_floating_point and (fault := table_fault(spec, part, self.checkpoint.tensor(key))):
                yield f"{self.checkpoint.locate(key)} of layer {name!r} {fault}"

    def _surplus(self, expected: set[str]) -> Iterator[str]:
        packed = self._layer_set
        for key in self.checkpoint:
            name, _, part = key.rpartition(".")
            if name in packed and part == "weight":
                yield f"{self.checkpoint.locate(key)} is a plain weight of layer {name!r}, which is packed"
            elif name in packed and name in self._shapes and part in PACKED_NAMES and key not in expected:
                yield f"{self.checkpoint.locate(key)} does not belong to the format of layer {name!r}"
            elif name not in packed and part in PACKED_NAMES - _COMMON_NAMES:
                yield f"{self.checkpoint.locate(key)} belongs to layer {name!r}, which has no qweight"


def validate_packed(
    folder: str | Path, shapes: Mapping[str, tuple[int, int]] | None = None, files: Sequence[str] | None = None
) -> None:
    """Check the headers, scales and tables of a packed folder before anything is loaded from it.

    `shapes`, if given, maps layer names to (out_features, in_features) as the model has them; otherwise
    nf4linear_source.json serves; `files`, if given, names the weight files.
    Raises CheckpointError naming file, layer and key of the first problems found.
    """
    with PackedFolder(Path(folder), shapes, files) as packed:
        packed.check()
