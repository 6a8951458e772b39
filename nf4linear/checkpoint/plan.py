"""What pack will write: every layer with its spec and the function that makes its tensors, before any data is read."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .. import reference, reorder
from ..formats import EightBitSpec, WeightSpec, config_entry, dtype_name, spec_from_config
from . import bnb_keys
from .architecture import Architecture, read_architecture
from .packed import QUANT_METHOD
from .shard_plan import Unit, stored
from .shards import DTYPE_NAMES, FLOAT_DTYPE_NAMES, Checkpoint, CheckpointError


@dataclass(frozen=True)
class PackOptions:
    """How plain weights are quantized; a bitsandbytes source is packed as it is and takes none but `lm_head`.

    None means not asked for: format "nf4", blocksize 64, double quantization. `skip` names modules (full names,
    globs or any run of whole dotted parts) that stay in 16 bit besides the default ones. `lm_head` "w8"
    quantizes the output head to 8 bit; a tied head is untied first.
    """

    format: str | None = None
    blocksize: int | None = None
    double_quant: bool | None = None
    skip: tuple[str, ...] = ()
    lm_head: str | None = None

    def __post_init__(self) -> None:
        if self.lm_head not in (None, "w8"):
            raise ValueError(f"lm_head must be 'w8' or left out; got {self.lm_head!r}")
        if self.format == "w8_s8" and (self.blocksize is not None or self.double_quant is not None):
            raise ValueError("w8_s8 has one scale a row; blocksize and double_quant belong to the 4-bit formats")
        self.entry()  # reports an unknown format or an illegal blocksize before any work

    def entry(self) -> dict[str, Any]:
        """The `modules` entry of the quantized layers."""
        double_quant = True if self.double_quant is None else self.double_quant
        return config_entry(self.format or "nf4", 64 if self.blocksize is None else self.blocksize, double_quant)

    @property
    def quantizes(self) -> bool:
        return self.format is not None or self.blocksize is not None or self.double_quant is not None


@dataclass
class Plan:
    """Everything decided before the first byte is written."""

    source_format: str
    specs: dict[str, WeightSpec] = field(default_factory=dict)  # by the layer's name in the checkpoint's keys
    modules: dict[str, str] = field(default_factory=dict)  # the same names -> module name, where that is another
    units: list[Unit] = field(default_factory=list)
    records: dict[str, dict[str, Any]] = field(default_factory=dict)
    replaced: set[str] = field(default_factory=set)  # source keys that live on inside packed layers
    not_converted: list[str] = field(default_factory=list)  # names of modules
    config_changes: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def module_specs(self) -> dict[str, WeightSpec]:
        """Specs by every name a reader may ask for: that of the keys and that of the module."""
        return self.specs | {module: self.specs[name] for name, module in self.modules.items()}

    def add(self, name: str, spec: WeightSpec, record: dict[str, Any], produce: Any) -> None:
        outputs = {
            f"{name}.{part}": stored(DTYPE_NAMES[tensor.dtype], tensor.shape)
            for part, tensor in spec.packed_tensors().items()
        }
        self.specs[name] = spec
        self.records[name] = record
        self.units.append(Unit(name, outputs, produce))


def make_plan(source: Checkpoint, config: dict[str, Any], options: PackOptions) -> Plan:
    """Decide everything about a pack; raises CheckpointError or ValueError for what cannot be packed as asked."""
    quantization = config.get("quantization_config")
    method = quantization.get("quant_method", "bitsandbytes") if isinstance(quantization, dict) else None
    if method == QUANT_METHOD:
        raise CheckpointError(f"{source.folder}: is packed already")
    if method not in (None, "bitsandbytes"):
        raise CheckpointError(
            f"{source.folder}: is quantized with {method!r}; pack reads bitsandbytes and plain 16/32-bit checkpoints"
        )
    layers = bnb_keys.find_layers(source)
    if method is not None and not layers:
        raise CheckpointError(
            f"{source.folder}: config.json says bitsandbytes, but no weight is quantized; "
            "remove its quantization_config to pack it as a plain checkpoint"
        )
    plan = _plan_bnb(source, layers, options) if layers else _plan_plain(source, options)
    if options.lm_head:
        _plan_head(source, config, plan)
    for name, module in plan.modules.items():
        plan.records[name]["module"] = module
    return plan


def _plan_bnb(source: Checkpoint, layers: dict[str, bnb_keys.BnbLayer], options: PackOptions) -> Plan:
    if options.quantizes or options.skip:
        raise ValueError(
            f"{source.folder} is quantized by bitsandbytes already and is packed as it is; "
            "format, blocksize, double_quant and skip are for plain checkpoints"
        )
    plan = Plan("bitsandbytes")
    for name, layer in layers.items():
        plan.add(name, layer.spec, bnb_keys.record(source, layer), functools.partial(_pack_bnb, source, layer))
        plan.replaced |= set(layer.keys)
    _find_unquantized(source, plan)
    narrow = [name for name, layer in layers.items() if bnb_keys.nested_dtype_is_narrow(layer)]
    if narrow:
        plan.notes.append(
            f"{len(narrow)} layers name a 16-bit nested_dtype (the model was saved after a forward on a CPU): "
            "bitsandbytes may round their scales once more than nf4linear, which follows its float32 path"
        )
    return plan


def _find_unquantized(source: Checkpoint, plan: Plan) -> None:
    """Note the linear layers that a bitsandbytes checkpoint left alone, by the architecture or else by the keys."""
    try:
        architecture = read_architecture(source.folder)
    except CheckpointError as error:
        plan.notes.append(f"layers left in 16 bit were told by their keys alone: {error}")
        weights = [key.removesuffix(".weight") for key in source if key.endswith(".weight")]
        two_dimensional = {name for name in weights if len(source.entry(name + ".weight").shape) == 2}
        plan.not_converted = sorted(two_dimensional - set(plan.specs))
        return
    _note_experts(plan, architecture)
    modules = {name: architecture.rename(name) for name in plan.specs}
    plan.modules = {name: module for name, module in modules.items() if module != name}
    if strangers := sorted(set(modules.values()) - set(architecture.shapes)):
        plan.notes.append(
            f"{len(strangers)} quantized layers are no linear layer of the model as this transformers builds it "
            f"(for example {strangers[0]}); they are packed, but loading may not find them"
        )
    plan.not_converted = sorted(set(architecture.shapes) - set(modules.values()))


def _pack_bnb(source: Checkpoint, layer: bnb_keys.BnbLayer) -> Iterator[tuple[str, Tensor]]:
    return _packed_pairs(layer.name, layer.spec, bnb_keys.read_canonical(source, layer))


def _packed_pairs(name: str, spec: WeightSpec, canonical: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for part, tensor in reorder.pack(spec, canonical, f"layer {name!r}").items():
        yield f"{name}.{part}", tensor


def _plan_plain(source: Checkpoint, options: PackOptions) -> Plan:
    plan = Plan("plain")
    architecture = read_architecture(source.folder, options.skip)
    for unmatched in architecture.unmatched:
        parts = {part for name in architecture.modules for part in name.split(".")}
        close = difflib.get_close_matches(unmatched, sorted(parts | architecture.modules), n=3)
        hint = f"; close to it: {', '.join(close)}" if close else ""
        raise ValueError(f"skip: {unmatched!r} names no module of the model{hint}")
    absent, entry = [], options.entry()
    stored_as = _stored_names(source, architecture)
    for module, (n, k) in architecture.shapes.items():
        if module in architecture.skipped or module not in stored_as:
            plan.not_converted.append(module)
            absent += [module] * (module not in architecture.skipped)
            continue
        name = stored_as[module]
        plan.modules |= {name: module} if name != module else {}
        spec = spec_from_config(entry, n, k)
        _plan_quantized(source, plan, name, f"{name}.weight", spec, module in architecture.conv1d)
    if absent:
        plan.notes.append(
            f"{len(absent)} linear layers have no key of their name and stay as they are: {absent[0]}, ..."
        )
    _note_experts(plan, architecture)
    if not plan.specs:
        raise CheckpointError(
            f"{source.folder}: no linear layer to quantize. {'; '.join(plan.notes) or 'All are skipped'}"
        )
    return plan


def _note_experts(plan: Plan, architecture: Architecture) -> None:
    if architecture.expert_parameters:
        plan.notes.append(f"{architecture.expert_parameters:,} parameters in fused expert weights stay as they are")


def _stored_names(source: Checkpoint, architecture: Architecture) -> dict[str, str]:
    """Module name -> the name its weight has in the checkpoint."""
    names = [key.removesuffix(".weight") for key in source if key.endswith(".weight")]
    return {architecture.rename(name): name for name in names}


def _plan_quantized(
    source: Checkpoint, plan: Plan, name: str, key: str, spec: WeightSpec, transposed: bool = False
) -> None:
    entry = source.entry(key)
    shape = (spec.k, spec.n) if transposed else (spec.n, spec.k)
    if entry.dtype not in FLOAT_DTYPE_NAMES or entry.shape != shape:
        raise CheckpointError(
            f"{source.locate(key)} is {entry.dtype} {list(entry.shape)}, expected a float {list(shape)} for the layer "
            f"{name!r} of its config.json"
        )
    dtype = dtype_name(entry.torch_dtype)
    fields = {"n": spec.n, "k": spec.k, "layout": spec.layout, "dtype": dtype}
    if transposed:
        fields["transposed"] = True
    plan.add(name, spec, fields, functools.partial(_quantize, source, name, key, spec, transposed))
    plan.replaced.add(key)


def _quantize(
    source: Checkpoint, name: str, key: str, spec: WeightSpec, transposed: bool
) -> Iterator[tuple[str, Tensor]]:
    weight = source.tensor(key)
    try:
        canonical = reference.quantize(spec, weight.T if transposed else weight)
    except ValueError as error:
        raise CheckpointError(f"{source.locate(key)} of layer {name!r}: {error}") from error
    return _packed_pairs(name, spec, canonical)


def _plan_head(source: Checkpoint, config: dict[str, Any], plan: Plan) -> None:
    """Quantize the output head to 8 bit; of a tied head the embedding stays and the head gets codes of its own."""
    architecture = read_architecture(source.folder)
    head, tied_to = architecture.head, architecture.head_tied_to
    if head is None:
        raise CheckpointError(f"{source.folder}: the model has no linear output head for lm_head='w8'")
    if tied_to is not None and not architecture.head_can_be_untied:
        raise CheckpointError(
            f"{source.folder}: the model always ties its output head to {tied_to}; leave lm_head='w8' out"
        )
    stored_as = _stored_names(source, architecture)
    if head in {plan.modules.get(name, name) for name in plan.specs}:
        raise CheckpointError(f"{source.folder}: the output head {head!r} is quantized already")
    # A tied weight may be saved under either name.
    name = next((stored_as[module] for module in (tied_to, head) if module in stored_as), None)
    if name is None:
        raise CheckpointError(f"{source.folder}: the weight of the output head {head!r} is missing")
    own_name = head if tied_to is not None else name
    spec = EightBitSpec("w8_s8", *architecture.shapes[head])
    _plan_quantized(source, plan, own_name, f"{name}.weight", spec)
    plan.modules |= {own_name: head} if own_name != head else {}
    plan.not_converted = [module for module in plan.not_converted if module != head]
    if tied_to is not None:
        plan.replaced.discard(f"{name}.weight")
        plan.records[own_name]["untied"] = True
        plan.config_changes["tie_word_embeddings"] = config.get("tie_word_embeddings")
        plan.notes.append(f"{head} was tied to {tied_to}; it is now a layer of its own and the config says so")
