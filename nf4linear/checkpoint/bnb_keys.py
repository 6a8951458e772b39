"""bitsandbytes' checkpoint: which keys make up a quantized layer, read into canonical tensors and written back.

The only file that knows these names. `P` is the full name of a Linear layer:

    4 bit   P.weight                      two codes a byte, flat, under any quant_storage dtype
            P.weight.absmax               block scales: float, or uint8 codes with double quantization
            P.weight.quant_map            the 16 centroids
            P.weight.nested_absmax, P.weight.nested_quant_map      second level, double quantization only
            P.weight.quant_state.bitsandbytes__{nf4,fp4}           JSON text as bytes: shape, blocksize, offset, ...
    8 bit   P.weight int8 [n, k], P.SCB [n] raw row maxima, P.weight_format (0 = row-major; absent in some files)
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..formats import FORMATS as WEIGHT_FORMATS
from ..formats import NESTED_BLOCKSIZE, CodebookFormat, EightBitSpec, FourBitSpec, WeightSpec, dtype_name
from .shards import DTYPE_NAMES, FLOAT_DTYPE_NAMES, TORCH_DTYPES, Checkpoint, CheckpointError

_STATE = ".weight.quant_state.bitsandbytes__"
# Canonical tensor -> key suffix after the layer name.
_STATISTICS = {"absmax": ".weight.absmax", "code": ".weight.quant_map"}
_NESTED = {"nested_absmax": ".weight.nested_absmax", "nested_code": ".weight.nested_quant_map"}
_SCALE, _WEIGHT_FORMAT = ".SCB", ".weight_format"
_MARKS = (*_STATISTICS.values(), *_NESTED.values(), _SCALE, _WEIGHT_FORMAT)


@dataclass(frozen=True)
class BnbLayer:
    """A quantized layer of a bitsandbytes checkpoint; `keys` are its keys there, `quant_state` the JSON text."""

    name: str
    spec: WeightSpec
    keys: tuple[str, ...]
    quant_state: str | None = None
    nested_offset: float | None = None

    @property
    def weight_key(self) -> str:
        return self.name + ".weight"


def find_layers(checkpoint: Checkpoint) -> dict[str, BnbLayer]:
    """The quantized layers by name, every statistic checked for presence, dtype and shape (headers only).

    Raises CheckpointError naming file, layer and key.
    """
    layers: dict[str, BnbLayer] = {}
    for key in checkpoint:
        if ".quant_state." in key:
            layer = _four_bit_layer(checkpoint, key)
        elif key.endswith(_SCALE):
            layer = _eight_bit_layer(checkpoint, key.removesuffix(_SCALE))
        else:
            continue
        if layer.name in layers:
            raise CheckpointError(f"{checkpoint.locate(key)}: layer {layer.name!r} has two sets of statistics")
        layers[layer.name] = layer
    claimed = {key for layer in layers.values() for key in layer.keys}
    for key in checkpoint:
        if key not in claimed and key.endswith(_MARKS):
            suffix = next(mark for mark in _MARKS if key.endswith(mark))
            raise CheckpointError(
                f"{checkpoint.locate(key)} is a quantization statistic of layer {key.removesuffix(suffix)!r}, which "
                "has no use for it or lacks the rest (quant_state, SCB or weight); the checkpoint is incomplete"
            )
    return layers


def _four_bit_layer(checkpoint: Checkpoint, state_key: str) -> BnbLayer:
    where = checkpoint.locate(state_key)
    name, found, kind = state_key.partition(_STATE)
    if not found:
        raise CheckpointError(f"{where} is no 4-bit state of a '.weight'; only Linear layers can be packed")
    if not isinstance(WEIGHT_FORMATS.get(kind), CodebookFormat):
        raise CheckpointError(f"{where}: unknown quant_type {kind!r}; this version reads nf4 and fp4")
    entry = checkpoint.entry(state_key)
    if entry.dtype != "U8" or len(entry.shape) != 1 or entry.nbytes > 65536:
        raise CheckpointError(f"{where} is {entry.dtype} {list(entry.shape)}, expected a short U8 vector of JSON text")
    text, state = _parse_state(b"".join(checkpoint.chunks(state_key)), where)
    if state.get("quant_type") != kind:
        raise CheckpointError(f"{where}: its JSON says quant_type {state.get('quant_type')!r}, its key says {kind!r}")
    shape = state.get("shape")
    if not (isinstance(shape, list) and len(shape) == 2 and all(type(size) is int for size in shape)):
        raise CheckpointError(f"{where}: shape is {shape!r}, expected [out_features, in_features] of a Linear layer")
    double_quant = any(field.startswith("nested_") for field in state)
    try:
        spec = FourBitSpec(kind, *shape, blocksize=state.get("blocksize"), double_quant=double_quant)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{where}: {error}") from error
    keys = [name + ".weight", state_key, *(name + suffix for suffix in _STATISTICS.values())]
    if double_quant:
        keys += [name + suffix for suffix in _NESTED.values()]
    _check_nested(state, where)
    layer = BnbLayer(name, spec, tuple(keys), text, float(state["nested_offset"]) if double_quant else None)
    _check_four_bit_headers(checkpoint, layer)
    return layer


def _parse_state(data: bytes, where: str) -> tuple[str, dict[str, Any]]:
    try:
        text = data.decode("utf-8")
        state = json.loads(text)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{where}: not JSON text ({error}); the file is damaged") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{where}: expected a JSON object, got {type(state).__name__}")
    return text, state


def _check_nested(state: dict[str, Any], where: str) -> None:
    if not any(field.startswith("nested_") for field in state):
        return
    if state.get("nested_blocksize") != NESTED_BLOCKSIZE:
        raise CheckpointError(
            f"{where}: nested_blocksize is {state.get('nested_blocksize')!r}; this version reads {NESTED_BLOCKSIZE}"
        )
    offset = state.get("nested_offset")
    largest = torch.finfo(torch.float32).max
    if isinstance(offset, bool) or not isinstance(offset, int | float) or not abs(offset) <= largest:
        raise CheckpointError(f"{where}: nested_offset is {offset!r}, expected a finite float32 number")


def _check_four_bit_headers(checkpoint: Checkpoint, layer: BnbLayer) -> None:
    spec = layer.spec
    assert isinstance(spec, FourBitSpec)
    canonical = spec.canonical_tensors()
    _check_entry(checkpoint, layer, ".weight", tuple(TORCH_DTYPES), None)
    stored, wanted = checkpoint.entry(layer.weight_key).nbytes, canonical["codes"].nbytes()
    if stored != wanted:
        raise CheckpointError(
            f"{checkpoint.locate(layer.weight_key)} of layer {layer.name!r} holds {stored} bytes; "
            f"{spec.n} x {spec.k} 4-bit codes take {wanted}; the weight is cut short or has another layer's quant_state"
        )
    absmax_dtypes = ("U8",) if spec.double_quant else FLOAT_DTYPE_NAMES
    _check_entry(checkpoint, layer, _STATISTICS["absmax"], absmax_dtypes, canonical["absmax"].shape)
    _check_entry(checkpoint, layer, _STATISTICS["code"], FLOAT_DTYPE_NAMES, canonical["code"].shape)
    if spec.double_quant:
        for role, suffix in _NESTED.items():
            _check_entry(checkpoint, layer, suffix, FLOAT_DTYPE_NAMES, canonical[role].shape)


def _eight_bit_layer(checkpoint: Checkpoint, name: str) -> BnbLayer:
    keys = [name + ".weight", name + _SCALE]
    placeholder = BnbLayer(name, EightBitSpec("w8_s8", 1, 1), ())
    _check_entry(checkpoint, placeholder, ".weight", ("I8",), None)
    shape = checkpoint.entry(name + ".weight").shape
    if len(shape) != 2 or 0 in shape:
        raise CheckpointError(f"{checkpoint.locate(name + '.weight')}: shape is {list(shape)}, expected two dimensions")
    _check_entry(checkpoint, placeholder, _SCALE, FLOAT_DTYPE_NAMES, shape[:1])
    if name + _WEIGHT_FORMAT in checkpoint:
        keys.append(name + _WEIGHT_FORMAT)
        _check_entry(checkpoint, placeholder, _WEIGHT_FORMAT, ("U8",), ())
        value = int(checkpoint.tensor(name + _WEIGHT_FORMAT))
        if value != 0:
            raise CheckpointError(
                f"{checkpoint.locate(name + _WEIGHT_FORMAT)} of layer {name!r} is {value}; only row-major int8 "
                "weights (0) can be read; save the model again with a current bitsandbytes"
            )
    return BnbLayer(name, EightBitSpec("w8_s8", *shape), tuple(keys))


def _check_entry(
    checkpoint: Checkpoint, layer: BnbLayer, suffix: str, dtypes: tuple[str, ...], shape: tuple[int, ...] | None
) -> None:
    key = layer.name + suffix
    if key not in checkpoint:
        raise CheckpointError(f"{checkpoint.folder}: layer {layer.name!r} lacks {key!r}; the checkpoint is incomplete")
    entry = checkpoint.entry(key)
    if entry.dtype not in dtypes or (shape is not None and entry.shape != shape):
        wanted = f"{' or '.join(dtypes)}{'' if shape is None else f' {list(shape)}'}"
        raise CheckpointError(
            f"{checkpoint.locate(key)} of layer {layer.name!r} is {entry.dtype} {list(entry.shape)}, expected {wanted}"
        )


def read_canonical(checkpoint: Checkpoint, layer: BnbLayer) -> dict[str, Tensor]:
    """Canonical tensors of `layer` (see `spec.canonical_tensors()`), values checked. Raises CheckpointError."""
    if isinstance(layer.spec, EightBitSpec):
        scale = _finite(checkpoint, layer.name + _SCALE)
        return {"codes": checkpoint.tensor(layer.weight_key), layer.spec.scales_name: scale}
    canonical = {"codes": checkpoint.tensor(layer.weight_key).reshape(-1).view(torch.uint8)}
    if layer.spec.double_quant:
        canonical["absmax"] = checkpoint.tensor(layer.name + _STATISTICS["absmax"])
        canonical |= {role: _finite(checkpoint, layer.name + suffix) for role, suffix in _NESTED.items()}
        canonical["nested_offset"] = torch.tensor(layer.nested_offset, dtype=torch.float32)
    else:
        canonical["absmax"] = _finite(checkpoint, layer.name + _STATISTICS["absmax"])
    code_key = layer.name + _STATISTICS["code"]
    canonical["code"] = checkpoint.tensor(code_key).to(torch.float32)
    if not layer.spec.codebook.matches(canonical["code"]):
        raise CheckpointError(
            f"{checkpoint.locate(code_key)} of layer {layer.name!r} is not the {layer.spec.format} table; "
            "the codes would mean other values"
        )
    return canonical


def _finite(checkpoint: Checkpoint, key: str) -> Tensor:
    tensor = checkpoint.tensor(key).to(torch.float32)
    if not torch.isfinite(tensor).all():
        raise CheckpointError(
            f"{checkpoint.locate(key)} holds NaN or infinity; quantize that layer again from its 16-bit weights"
        )
    return tensor


def stored_tensors(layer: BnbLayer, canonical: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The (key, tensor) pairs of `layer` in the canonical dtypes; `as_stored` gives each the form it has in a file."""
    if isinstance(layer.spec, EightBitSpec):
        yield layer.weight_key, canonical["codes"]
        yield layer.name + _SCALE, canonical[layer.spec.scales_name]
        if layer.name + _WEIGHT_FORMAT in layer.keys:
            yield layer.name + _WEIGHT_FORMAT, torch.tensor(0, dtype=torch.uint8)
        return
    yield layer.weight_key, canonical["codes"].view(-1, 1)
    for role, suffix in (_STATISTICS | (_NESTED if layer.spec.double_quant else {})).items():
        yield layer.name + suffix, canonical[role]
    text = layer.quant_state.encode("utf-8")
    yield f"{layer.name}{_STATE}{layer.spec.format}", torch.frombuffer(bytearray(text), dtype=torch.uint8)


def as_stored(layer: BnbLayer, key: str, tensor: Tensor, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """`tensor` as the file had it: codes and JSON by byte view, statistics rounded back to the dtype they came from.

    Raises ValueError or RuntimeError for a dtype or shape that this tensor never had.
    """
    wanted = TORCH_DTYPES[dtype]
    if key == layer.weight_key:
        return tensor.reshape(-1).view(torch.uint8).view(wanted).view(shape)
    rounded = tensor.to(wanted)
    kept = torch.equal(rounded.to(tensor.dtype), tensor)
    if not kept or wanted.is_floating_point != tensor.is_floating_point() or tensor.shape != shape:
        raise ValueError(f"{tensor.dtype} {list(tensor.shape)} cannot have been {dtype} {list(shape)}")
    return rounded


def synthesized(name: str, spec: WeightSpec, nested_offset: float | None, dtype: torch.dtype) -> BnbLayer:
    """The layer as bitsandbytes would save it, for a weight that was `dtype` before it was quantized."""
    if isinstance(spec, EightBitSpec):
        return BnbLayer(name, spec, (name + ".weight", name + _SCALE, name + _WEIGHT_FORMAT))
    state: dict[str, Any] = {
        "quant_type": spec.format,
        "blocksize": spec.blocksize,
        "dtype": dtype_name(dtype),
        "shape": [spec.n, spec.k],
    }
    keys = [name + ".weight", f"{name}{_STATE}{spec.format}", *(name + suffix for suffix in _STATISTICS.values())]
    if spec.double_quant:
        state |= {"nested_blocksize": NESTED_BLOCKSIZE, "nested_dtype": "float32", "nested_offset": nested_offset}
        keys += [name + suffix for suffix in _NESTED.values()]
    return BnbLayer(name, spec, tuple(keys), json.dumps(state), nested_offset)


def stored_layout(layer: BnbLayer) -> dict[str, tuple[str, tuple[int, ...]]]:
    """(dtype name, shape) of every key of a synthesized layer, from shapes alone."""
    canonical = {
        role: torch.empty(spec.shape, dtype=spec.dtype, device="meta")
        for role, spec in layer.spec.canonical_tensors().items()
    }
    return {key: (DTYPE_NAMES[t.dtype], tuple(t.shape)) for key, t in stored_tensors(layer, canonical)}


def quantization_config(specs: list[WeightSpec], skipped: list[str], compute_dtype: torch.dtype) -> dict[str, Any]:
    """The quantization_config transformers writes for layers like `specs` (all 4-bit or all 8-bit)."""
    four = next((spec for spec in specs if isinstance(spec, FourBitSpec)), None)
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": four is not None,
        "load_in_8bit": four is None,
        "bnb_4bit_compute_dtype": dtype_name(compute_dtype),
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_quant_type": four.format if four else "nf4",
        "bnb_4bit_use_double_quant": bool(four and four.double_quant),
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_skip_modules": skipped,
        "llm_int8_threshold": 6.0,
    }


def record(checkpoint: Checkpoint, layer: BnbLayer) -> dict[str, Any]:
    """What only unpack needs to know of a layer, as JSON: see nf4linear_source.json in the format description."""
    fields: dict[str, Any] = {"n": layer.spec.n, "k": layer.spec.k, "layout": layer.spec.layout}
    if isinstance(layer.spec, EightBitSpec):
        return fields | {"weight_format": 0 if layer.name + _WEIGHT_FORMAT in layer.keys else None}
    return fields | {
        "quant_state": layer.quant_state,
        "quant_storage": dtype_name(checkpoint.entry(layer.weight_key).torch_dtype),
        "quant_map_dtype": dtype_name(checkpoint.entry(layer.name + _STATISTICS["code"]).torch_dtype),
    }


def from_record(name: str, spec: WeightSpec, fields: dict[str, Any]) -> BnbLayer:
    """The layer that `record` described. Raises CheckpointError when its quant_state does not fit `spec`."""
    where = f"nf4linear_source.json: layer {name!r}"
    if isinstance(spec, EightBitSpec):
        keys = [name + ".weight", name + _SCALE]
        return BnbLayer(name, spec, tuple(keys + [name + _WEIGHT_FORMAT] * (fields.get("weight_format") is not None)))
    text, state = _parse_state(str(fields.get("quant_state")).encode(), where)
    if state.get("shape") != [spec.n, spec.k] or state.get("quant_type") != spec.format:
        raise CheckpointError(f"{where}: quant_state does not describe a {spec.format} weight of {spec.n} x {spec.k}")
    _check_nested(state, where)
    offset = state.get("nested_offset")
    if (offset is not None) != spec.double_quant:
        raise CheckpointError(f"{where}: quant_state and config.json disagree about double quantization")
    layer = synthesized(name, spec, offset, torch.float32)
    return BnbLayer(name, spec, layer.keys, text, offset)


def nested_dtype_is_narrow(layer: BnbLayer) -> bool:
    """Whether the file names a 16-bit nested_dtype (saved after a CPU forward): some bitsandbytes paths round more."""
    if layer.quant_state is None or layer.nested_offset is None:
        return False
    return json.loads(layer.quant_state).get("nested_dtype") not in (None, "float32")
