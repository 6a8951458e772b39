"""Bytes into kernel order and back: bijective whole-tensor permutes that run on any device.

`pack` and `unpack` take and return dicts with exactly the tensors of `spec.canonical_tensors()` and
`spec.packed_tensors()`. No code is ever decoded or re-encoded, so `unpack(spec, pack(spec, t))` is byte-identical.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .formats import TILE_K4, TILE_K8, TILE_ROWS, EightBitSpec, FourBitSpec, WeightSpec, check_tensors


def pack(spec: WeightSpec, canonical: Mapping[str, Tensor], where: str = "weight") -> dict[str, Tensor]:
    """Kernel-order tensors of a weight; `where` names it in errors. Raises ValueError on tensors that do not fit."""
    check_tensors(canonical, spec.canonical_tensors(), where)
    if isinstance(spec, EightBitSpec):
        packed = {"qweight": _tile_bytes(spec, canonical["codes"])}
        scales = canonical[spec.scales_name]
        packed[spec.scales_name] = scales if spec.group_size is None else _tile_row_scales(spec, scales)
        return packed
    packed = {"qweight": canonical["codes"], spec.scales_name: canonical["absmax"]}
    if spec.layout == "tile16x64":
        packed = {"qweight": _tile_nibbles(spec, canonical["codes"])}
        per_k_tile = canonical["absmax"].view(spec.n, -1).repeat_interleave(spec.blocksize // TILE_K4, dim=1)
        tile = _tile_scale_codes if spec.double_quant else _tile_row_scales
        packed[spec.scales_name] = tile(spec, per_k_tile)
    return packed | {name: canonical[name] for name in spec.packed_tensors() if name not in packed}


def unpack(spec: WeightSpec, packed: Mapping[str, Tensor], where: str = "weight") -> dict[str, Tensor]:
    """The inverse of `pack`. Raises ValueError on tensors that do not fit, or repeated scales that disagree."""
    check_tensors(packed, spec.packed_tensors(), where)
    if isinstance(spec, EightBitSpec):
        canonical = {"codes": _untile_bytes(spec, packed["qweight"])}
        scales = packed[spec.scales_name]
        canonical[spec.scales_name] = scales if spec.group_size is None else _untile_row_scales(spec, scales)
        return canonical
    canonical = {"codes": packed["qweight"], "absmax": packed[spec.scales_name]}
    if spec.layout == "tile16x64":
        untile = _untile_scale_codes if spec.double_quant else _untile_row_scales
        canonical = {
            "codes": _untile_nibbles(spec, packed["qweight"]),
            "absmax": _drop_repeats(spec, untile(spec, packed[spec.scales_name]), where),
        }
    return canonical | {name: packed[name] for name in spec.canonical_tensors() if name not in canonical}


def _pad(t: Tensor, rows: int, cols: int, value: int | float) -> Tensor:
    return torch.nn.functional.pad(t, (0, cols - t.shape[1], 0, rows - t.shape[0]), value=value)


def _tile_nibbles(spec: FourBitSpec, codes: Tensor) -> Tensor:
    zero = spec.codebook.zero_code * 0x11
    q = _pad(codes.view(spec.n, spec.k // 2), spec.row_tiles * TILE_ROWS, spec.k // 2, zero)
    q = q.view(spec.row_tiles, 2, 8, spec.k // TILE_K4, 4, 2, 4)  # (rt, h, g, kb, s, u, t)
    return q.permute(0, 3, 2, 6, 4, 5, 1).reshape(spec.row_tiles, spec.k // TILE_K4, 512)  # (rt, kb, g, t, s, u, h)


def _untile_nibbles(spec: FourBitSpec, qweight: Tensor) -> Tensor:
    q = qweight.view(spec.row_tiles, spec.k // TILE_K4, 8, 4, 4, 2, 2)  # (rt, kb, g, t, s, u, h)
    q = q.permute(0, 6, 2, 1, 4, 5, 3).reshape(spec.row_tiles * TILE_ROWS, spec.k // 2)
    return q[: spec.n].reshape(-1)


def _tile_bytes(spec: EightBitSpec, codes: Tensor) -> Tensor:
    k_tiles = -(-spec.k // TILE_K8)
    stored = codes.view(torch.uint8) ^ spec.integer.xor
    q = _pad(stored, spec.row_tiles * TILE_ROWS, k_tiles * TILE_K8, spec.integer.xor)
    q = q.view(spec.row_tiles, 2, 8, k_tiles, 2, 2, 4, 2)  # (rt, h, g, kb, s, u, t, e)
    return q.permute(0, 3, 2, 6, 4, 5, 1, 7).reshape(spec.row_tiles, k_tiles, 512)


def _untile_bytes(spec: EightBitSpec, qweight: Tensor) -> Tensor:
    k_tiles = qweight.shape[1]
    q = qweight.view(spec.row_tiles, k_tiles, 8, 4, 2, 2, 2, 2)  # (rt, kb, g, t, s, u, h, e)
    q = q.permute(0, 6, 2, 1, 4, 5, 3, 7).reshape(spec.row_tiles * TILE_ROWS, k_tiles * TILE_K8)
    return (q[: spec.n, : spec.k] ^ spec.integer.xor).contiguous().view(spec.integer.dtype)


def _tile_scale_codes(spec: FourBitSpec, codes: Tensor) -> Tensor:
    quads = -(-codes.shape[1] // 4)
    q = _pad(codes, spec.row_tiles * TILE_ROWS, quads * 4, 0).view(spec.row_tiles, 2, 8, quads, 4)  # (rt, h, g, q, j)
    return q.permute(0, 3, 2, 1, 4).reshape(spec.row_tiles, quads, 64)


def _untile_scale_codes(spec: FourBitSpec, absmax_q: Tensor) -> Tensor:
    quads = absmax_q.shape[1]
    q = absmax_q.view(spec.row_tiles, quads, 8, 2, 4).permute(0, 3, 2, 1, 4)  # (rt, h, g, q, j)
    return q.reshape(spec.row_tiles * TILE_ROWS, quads * 4)[: spec.n, : spec.k // TILE_K4]


def _tile_row_scales(spec: WeightSpec, scales: Tensor) -> Tensor:
    q = _pad(scales, spec.row_tiles * TILE_ROWS, scales.shape[1], 0.0)
    q = q.view(spec.row_tiles, 2, 8, scales.shape[1]).permute(0, 3, 2, 1)  # (rt, h, g, kb) -> (rt, kb, g, h)
    return q.reshape(spec.row_tiles, scales.shape[1], TILE_ROWS)


def _untile_row_scales(spec: WeightSpec, scales: Tensor) -> Tensor:
    columns = scales.shape[1]
    q = scales.view(spec.row_tiles, columns, 8, 2).permute(0, 3, 2, 1)  # (rt, h, g, kb)
    return q.reshape(spec.row_tiles * TILE_ROWS, columns)[: spec.n].contiguous()


def _drop_repeats(spec: FourBitSpec, per_k_tile: Tensor, where: str) -> Tensor:
    repeats = per_k_tile.reshape(spec.blocks, spec.blocksize // TILE_K4)
    # Compared as bytes: a NaN scale equals itself, and -0.0 is not 0.0.
    as_bytes = repeats.contiguous().view(torch.uint8).view(spec.blocks, repeats.shape[1], -1)
    if not torch.equal(as_bytes, as_bytes[:, :1].expand_as(as_bytes)):
        raise ValueError(
            f"{where}: {spec.scales_name!r} holds different scales inside one block of {spec.blocksize} weights; "
            "the file is damaged or was edited"
        )
    return repeats[:, 0].contiguous()
