"""Weight formats and the tensors that hold them: the only place of the tables and shapes in Python.

Two views of one weight are described here. The *canonical* view is what bitsandbytes stores (flat, row-major); the
*packed* view is the same bytes in kernel order, one parameter of a module or one key of a checkpoint each. Moving
between the two is the work of `reorder`; nothing here touches data.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

FORMAT_VERSION = 1

# Rows and inputs of one 512-byte tile of packed weights; the fragment orders themselves are drawn in layout.py.
TILE_ROWS = 16
TILE_K4 = 64
TILE_K8 = 32
TILE_BYTES = 512
# Blocks whose 8-bit scale codes share one second-level scale (bitsandbytes' nested blocksize).
NESTED_BLOCKSIZE = 256
BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True)
class CodebookFormat:
    """A 4-bit format: 16 centroids in [-1, 1], in code order."""

    name: str
    code: tuple[float, ...]
    zero_code: int  # the code of 0.0, which fills padding rows

    def matches(self, code: torch.Tensor) -> bool:
        """Whether float32 `code` [16] is this table, or this table rounded to a 16-bit type."""
        table = torch.tensor(self.code, dtype=torch.float32, device=code.device)
        return any(torch.equal(code, table.to(t).float()) for t in (torch.float32, torch.bfloat16, torch.float16))


@dataclass(frozen=True)
class IntegerFormat:
    """An 8-bit format: the stored byte is the value XOR `xor`, the value of a stored byte `b` is `b - bias`."""

    name: str
    xor: int
    bias: int
    dtype: torch.dtype  # of the canonical codes


# The centroids are bitsandbytes' own, exact in float32 (QLoRA, arXiv 2305.14314, appendix E; FP4 is e2m1 scaled to 1).
# FP4's code 8 is minus zero, as bitsandbytes' CUDA kernels decode it; its published table has plain zero there.
NF4 = CodebookFormat(
    "nf4",
    (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    zero_code=7,
)  # fmt: skip
FP4 = CodebookFormat(
    "fp4",
    (
        0.0, 0.0052083334885537624, 0.6666666865348816, 1.0,
        0.3333333432674408, 0.5, 0.1666666716337204, 0.25,
        -0.0, -0.0052083334885537624, -0.6666666865348816, -1.0,
        -0.3333333432674408, -0.5, -0.1666666716337204, -0.25,
    ),
    zero_code=0,
)  # fmt: skip
# Signed weights are stored offset-binary, so that the kernels' S8 and U8 conversions differ by one constant.
W8_S8 = IntegerFormat("w8_s8", xor=0x80, bias=128, dtype=torch.int8)
W8_U8 = IntegerFormat("w8_u8", xor=0x00, bias=0, dtype=torch.uint8)

FORMATS: Mapping[str, CodebookFormat | IntegerFormat] = {f.name: f for f in (NF4, FP4, W8_S8, W8_U8)}


@functools.cache
def dynamic_map() -> tuple[float, ...]:
    """The 256 values of the signed 8-bit dynamic data type that codes the block scales, ascending.

    Decade d (from 10^0 down to 10^-6) holds 2^(6-d) evenly spaced magnitudes: the midpoints of as many intervals of
    [0.1, 1] scaled by 10^-d, each with both signs; 0 and 1 complete the table. Values are exact float32
    (method: Dettmers, arXiv 1511.04561; values equal bitsandbytes').
    """
    magnitudes = []
    for decade in range(7):
        edges = torch.linspace(0.1, 1.0, 2 ** (6 - decade) + 1, dtype=torch.float32)
        magnitudes.append((edges[:-1] + edges[1:]) / 2 * 10.0**-decade)
    positive = torch.cat(magnitudes)
    table = torch.cat([-positive, positive, torch.tensor([0.0, 1.0])])
    return tuple(table.sort().values.tolist())


@dataclass(frozen=True)
class TensorSpec:
    dtype: torch.dtype
    shape: tuple[int, ...]

    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


def dtype_name(dtype: torch.dtype) -> str:
    """ "bfloat16" of torch.bfloat16, as JSON files name it; getattr(torch, name) is the way back."""
    return str(dtype).removeprefix("torch.")


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _check_shape(n: int, k: int) -> None:
    if n <= 0 or k <= 0:
        raise ValueError(f"out_features and in_features must be positive; got {n} x {k}")


@dataclass(frozen=True)
class FourBitSpec:
    """Everything that fixes the tensors of one NF4 or FP4 weight [n, k] (n = out_features, k = in_features).

    Raises ValueError for an unknown format, an illegal blocksize or an empty shape.
    """

    format: str
    n: int
    k: int
    blocksize: int = 64
    double_quant: bool = True

    def __post_init__(self) -> None:
        if not isinstance(FORMATS.get(self.format), CodebookFormat):
            raise ValueError(f"4-bit format must be one of nf4, fp4; got {self.format!r}")
        if not isinstance(self.blocksize, int) or self.blocksize not in BLOCKSIZES:
            raise ValueError(f"blocksize must be one of {BLOCKSIZES}; got {self.blocksize!r}")
        _check_shape(self.n, self.k)

    @property
    def codebook(self) -> CodebookFormat:
        return FORMATS[self.format]  # type: ignore[return-value]

    @functools.cached_property
    def layout(self) -> str:
        """ "tile16x64" where every block of scales lies inside one row and covers whole 64-input tiles, else "flat"."""
        tiled = self.k % TILE_K4 == 0 and self.blocksize % TILE_K4 == 0 and self.k % self.blocksize == 0
        return "tile16x64" if tiled else "flat"

    @property
    def blocks(self) -> int:
        return _ceil_div(self.n * self.k, self.blocksize)

    @property
    def nested_groups(self) -> int:
        return _ceil_div(self.blocks, NESTED_BLOCKSIZE)

    @property
    def row_tiles(self) -> int:
        return _ceil_div(self.n, TILE_ROWS)

    @property
    def scales_name(self) -> str:
        """Packed name of the block scales: 8-bit codes with double quantization, float32 without."""
        return "absmax_q" if self.double_quant else "absmax"

    def canonical_tensors(self) -> dict[str, TensorSpec]:
        """Flat tensors as bitsandbytes holds them: two codes a byte (high nibble = even index), one scale a block."""
        tensors = {
            "codes": TensorSpec(torch.uint8, (_ceil_div(self.n * self.k, 2),)),
            "absmax": TensorSpec(torch.uint8 if self.double_quant else torch.float32, (self.blocks,)),
            "code": TensorSpec(torch.float32, (16,)),
        }
        return tensors | self._nested_tensors()

    def packed_tensors(self) -> dict[str, TensorSpec]:
        """Tensors in kernel order: the parameters of an NF4Linear and the keys of a packed checkpoint."""
        if self.layout == "flat":
            flat = self.canonical_tensors()
            qweight, scales = flat["codes"], flat["absmax"]
        else:
            k_tiles, rows = self.k // TILE_K4, self.row_tiles
            qweight = TensorSpec(torch.uint8, (rows, k_tiles, TILE_BYTES))
            if self.double_quant:
                scales = TensorSpec(torch.uint8, (rows, _ceil_div(k_tiles, 4), 4 * TILE_ROWS))
            else:
                scales = TensorSpec(torch.float32, (rows, k_tiles, TILE_ROWS))
        tensors = {"qweight": qweight, self.scales_name: scales, "code": TensorSpec(torch.float32, (16,))}
        return tensors | self._nested_tensors()

    def _nested_tensors(self) -> dict[str, TensorSpec]:
        if not self.double_quant:
            return {}
        return {
            "nested_absmax": TensorSpec(torch.float32, (self.nested_groups,)),
            "nested_code": TensorSpec(torch.float32, (256,)),
            "nested_offset": TensorSpec(torch.float32, ()),
        }

    def to_config(self) -> dict[str, Any]:
        return {"format": self.format, "blocksize": self.blocksize, "double_quant": self.double_quant}


@dataclass(frozen=True)
class EightBitSpec:
    """Everything that fixes the tensors of one 8-bit weight [n, k].

    Without `group_size` there is one raw row maximum `scale` [n] and weight = value * scale * float32(1/127), as
    bitsandbytes has it; with it, `group_scale` [n, k / group_size] multiplies directly.
    Raises ValueError for an unknown format, a group size that does not divide k, or an empty shape.
    """

    format: str
    n: int
    k: int
    group_size: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(FORMATS.get(self.format), IntegerFormat):
            raise ValueError(f"8-bit format must be one of w8_s8, w8_u8; got {self.format!r}")
        _check_shape(self.n, self.k)
        if self.group_size is not None and (self.group_size not in (64, 128) or self.k % self.group_size):
            raise ValueError(f"group_size must be 64 or 128 and divide k={self.k}; got {self.group_size!r}")

    @property
    def integer(self) -> IntegerFormat:
        return FORMATS[self.format]  # type: ignore[return-value]

    @property
    def blocksize(self) -> int:
        """Inputs under one scale as operators and native libraries take it: the group size, 0 for one scale a row."""
        return self.group_size or 0

    @property
    def layout(self) -> str:
        return "tile16x32"

    @property
    def row_tiles(self) -> int:
        return _ceil_div(self.n, TILE_ROWS)

    @property
    def scales_name(self) -> str:
        return "scale" if self.group_size is None else "group_scale"

    def canonical_tensors(self) -> dict[str, TensorSpec]:
        scales = (self.n,) if self.group_size is None else (self.n, self.k // self.group_size)
        return {
            "codes": TensorSpec(self.integer.dtype, (self.n, self.k)),
            self.scales_name: TensorSpec(torch.float32, scales),
        }

    def packed_tensors(self) -> dict[str, TensorSpec]:
        qweight = TensorSpec(torch.uint8, (self.row_tiles, _ceil_div(self.k, TILE_K8), TILE_BYTES))
        if self.group_size is None:
            scales = TensorSpec(torch.float32, (self.n,))
        else:
            scales = TensorSpec(torch.float32, (self.row_tiles, self.k // self.group_size, TILE_ROWS))
        return {"qweight": qweight, self.scales_name: scales}

    def to_config(self) -> dict[str, Any]:
        return {"format": self.format, "group_size": self.group_size}


WeightSpec = FourBitSpec | EightBitSpec

# Every name that a packed tensor can have.
PACKED_NAMES = frozenset().union(
    *(FourBitSpec("nf4", 16, 64, double_quant=double_quant).packed_tensors() for double_quant in (True, False)),
    *(EightBitSpec("w8_s8", 16, 64, group_size).packed_tensors() for group_size in (None, 64)),
)


@functools.lru_cache(maxsize=4096)
def operands_of(spec: WeightSpec) -> tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]:
    """Name, dtype and shape of the weight arguments an operator takes: five, or two without double quantization."""
    packed = spec.packed_tensors()
    names = ("qweight", spec.scales_name, "nested_code", "nested_absmax", "nested_offset")
    return tuple((name, packed[name].dtype, packed[name].shape) for name in names if name in packed)


@functools.lru_cache(maxsize=4096)
def make_spec(format: str, n: int, k: int, blocksize: int, double_quant: bool) -> WeightSpec:
    """The spec of an operator call, whose `blocksize` is that of the spec (of an 8-bit one too)."""
    if isinstance(FORMATS.get(format), IntegerFormat):
        return EightBitSpec(format, n, k, blocksize or None)
    return FourBitSpec(format, n, k, blocksize, double_quant)


def bitsandbytes_has(spec: WeightSpec) -> bool:
    """Whether bitsandbytes has weights of this format."""
    return isinstance(spec, FourBitSpec) or (spec.format == "w8_s8" and spec.group_size is None)


# ---- entries of a quantization_config ------------------------------------------------------------------------------

# What plain weights can be quantized to; w8_u8 holds weights that are unsigned from the start.
QUANTIZED_FORMATS = ("nf4", "fp4", "w8_s8")
_FOUR_BIT_FIELDS = {"format", "blocksize", "double_quant"}
_EIGHT_BIT_FIELDS = {"format", "group_size"}


def config_entry(format: str, blocksize: int = 64, double_quant: bool = True) -> dict[str, Any]:
    """The `modules` entry of plain weights quantized with these options, of which 8-bit formats take only the first.

    Raises ValueError for options that no weight can have.
    """
    if format not in QUANTIZED_FORMATS:
        *others, last = QUANTIZED_FORMATS
        raise ValueError(f"format must be {', '.join(others)} or {last}; got {format!r}")
    entry = {"format": format}
    if isinstance(FORMATS[format], CodebookFormat):
        entry |= {"blocksize": blocksize, "double_quant": double_quant}
    check_config_entry(entry)
    return entry


def check_config_entry(entry: Mapping[str, Any]) -> None:
    """Raise ValueError naming what is wrong with a `modules` entry, whatever the shape of the layers it is for."""
    spec_from_config(entry, 4096, 4096)  # every blocksize and group size divides 4096


def spec_from_config(entry: Mapping[str, Any], n: int, k: int) -> WeightSpec:
    """The spec of a weight [n, k] with one `modules` entry of a quantization_config.

    Raises ValueError naming what is wrong with the entry, or does not fit the shape.
    """
    name = entry.get("format")
    if not isinstance(name, str) or name not in FORMATS:
        raise ValueError(f"unknown weight format {name!r}; this version reads {', '.join(FORMATS)}")
    eight_bit = isinstance(FORMATS[name], IntegerFormat)
    known = _EIGHT_BIT_FIELDS if eight_bit else _FOUR_BIT_FIELDS
    if surplus := set(entry) - known:
        raise ValueError(f"format {name!r} does not take {sorted(surplus)}; it takes {sorted(known)}")
    if eight_bit:
        return EightBitSpec(name, n, k, entry.get("group_size"))
    return FourBitSpec(name, n, k, entry.get("blocksize", 64), entry.get("double_quant", True))


# ---- checks of tensors -----------------------------------------------------------------------------------------------


def check_tensors(tensors: Mapping[str, torch.Tensor], expected: Mapping[str, TensorSpec], where: str) -> None:
    """Raise ValueError naming `where` and the tensor unless names, dtypes and shapes are exactly the expected ones."""
    for name, spec in expected.items():
        if name not in tensors:
            raise ValueError(f"{where}: tensor {name!r} is missing; the file is incomplete")
        got = tensors[name]
        if got.dtype != spec.dtype or tuple(got.shape) != spec.shape:
            raise ValueError(
                f"{where}: tensor {name!r} is {got.dtype} {list(got.shape)}, expected {spec.dtype} {list(spec.shape)}"
            )
    if surplus := sorted(set(tensors) - set(expected)):
        raise ValueError(f"{where}: unexpected tensors {surplus}; expected only {sorted(expected)}")


def check_packed(spec: WeightSpec, tensors: Mapping[str, torch.Tensor], where: str) -> None:
    """Raise ValueError naming `where` unless `tensors` are the packed tensors of `spec`, with tables that can be."""
    check_tensors(tensors, spec.packed_tensors(), where)
    check_tables(spec, tensors, where)


def check_tables(spec: WeightSpec, tensors: Mapping[str, torch.Tensor], where: str) -> None:
    """Raise ValueError unless `code` is the format's table, or its 16-bit rounding, and every scale is finite."""
    if any(tensor.is_meta for tensor in tensors.values()):
        return
    for name, tensor in tensors.items():
        if fault := table_fault(spec, name, tensor):
            raise ValueError(f"{where}: tensor {name!r} {fault}")


def table_fault(spec: WeightSpec, name: str, tensor: torch.Tensor) -> str | None:
    """What is wrong with the values of tensor `name` of a weight, as the end of a message, or None."""
    if name == "code" and not spec.codebook.matches(tensor):
        return f"is not the {spec.format} table; the format or the file is wrong"
    if tensor.is_floating_point() and not tensor.isfinite().all():
        return "holds NaN or infinity; the file or the layer is damaged"
    return None
