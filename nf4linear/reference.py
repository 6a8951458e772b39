"""The slow truth in torch: quantize, dequantize and linear on canonical tensors.

It runs everywhere, is the oracle of the tests and the last fallback of the operators. Each step is one plain torch
expression; the roundings are those of bitsandbytes (>= 0.50): scale = code * nested scale, then + offset, rounded
separately in float32; weight = round(centroid * scale) once, from float32 to the wanted type.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .formats import NESTED_BLOCKSIZE, EightBitSpec, FourBitSpec, WeightSpec, dynamic_map

# bitsandbytes multiplies the raw row maximum by this float32 instead of dividing by 127.
INV_127 = torch.tensor(1.0, dtype=torch.float32).div(127.0).item()


def block_scales(
    spec: FourBitSpec, canonical: Mapping[str, Tensor], nested_dtype: torch.dtype = torch.float32
) -> Tensor:
    """float32 scale of every block [blocks].

    A 16-bit `nested_dtype` emulates the paths of bitsandbytes that also round the product, the offset and the sum to it
    (files saved after a CPU forward name such a type); the project's own meaning is always float32.
    """
    if not spec.double_quant:
        return canonical["absmax"]
    group = torch.arange(spec.blocks, device=canonical["absmax"].device) // NESTED_BLOCKSIZE
    product = canonical["nested_code"][canonical["absmax"].long()] * canonical["nested_absmax"][group]
    product = product.to(nested_dtype).float()
    return (product + canonical["nested_offset"].to(nested_dtype).float()).to(nested_dtype).float()


def dequantize(spec: WeightSpec, canonical: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """The weight [n, k] in `dtype`."""
    if isinstance(spec, EightBitSpec):
        value = canonical["codes"].float()
        if spec.group_size is None:
            return (value * canonical["scale"].view(-1, 1) * INV_127).to(dtype)
        return (value * canonical["group_scale"].repeat_interleave(spec.group_size, dim=1)).to(dtype)
    numel = spec.n * spec.k
    codes = canonical["codes"]
    nibbles = torch.stack((codes >> 4, codes & 0xF), dim=1).reshape(-1)[:numel]
    table = torch.tensor(spec.codebook.code, dtype=torch.float32, device=codes.device)
    scales = block_scales(spec, canonical).repeat_interleave(spec.blocksize)[:numel]
    return (table[nibbles.long()] * scales).to(dtype).view(spec.n, spec.k)


def linear(spec: WeightSpec, canonical: Mapping[str, Tensor], x: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., k] times the float32 weight, accumulated in float32, rounded once to the dtype of x: [..., n]."""
    y = torch.nn.functional.linear(x.float(), dequantize(spec, canonical, torch.float32))
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype)


def quantize(spec: WeightSpec, weight: Tensor) -> dict[str, Tensor]:
    """Canonical tensors of a float weight [n, k]; 4-bit codes and absmax are the bytes of bitsandbytes' quantize_4bit.

    Nested scale codes are always the nearest ones, as bitsandbytes' torch backend chooses them; its CPU library takes a
    neighbour in about one of a thousand. 8-bit rows are quantized in float32, so weights beyond float16's range keep a
    finite scale (bitsandbytes goes through float16 there). Raises ValueError for another shape, for NaN or infinity,
    and for a w8_u8 spec.
    """
    if tuple(weight.shape) != (spec.n, spec.k):
        raise ValueError(f"weight is {list(weight.shape)}, the spec is for [{spec.n}, {spec.k}]")
    if not torch.isfinite(weight).all():
        raise ValueError("weight holds NaN or infinity, which cannot be quantized")
    if isinstance(spec, EightBitSpec):
        return _quantize_8bit(spec, weight.float())
    flat = weight.reshape(-1).float()
    code = torch.tensor(spec.codebook.code, dtype=torch.float32, device=flat.device)
    ascending = torch.argsort(code, stable=True)
    absmax, nearest = _quantize_blocks(flat, code[ascending], spec.blocksize)
    nibbles = ascending[nearest].to(torch.uint8)
    nibbles = torch.nn.functional.pad(nibbles, (0, nibbles.numel() % 2), value=spec.codebook.zero_code)
    canonical = {"codes": nibbles[::2] << 4 | nibbles[1::2], "absmax": absmax, "code": code}
    if spec.double_quant:
        offset = absmax.mean()
        nested_code = torch.tensor(dynamic_map(), dtype=torch.float32, device=flat.device)
        nested_absmax, absmax_q = _quantize_blocks(absmax - offset, nested_code, NESTED_BLOCKSIZE)
        canonical |= {
            "absmax": absmax_q.to(torch.uint8),
            "nested_absmax": nested_absmax,
            "nested_code": nested_code,
            "nested_offset": offset,
        }
    return canonical


def _quantize_blocks(flat: Tensor, table: Tensor, blocksize: int) -> tuple[Tensor, Tensor]:
    """(absmax [blocks], index into the ascending `table` of the value nearest to each element / absmax)."""
    blocks = -(-flat.numel() // blocksize)
    padded = torch.nn.functional.pad(flat, (0, blocks * blocksize - flat.numel())).view(blocks, blocksize)
    absmax = padded.abs().amax(dim=1)
    # The clamp makes an all-zero block code to zeros instead of 0 * inf.
    normalized = (padded * (1.0 / absmax.clamp(min=1e-38)).view(-1, 1)).clamp(-1, 1)
    midpoints = (table[:-1] + table[1:]) / 2
    return absmax, torch.bucketize(normalized.view(-1)[: flat.numel()], midpoints)


def _quantize_8bit(spec: EightBitSpec, weight: Tensor) -> dict[str, Tensor]:
    if spec.integer.dtype == torch.uint8:
        raise ValueError("w8_u8 holds unsigned weights; quantize signed ones to w8_s8")
    groups = weight if spec.group_size is None else weight.view(spec.n, -1, spec.group_size)
    absmax = groups.abs().amax(dim=-1, keepdim=True)
    # The clamp keeps the quotient finite: an all-zero row codes to zeros instead of 0 * inf.
    signed = torch.round(groups * (127.0 / absmax.clamp(min=4e-37))).clamp(-127, 127).view(spec.n, spec.k)
    scales = absmax.squeeze(-1) if spec.group_size is None else absmax.squeeze(-1) / 127.0
    return {"codes": signed.to(torch.int8), spec.scales_name: scales}
