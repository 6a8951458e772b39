"""Live bitsandbytes layers: read into canonical tensors, and made of them again, byte for byte.

Layers and models know bitsandbytes' modules through this file alone, as checkpoints know its keys through
checkpoint/bnb_keys.py. It does not import bitsandbytes before a layer is to be made.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from . import reference
from .formats import (
    NESTED_BLOCKSIZE,
    EightBitSpec,
    FourBitSpec,
    WeightSpec,
    bitsandbytes_has,
    check_tables,
    check_tensors,
    dtype_name,
)

if TYPE_CHECKING:
    from bitsandbytes.functional import QuantState
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

_STORAGE_DTYPES = (torch.uint8, torch.int8, torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Origin:
    """What bitsandbytes keeps of a layer beside its tensors, for the way back; dtypes by name, such as "bfloat16"."""

    dtype: str = "float32"  # of the weight before quantization
    quant_storage: str = "uint8"
    nested_dtype: str = "float32"
    code_dtype: str = "float32"
    compute_dtype: str | None = None
    threshold: float = 0.0


@functools.cache
def warn_once(message: str) -> None:
    """Warn once a process: a model has hundreds of layers with the same remark."""
    warnings.warn(message, stacklevel=4)


def layer_bits(module: nn.Module) -> int | None:
    """4 or 8 for a bitsandbytes linear layer, None for anything else; does not import bitsandbytes."""
    names = {cls.__name__ for cls in type(module).__mro__ if cls.__module__.startswith("bitsandbytes.")}
    return 4 if "Linear4bit" in names else 8 if "Linear8bitLt" in names else None


def skip_reason(layer: Linear4bit | Linear8bitLt) -> str | None:
    """Why a bitsandbytes layer is none that can be packed, or None."""
    if layer_bits(layer) == 8 and layer.state.has_fp16_weights:
        return "its weights are 16-bit (has_fp16_weights)"
    return None


def statistics_bytes(layer: Linear4bit | Linear8bitLt) -> int:
    """Bytes that a bitsandbytes layer holds beside its parameters."""
    if layer_bits(layer) == 8:
        tensors = [getattr(layer.weight, "SCB", None), layer.state.SCB]
    else:
        state = getattr(layer.weight, "quant_state", None)
        second = getattr(state, "state2", None)
        tensors = [getattr(s, name, None) for s in (state, second) for name in ("absmax", "code")]
    return sum(t.nbytes for t in tensors if t is not None)


def config_options(layer: Linear4bit | Linear8bitLt, compute_dtype: torch.dtype) -> dict[str, Any]:
    """What a BitsAndBytesConfig of transformers says of layers like this one."""
    if layer_bits(layer) == 8:
        return {"load_in_8bit": True}
    weight = layer.weight
    return {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": weight.quant_type,
        "bnb_4bit_use_double_quant": weight.compress_statistics,
        "bnb_4bit_compute_dtype": compute_dtype,
        "bnb_4bit_quant_storage": weight.quant_storage,
    }


def read_layer(layer: Linear4bit | Linear8bitLt, where: str) -> tuple[WeightSpec, dict[str, Tensor], Origin]:
    """Spec, canonical tensors and origin of a bitsandbytes layer, on its device; `layer` is not changed.

    Tensors are shared with `layer` where they have their canonical form. A layer that was never quantized (no device
    move yet) is quantized here with its own settings.
    Raises ValueError or TypeError naming `where` for anything that is not complete and consistent.
    """
    bits = layer_bits(layer)
    if bits is None:
        raise TypeError(f"{where}: from_bnb takes bitsandbytes' Linear4bit or Linear8bitLt, got {type(layer).__name__}")
    if layer.weight.is_meta:
        raise ValueError(f"{where}: weight is on the meta device (offloaded or not loaded); load it to a device first")
    if reason := skip_reason(layer):
        raise ValueError(f"{where}: {reason}; use from_linear()")
    return (_read_4bit if bits == 4 else _read_8bit)(layer, where)


def check_layer(layer: Linear4bit | Linear8bitLt, where: str) -> None:
    """Raise what read_layer, or packing what it gives, would raise, without quantizing a layer for it."""
    if layer.weight.is_floating_point() and not _has_statistics(layer):
        if not torch.isfinite(layer.weight).all():
            raise ValueError(f"{where}: its weight holds NaN or infinity, which cannot be quantized")
        return
    spec, canonical, _ = read_layer(layer, where)
    check_tensors(canonical, spec.canonical_tensors(), where)
    check_tables(spec, canonical, where)


def make_layer(
    spec: WeightSpec, canonical: Mapping[str, Tensor], origin: Origin, where: str
) -> Linear4bit | Linear8bitLt:
    """The inverse of `read_layer`, without a bias. Raises ValueError for a format that bitsandbytes lacks."""
    if not bitsandbytes_has(spec):
        raise ValueError(f"{where}: bitsandbytes has no {spec.to_config()} layers; use dequantize()")
    return (_make_4bit if isinstance(spec, FourBitSpec) else _make_8bit)(spec, canonical, origin)


def _quant_state(layer: Linear4bit) -> QuantState | None:
    # Wrappers that rebuild parameters lose the attribute of the weight; the layer keeps a reference for them.
    return getattr(layer.weight, "quant_state", None) or getattr(layer, "quant_state", None)


def _has_statistics(layer: Linear4bit | Linear8bitLt) -> bool:
    return (_quant_state(layer) if layer_bits(layer) == 4 else _row_maxima(layer)) is not None


def _row_maxima(layer: Linear8bitLt) -> Tensor | None:
    # The first forward moves them from the weight to the state.
    on_weight = getattr(layer.weight, "SCB", None)
    return layer.state.SCB if on_weight is None else on_weight


def _read_4bit(layer: Linear4bit, where: str) -> tuple[FourBitSpec, dict[str, Tensor], Origin]:
    weight = layer.weight
    state = _quant_state(layer)
    compute_dtype = dtype_name(layer.compute_dtype) if layer.compute_dtype is not None else None
    if state is None:
        return _quantize_fresh(layer, where, compute_dtype)
    ran_on_cpu = getattr(state, "packing_format_for_cpu", False)
    codes, state = _undo_cpu_order(weight.data, state) if ran_on_cpu else (weight.data, state)
    if compute_dtype == "float32" and state.dtype != torch.float32:
        warn_once(
            "bnb_4bit_compute_dtype is float32; nf4linear computes in the dtype of the input and accumulates in float32"
        )
    n, k = state.shape
    spec = FourBitSpec(state.quant_type, n, k, state.blocksize, state.nested)
    if codes.dtype not in _STORAGE_DTYPES:
        raise ValueError(f"{where}: quant_storage is {codes.dtype}, expected one of {_STORAGE_DTYPES}")
    as_bytes = codes.detach().reshape(-1).view(torch.uint8)
    wanted = spec.canonical_tensors()["codes"].shape[0]
    if not wanted <= as_bytes.numel() < wanted + codes.element_size():
        raise ValueError(f"{where}: weight holds {as_bytes.numel()} bytes, a {n} x {k} weight has {wanted}")
    canonical = {"codes": as_bytes[:wanted], "absmax": state.absmax, "code": state.code.float()}
    origin = Origin(
        dtype=dtype_name(state.dtype),
        quant_storage=dtype_name(codes.dtype),
        code_dtype=dtype_name(state.code.dtype),
        compute_dtype=compute_dtype,
    )
    if spec.double_quant:
        nested, origin = _read_nested(state, where, origin, ran_on_cpu)
        canonical |= nested
    return spec, canonical, origin


def _read_nested(state: QuantState, where: str, origin: Origin, ran_on_cpu: bool) -> tuple[dict[str, Tensor], Origin]:
    second = state.state2
    if second.blocksize != NESTED_BLOCKSIZE:
        raise ValueError(f"{where}: nested_blocksize is {second.blocksize}, expected {NESTED_BLOCKSIZE}")
    if second.dtype in (torch.float16, torch.bfloat16) and not ran_on_cpu:
        warn_once(
            f"nested_dtype is {dtype_name(second.dtype)}: bitsandbytes rounds scales to it on some devices, "
            "nf4linear keeps them in float32"
        )
    if state.offset.dtype != torch.float32:
        warn_once(
            f"the nested offsets were rounded to {dtype_name(state.offset.dtype)} while loading (was that the default "
            "dtype?) and are used as they are. Load under float32, or pack the checkpoint, to keep them exact"
        )
    tensors = {
        "nested_absmax": second.absmax.float(),
        "nested_code": second.code.float(),
        "nested_offset": state.offset.float().reshape(()),
    }
    return tensors, dataclasses.replace(origin, nested_dtype=dtype_name(second.dtype))


def _undo_cpu_order(codes: Tensor, state: QuantState) -> tuple[Tensor, QuantState]:
    """Codes and scales as in a file, on a copy, from the order that a forward on a CPU leaves them in."""
    from bitsandbytes.functional import _convert_weight_packed_for_cpu_inverse

    warn_once(
        "bitsandbytes layers have already run on a CPU, where it rounds their scales to bfloat16: codes are restored, "
        "scales stay rounded. Convert before the first forward to keep them exact"
    )
    codes, state = _convert_weight_packed_for_cpu_inverse(codes.clone(), copy.copy(state))
    if not state.nested:  # the inverse leaves plain scales transposed and in bfloat16
        state.absmax = state.absmax.t().reshape(-1).float()
    else:
        state.offset = state.offset.float()
    return codes, state


def _quantize_fresh(layer: Linear4bit, where: str, compute_dtype: str | None):
    weight = layer.weight
    if not weight.is_floating_point():
        raise ValueError(f"{where}: weight is {weight.dtype} but has no quant_state; its statistics were not loaded")
    spec = FourBitSpec(weight.quant_type, *weight.shape, weight.blocksize, bool(weight.compress_statistics))
    try:
        canonical = reference.quantize(spec, weight.data)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    origin = Origin(
        dtype=dtype_name(weight.dtype),
        quant_storage=dtype_name(weight.quant_storage),
        compute_dtype=compute_dtype,
    )
    return spec, canonical, origin


def _read_8bit(layer: Linear8bitLt, where: str) -> tuple[EightBitSpec, dict[str, Tensor], Origin]:
    weight, state = layer.weight, layer.state
    row_maxima = _row_maxima(layer)
    spec = EightBitSpec("w8_s8", layer.out_features, layer.in_features)
    origin = Origin(dtype="float16", threshold=float(state.threshold))
    if weight.is_floating_point():
        if row_maxima is not None:
            raise ValueError(f"{where}: weight is {weight.dtype} although it has row maxima; expected int8")
        return spec, reference.quantize(spec, weight.data), dataclasses.replace(origin, dtype=dtype_name(weight.dtype))
    if row_maxima is None:
        raise ValueError(f"{where}: weight is {weight.dtype} but SCB is missing; its statistics were not loaded")
    return spec, {"codes": weight.data, "scale": row_maxima.float().reshape(-1)}, origin


def _make_4bit(spec: FourBitSpec, canonical: Mapping[str, Tensor], origin: Origin) -> Linear4bit:
    from bitsandbytes.functional import QuantState
    from bitsandbytes.nn import Linear4bit, Params4bit

    storage = getattr(torch, origin.quant_storage)
    codes = canonical["codes"]
    codes = nn.functional.pad(codes, (0, -codes.numel() % storage.itemsize)).view(storage).view(-1, 1)
    state = QuantState(
        absmax=canonical["absmax"].detach(),
        shape=torch.Size((spec.n, spec.k)),
        code=canonical["code"].detach().to(getattr(torch, origin.code_dtype)),
        blocksize=spec.blocksize,
        quant_type=spec.format,
        dtype=getattr(torch, origin.dtype),
    )
    if spec.double_quant:
        state.offset = canonical["nested_offset"].detach()
        state.nested = True
        state.state2 = QuantState(
            absmax=canonical["nested_absmax"].detach(),
            code=canonical["nested_code"].detach(),
            blocksize=NESTED_BLOCKSIZE,
            dtype=getattr(torch, origin.nested_dtype),
        )
    compute_dtype = getattr(torch, origin.compute_dtype) if origin.compute_dtype else None
    result = Linear4bit(
        spec.k, spec.n, False, compute_dtype, spec.double_quant, spec.format, quant_storage=storage, device="meta"
    )
    result.weight = Params4bit(
        codes.detach(),
        requires_grad=False,
        quant_state=state,
        blocksize=spec.blocksize,
        compress_statistics=spec.double_quant,
        quant_type=spec.format,
        quant_storage=storage,
        module=result,
        bnb_quantized=True,
    )
    result.quant_state = state
    return result


def _make_8bit(spec: EightBitSpec, canonical: Mapping[str, Tensor], origin: Origin) -> Linear8bitLt:
    from bitsandbytes.nn import Int8Params, Linear8bitLt

    result = Linear8bitLt(spec.k, spec.n, False, has_fp16_weights=False, threshold=origin.threshold, device="meta")
    codes = canonical["codes"].detach()
    result.weight = Int8Params(codes, requires_grad=False, CB=codes, SCB=canonical["scale"].detach().clone())
    return result
