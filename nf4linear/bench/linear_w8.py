"""8-bit linear layers (int8, one scale a row) beside their peers: weights and contenders for linear.sweep.

nf4linear      the operator, by plain and by programmatic dependent launches
dequant_gemm   our dequantize, then torch's GEMM
torch          torch's GEMM on the dequantized 16-bit weight
bitsandbytes   Linear8bitLt on float16, threshold 0 (it quantizes the activations too), where it is installed
humming        INT8, one scale a row, where it is installed
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any, ClassVar

import torch

from .. import native
from ..formats import EightBitSpec
from . import humming
from .gpu import Contender, copies_of
from .linear import TUNE_CUTS, TUNE_LEAST_UNITS, TUNE_SLICES, BenchWeight, Operands, Peer, torch_peer

# What --tune tries. Shapes of csrc/small_w8_plan.h (row tiles, tokens) with slices of K, then those of
# csrc/small_wgmma_w8_plan.h (tokens, row groups, burst) with the fewest units of a block, then those of
# csrc/gemm_w8_plan.h (tokens, warpgroups) with all output tiles whole, or the last ones cut.
TUNE_SHAPES = ((1, 1), (1, 8), (1, 16), (2, 32))
TUNE_WGMMA_SHAPES = ((16, 2, 4), (32, 2, 2), (32, 2, 4), (64, 2, 2), (64, 2, 4))
TUNE_GEMM_SHAPES = ((128, 2), (192, 2), (216, 2), (256, 2))


class BenchWeight8(BenchWeight):
    """A random int8 weight [n, k] with one scale a row, in kernel order on the GPU."""

    op = "linear_w8"
    format_names: ClassVar[dict[str, str]] = {"humming": "int8"}
    format_name = "w8_s8"
    humming_config: ClassVar[dict[str, Any]] = {"dtype": "int8"}
    humming_bytes = 1.0

    def __init__(self, n: int, k: int, seed: int = 0) -> None:
        self.spec = EightBitSpec("w8_s8", n, k)
        generator = torch.Generator("cuda").manual_seed(seed)
        packed = self.spec.packed_tensors()
        codes = torch.randint(0, 256, packed["qweight"].shape, dtype=torch.uint8, device="cuda", generator=generator)
        # Row maxima of a usual size: 0.05 +- 0.02.
        maxima = torch.rand(packed["scale"].shape, device="cuda", generator=generator) * 0.04 + 0.03
        self.tables = (None, None, None)
        self.operands: Operands = (codes, maxima, *self.tables)
        self.geometry = ("w8_s8", n, k, 0)
        self.nbytes = codes.nbytes + maxima.nbytes

    @staticmethod
    def variants(m: int) -> Iterator[tuple[str, int]]:
        yield "table", 0
        for index, (row_tiles, tokens) in enumerate(TUNE_SHAPES):
            if m <= tokens < max(2 * m, 9) and (m == 1) == (tokens == 1):
                for slices in TUNE_SLICES:
                    yield f"{row_tiles}x{tokens}/{slices}", native.tuned(index, slices)
        for index, (tokens, row_groups, burst) in enumerate(TUNE_WGMMA_SHAPES, len(TUNE_SHAPES)):
            if m <= tokens <= 2 * m:
                for units in TUNE_LEAST_UNITS:
                    yield f"wgmma{tokens}x{row_groups}x{burst}/{units}", native.tuned(index, units)
        if m > 32:
            for index, (tokens, warpgroups) in enumerate(TUNE_GEMM_SHAPES, len(TUNE_SHAPES) + len(TUNE_WGMMA_SHAPES)):
                for cut, value in TUNE_CUTS.items():
                    yield f"gemm{tokens}x{warpgroups}/{cut}", native.tuned(index, value)


def _bitsandbytes(weight: BenchWeight8, dtype: torch.dtype) -> Iterator[Contender]:
    if importlib.util.find_spec("bitsandbytes") is None:
        return
    import bitsandbytes as bnb

    canonical = weight.canonical()
    layers = []
    for _ in range(copies_of(weight.nbytes)):
        layer = bnb.nn.Linear8bitLt(weight.spec.k, weight.spec.n, bias=False, has_fp16_weights=False, threshold=0.0)
        codes, scale = canonical["codes"].clone(), canonical["scale"]
        layer.weight = bnb.nn.Int8Params(codes, requires_grad=False, has_fp16_weights=False, CB=codes, SCB=scale)
        layer.weight.CB, layer.weight.SCB = codes, scale
        layers.append(layer.cuda().eval())
    yield Contender("bitsandbytes", layers, weight.nbytes, takes=torch.float16)


PEERS: dict[str, Peer] = {"torch": torch_peer, "bitsandbytes": _bitsandbytes, "humming": humming.peer}
