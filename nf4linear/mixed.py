"""Products of a 16-bit and an 8-bit matrix: {float16, bfloat16} x {int8, uint8}, the 8-bit one first or second.

    b = nf4linear.mixed.reorder_b(weight)          # once: [k, n] int8 or uint8 into kernel order
    d = nf4linear.mixed.f16_s8(a, b)               # [m, k] x [k, n] -> [m, n], accumulated in float32

The eight functions are named as CUTLASS's unit tests name these types: first operand, then second. The 8-bit values are
multiplied as they are (no scales) and come out exact in either 16-bit type; the result has the 16-bit operand's type.
The 8-bit operand is the one that is reordered offline, and both operands are read along k: a 16-bit second operand
should be a view of [n, k] (`b.t()`), else it is copied.

On a GPU the products run in the library's fused kernels where it has some for the shape, elsewhere, and on a CPU, in
the framework's GEMM on converted values.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from . import native, ops, reorder, selfcheck
from .formats import FORMATS, EightBitSpec, IntegerFormat

WIDE = {"f16": torch.float16, "bf16": torch.bfloat16}
NARROW = {"s8": "w8_s8", "u8": "w8_u8"}
# Narrow operand second, then first.
VARIANTS = (
    "f16_s8", "f16_u8", "bf16_s8", "bf16_u8", "s8_f16", "u8_f16", "s8_bf16", "u8_bf16",
)  # fmt: skip
__all__ = ["NarrowOperand", "matmul", "reorder_a", "reorder_b", *VARIANTS]

# A row's raw maximum of 127 stands for a scale of exactly 1.
_UNIT_SCALE = 127.0

_library = torch.library.Library("nf4linear", "FRAGMENT")
_library.define(
    "mixed_matmul(Tensor wide, Tensor qweight, Tensor scale, str format, int rows, int k, bool narrow_first) -> Tensor"
)


@dataclass(frozen=True, eq=False)
class NarrowOperand:
    """An int8 or uint8 matrix in kernel order; `rows` are those of a first operand or the columns of a second one."""

    spec: EightBitSpec
    qweight: Tensor
    first: bool
    scale: Tensor = field(repr=False)  # [rows], all standing for 1

    @property
    def shape(self) -> tuple[int, int]:
        """[m, k] of a first operand, [k, n] of a second one."""
        return (self.spec.n, self.spec.k) if self.first else (self.spec.k, self.spec.n)

    @property
    def dtype(self) -> torch.dtype:
        return self.spec.integer.dtype

    def to(self, device: torch.device | str) -> NarrowOperand:
        return NarrowOperand(self.spec, self.qweight.to(device), self.first, self.scale.to(device))

    def dense(self) -> Tensor:
        """The matrix as it was before reordering."""
        codes = reorder.unpack(self.spec, {"qweight": self.qweight, "scale": self.scale})["codes"]
        return codes if self.first else codes.t()


def reorder_a(a: Tensor) -> NarrowOperand:
    """An int8 or uint8 first operand [m, k] in kernel order, on its own device."""
    return _reorder(a, first=True)


def reorder_b(b: Tensor) -> NarrowOperand:
    """An int8 or uint8 second operand [k, n] in kernel order, on its own device."""
    return _reorder(b.t() if b.dim() == 2 else b, first=False)


def _reorder(rows: Tensor, first: bool) -> NarrowOperand:
    formats = {f.dtype: f.name for f in FORMATS.values() if isinstance(f, IntegerFormat)}
    if rows.dtype not in formats or rows.dim() != 2:
        raise TypeError(f"the narrow operand must be an int8 or uint8 matrix; got {rows.dtype} {list(rows.shape)}")
    spec = EightBitSpec(formats[rows.dtype], *rows.shape)
    scale = torch.full((spec.n,), _UNIT_SCALE, device=rows.device)
    packed = reorder.pack(spec, {"codes": rows.contiguous(), "scale": scale})
    return NarrowOperand(spec, packed["qweight"], first, scale)


def matmul(a: Tensor | NarrowOperand, b: Tensor | NarrowOperand) -> Tensor:
    """a [m, k] times b [k, n], one of them a NarrowOperand: [m, n] in the type of the other one.

    Raises TypeError for other types, ValueError for shapes or devices that do not fit.
    """
    narrow, wide = (a, b) if isinstance(a, NarrowOperand) else (b, a)
    if not isinstance(narrow, NarrowOperand) or not isinstance(wide, Tensor):
        raise TypeError("one operand must be a NarrowOperand (reorder_a, reorder_b), the other one a tensor")
    first = narrow is a
    if first != narrow.first:
        raise ValueError(f"the narrow operand was reordered as the {'first' if narrow.first else 'second'} one")
    if wide.dtype not in WIDE.values() or wide.dim() != 2:
        raise TypeError(f"the wide operand must be a float16 or bfloat16 matrix; got {wide.dtype} {list(wide.shape)}")
    if wide.shape[0 if first else 1] != narrow.spec.k:
        raise ValueError(f"cannot multiply {list(a.shape)} by {list(b.shape)}")
    if wide.requires_grad and torch.is_grad_enabled():
        raise TypeError("mixed products have no gradient; use torch.no_grad(), detach(), or a W8Linear")
    if wide.device != narrow.qweight.device:
        raise ValueError(f"operands are on {wide.device} and {narrow.qweight.device}; move one of them")
    spec = narrow.spec
    return torch.ops.nf4linear.mixed_matmul(
        wide.t() if first else wide, narrow.qweight, narrow.scale, spec.format, spec.n, spec.k, first
    )


# ---- the operator: wide [t, k] times the transpose of narrow [rows, k] -> [t, rows], or transposed [rows, t] ---------


def _fake(wide, qweight, scale, format, rows, k, narrow_first):
    tokens = wide.shape[0]
    return wide.new_empty((rows, tokens) if narrow_first else (tokens, rows))


def _by_gemm(wide, qweight, scale, format, rows, k, narrow_first):
    """Both operands in one type, then the framework's GEMM; on a CPU in float32, whose sums are the more exact."""
    narrow = ops.dequantize(qweight, scale, None, None, None, format, rows, k, 0, wide.dtype)
    if wide.device.type == "cpu":
        product = F.linear(narrow.float(), wide.float()) if narrow_first else F.linear(wide.float(), narrow.float())
        return product.to(wide.dtype)
    return F.linear(narrow, wide) if narrow_first else F.linear(wide, narrow)


def _by_library(wide, qweight, scale, format, rows, k, narrow_first):
    library = native.library("cuda")
    spec = EightBitSpec(format, rows, k)
    ops._check_weight(spec, qweight, scale, None, None, None)
    if wide.dim() != 2 or wide.shape[1] != k or wide.device != qweight.device:
        raise ValueError(
            f"the wide operand must be [tokens, {k}] on {qweight.device}; got {list(wide.shape)} on {wide.device}"
        )
    qweight, scale, *_ = ops._aligned((qweight, scale, None, None, None))
    y = _fake(wide, qweight, scale, format, rows, k, narrow_first)
    if y.numel() == 0:
        return y
    if library and selfcheck.fused_allowed(library, wide.device.index, wide.dtype, spec):
        weight = native.describe_weight(spec, qweight, scale, None, None, None)
        flags = native.TRANSPOSED_OUTPUT if narrow_first else 0
        if library.linear(weight, ops.kernel_rows(wide), None, y, flags):
            return y
    return _by_gemm(wide, qweight, scale, format, rows, k, narrow_first)


_library.impl("mixed_matmul", _by_gemm, "CompositeExplicitAutograd")
_library.impl("mixed_matmul", _by_library, "CUDA")
torch.library.register_fake("nf4linear::mixed_matmul", _fake)


# ---- the eight variants ----------------------------------------------------------------------------------------------


def _variant(name: str):
    types = name.split("_")

    def multiply(a, b):
        for operand, kind in zip((a, b), types, strict=True):
            want = WIDE.get(kind) or FORMATS[NARROW[kind]].dtype
            if isinstance(operand, NarrowOperand) != (kind in NARROW) or operand.dtype != want:
                got = f"{type(operand).__name__} {getattr(operand, 'dtype', '')}"
                form = "a NarrowOperand" if kind in NARROW else "a tensor"
                raise TypeError(f"{name} takes {form} of {want} here; got {got}")
        return matmul(a, b)

    multiply.__name__ = multiply.__qualname__ = name
    multiply.__doc__ = f"a [m, k] {types[0]} times b [k, n] {types[1]}, accumulated in float32; see matmul()."
    return multiply


f16_s8, f16_u8, bf16_s8, bf16_u8, s8_f16, u8_f16, s8_bf16, u8_bf16 = map(_variant, VARIANTS)
