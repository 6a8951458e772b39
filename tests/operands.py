"""What several test files need: fresh quantized weights and the operators' positional arguments."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nf4linear import native, reference, reorder
from nf4linear.formats import EightBitSpec, FourBitSpec, WeightSpec

SPECS = (
    FourBitSpec("nf4", 48, 192),  # tiles, k-blocks not a multiple of four
    FourBitSpec("nf4", 33, 256, blocksize=128),  # padding rows, repeated scales
    FourBitSpec("nf4", 20, 100),  # flat: blocks straddle rows
    FourBitSpec("nf4", 7, 33),  # flat, odd number of weights
    FourBitSpec("fp4", 16, 64, blocksize=64, double_quant=False),
    FourBitSpec("fp4", 40, 96, blocksize=32),
    EightBitSpec("w8_s8", 20, 96),
    EightBitSpec("w8_s8", 19, 50),
    EightBitSpec("w8_s8", 17, 256, group_size=128),
    EightBitSpec("w8_u8", 16, 64),
)


def spec_id(spec: WeightSpec) -> str:
    extra = (
        f"b{spec.blocksize}{'dq' if spec.double_quant else ''}" if isinstance(spec, FourBitSpec) else spec.group_size
    )
    return f"{spec.format}-{spec.n}x{spec.k}-{extra}"


def fresh_weight(spec: WeightSpec, seed: int = 0, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Canonical tensors of a random weight whose rows differ in size; its first codes are every byte there is."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.rand(spec.n, 1, generator=generator) + 0.1
    weight = torch.randn(spec.n, spec.k, generator=generator) * rows
    if spec.format == "w8_u8":  # nothing quantizes to it: take any bytes
        codes = torch.randint(0, 256, (spec.n, spec.k), dtype=torch.uint8, generator=generator)
        return {"codes": codes.to(device), "scale": rows.view(-1).to(device)}
    canonical = reference.quantize(spec, weight)
    every_byte = torch.arange(min(256, canonical["codes"].numel())).to(torch.uint8)
    canonical["codes"].view(-1).view(torch.uint8)[: every_byte.numel()] = every_byte
    return {name: tensor.to(device) for name, tensor in canonical.items()}


def operands(spec: WeightSpec, packed: dict[str, torch.Tensor]) -> tuple:
    """The five weight arguments of nf4linear::dequantize and nf4linear::linear."""
    nested = (packed.get(name) for name in ("nested_code", "nested_absmax", "nested_offset"))
    return (packed["qweight"], packed[spec.scales_name], *nested)


def geometry(spec: WeightSpec) -> tuple[str, int, int, int]:
    """The four spec arguments of the operators."""
    return spec.format, spec.n, spec.k, spec.blocksize


def packed_weight(spec: WeightSpec, seed: int = 0, device: str = "cpu") -> dict[str, torch.Tensor]:
    return reorder.pack(spec, fresh_weight(spec, seed, device))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal down to the sign of zero."""
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@dataclass(frozen=True)
class Shard:
    """Part of a packed weight, as tensor parallelism cuts it: it knows where it lies, its tables are the whole's."""

    spec: FourBitSpec
    weight: native.Weight  # as the libraries take it
    tensors: tuple[torch.Tensor, ...]  # that it points to


def cut_shard(
    spec: FourBitSpec, packed: dict[str, torch.Tensor], rows: tuple[int, int], inputs: tuple[int, int]
) -> Shard:
    """Rows n0..n1 (multiples of 16) and inputs k0..k1 (of 256) of a weight with double quantization."""
    (n0, n1), (k0, k1) = rows, inputs
    part = FourBitSpec(spec.format, n1 - n0, k1 - k0, blocksize=spec.blocksize)
    tensors = (
        packed["qweight"][n0 // 16 : n1 // 16, k0 // 64 : k1 // 64].contiguous(),
        packed["absmax_q"][n0 // 16 : n1 // 16, k0 // 256 : k1 // 256].contiguous(),
        *(packed[name] for name in ("nested_code", "nested_absmax", "nested_offset")),
    )
    weight = native.describe_weight(part, *tensors)
    weight.n0, weight.kb0, weight.kb_full = n0, k0 // 64, spec.k // 64
    return Shard(part, weight, tensors)
