"""NF4 linear layers on a GPU beside their peers: times, roofs and errors of every shape and number of tokens.

(8-bit layers: linear_w8.py, which gives `sweep` its own weights and peers.)

Contenders, each on its own copies of one weight (random codes and scales):

    nf4linear      the operator, by plain and by programmatic dependent launches
    dequant_gemm   our dequantize, then torch's GEMM
    torch          torch's GEMM on the dequantized 16-bit weight
    bitsandbytes   matmul_4bit on the same codes, where it is installed
    humming        INT4, groups of 64 (it has no NF4), on the same dequantized weight, where it is installed
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import native, ops, reorder
from ..formats import FourBitSpec, dynamic_map
from . import humming
from .gpu import Contender, Row, copies_of, race

SHAPES = (
    (4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (8192, 8192), (57344, 8192), (8192, 28672),
)  # fmt: skip
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
ROUNDS = 9
# The launch of a graph takes about 4 us. Calls of few tokens are as short, so a graph makes this many of them.
CALLS, FEW_TOKENS = 12, 64
# What --tune tries. Shapes of csrc/small_batch_plan.h (row tiles, tokens) with slices of K, then those of
# csrc/small_wgmma_plan.h (tokens, row groups) with the fewest units of a block, then those of csrc/gemm_wgmma_shape.h
# (tokens, warpgroups) with slices of K, of which four may be those of one cluster or of two.
TUNE_SHAPES = ((1, 1), (2, 1), (1, 8), (2, 8), (1, 16), (2, 16), (1, 32))
TUNE_SLICES = (1, 2, 3, 4, 6, 8, 12, 16)
TUNE_WGMMA_SHAPES = ((16, 4), (32, 2), (32, 3), (32, 4), (64, 2), (64, 3), (96, 2), (128, 2))
TUNE_LEAST_UNITS = (1, 2, 4)
TUNE_GEMM_SHAPES = ((64, 2), (96, 2), (128, 2), (128, 3), (160, 2), (192, 2), (224, 2), (256, 2), (320, 2), (344, 2))
TUNE_GEMM_SLICES = {"1": 1, "2": 2, "3": 3, "4": 4, "2+2": 5}
# Tokens of the shapes of csrc/gemm_mma_plan.h, which come last, with all output tiles whole, or the last ones cut.
TUNE_GEMM_MMA_SHAPES = (48, 64, 96, 128)
TUNE_CUTS = {"cut": 0, "whole": 1}
# More are never tried: the prefill engine's rows end there (csrc/dispatch.h).
TUNE_MOST_TOKENS = 8192

Operands = tuple[Tensor | None, ...]
Peer = Callable[["BenchWeight", torch.dtype], Iterator["Contender"]]


class BenchWeight:
    """A random NF4 weight [n, k] with double quantization, in kernel order on the GPU."""

    op = "linear"
    # What result rows call the formats of contenders whose weights are not ours.
    format_names: ClassVar[dict[str, str]] = {"humming": "int4-g64"}
    format_name = "nf4-dq"
    humming_config: ClassVar[dict[str, Any]] = {"dtype": "int4", "group_size": 64}
    humming_bytes = 0.5 + 2 / 64  # of one weight: 4 bits, and a 16-bit scale for 64 of them

    def __init__(self, n: int, k: int, seed: int = 0) -> None:
        self.spec = FourBitSpec("nf4", n, k)
        generator = torch.Generator("cuda").manual_seed(seed)
        packed = self.spec.packed_tensors()
        where = {"device": "cuda", "generator": generator}
        codes, scales = (
            torch.randint(0, 256, packed[name].shape, dtype=torch.uint8, **where) for name in ("qweight", "absmax_q")
        )
        # Scales of a usual size, none negative: 0.05 +- 0.02.
        nested_absmax = torch.rand(packed["nested_absmax"].shape, **where) * 0.01 + 0.01
        self.tables = (
            torch.tensor(dynamic_map(), device="cuda"), nested_absmax, torch.full((), 0.05, device="cuda"),
        )  # fmt: skip
        self.operands: Operands = (codes, scales, *self.tables)
        self.geometry = ("nf4", n, k, self.spec.blocksize)
        self.nbytes = sum(t.nbytes for t in self.operands if t is not None)

    def copies(self) -> list[Operands]:
        codes, scales = self.operands[:2]
        clones = [(codes.clone(), scales.clone(), *self.tables) for _ in range(copies_of(self.nbytes) - 1)]
        return [self.operands, *clones]

    def dense(self, dtype: torch.dtype) -> Tensor:
        return ops.dequantize(*self.operands, *self.geometry, dtype)

    def canonical(self) -> dict[str, Tensor]:
        return reorder.unpack(self.spec, ops.packed_dict(self.spec, *self.operands))

    @staticmethod
    def variants(m: int) -> Iterator[tuple[str, int]]:
        """Names and flags of the table's choice and of every shape that suits `m` tokens."""
        yield "table", 0
        for index, (row_tiles, tokens) in enumerate(TUNE_SHAPES):
            if m <= tokens < max(2 * m, 9) and (m == 1) == (tokens == 1):
                for slices in TUNE_SLICES:
                    yield f"{row_tiles}x{tokens}/{slices}", native.tuned(index, slices)
        for index, (tokens, row_groups) in enumerate(TUNE_WGMMA_SHAPES, len(TUNE_SHAPES)):
            if m <= tokens < 2 * m:
                for units in TUNE_LEAST_UNITS:
                    yield f"wgmma{tokens}x{row_groups}/{units}", native.tuned(index, units)
        if m > 64:
            first = len(TUNE_SHAPES) + len(TUNE_WGMMA_SHAPES)
            for index, (tokens, warpgroups) in enumerate(TUNE_GEMM_SHAPES, first):
                for slices, value in TUNE_GEMM_SLICES.items():
                    yield f"gemm{tokens}x{warpgroups}/{slices}", native.tuned(index, value)
        if m > 32:
            first = len(TUNE_SHAPES) + len(TUNE_WGMMA_SHAPES) + len(TUNE_GEMM_SHAPES)
            for index, tokens in enumerate(TUNE_GEMM_MMA_SHAPES, first):
                for cut, value in TUNE_CUTS.items():
                    yield f"mma{tokens}/{cut}", native.tuned(index, value)


# ---- contenders ------------------------------------------------------------------------------------------------------


def contenders_of(weight: BenchWeight, dtype: torch.dtype, peers: Iterable[Peer]) -> Iterator[Contender]:
    """Ours, and those of `peers` that are installed."""
    geometry, copies = weight.geometry, weight.copies()
    for launch, settled in (("plain", False), ("pdl", True)):
        layers = [lambda x, w=w, s=settled: ops.linear(x, *w, None, *geometry, settled=s) for w in copies]
        yield Contender("nf4linear", layers, weight.nbytes, launch)
    layers = [lambda x, w=w: F.linear(x, ops.dequantize(*w, *geometry, x.dtype)) for w in copies]
    yield Contender("dequant_gemm", layers, weight.nbytes)
    for peer in peers:
        yield from peer(weight, dtype)


def torch_peer(weight: BenchWeight, dtype: torch.dtype) -> Iterator[Contender]:
    dense = weight.dense(dtype)
    copies = [dense, *(dense.clone() for _ in range(copies_of(dense.nbytes) - 1))]
    yield Contender("torch", [lambda x, w=w: F.linear(x, w) for w in copies], dense.nbytes)


def _bitsandbytes(weight: BenchWeight, dtype: torch.dtype) -> Iterator[Contender]:
    if importlib.util.find_spec("bitsandbytes") is None:
        return
    import bitsandbytes as bnb
    from bitsandbytes.functional import QuantState

    c = weight.canonical()
    second = QuantState(c["nested_absmax"], code=c["nested_code"], blocksize=256, dtype=torch.float32)
    state = QuantState(
        c["absmax"], torch.Size((weight.spec.n, weight.spec.k)), c["code"], weight.spec.blocksize, "nf4", dtype,
        c["nested_offset"], second,
    )  # fmt: skip
    codes = c["codes"].view(-1, 1)
    copies = [codes, *(codes.clone() for _ in range(copies_of(weight.nbytes) - 1))]
    yield Contender("bitsandbytes", [lambda x, q=q: bnb.matmul_4bit(x, q.t(), state) for q in copies], weight.nbytes)


PEERS: dict[str, Peer] = {
    "torch": torch_peer,
    "bitsandbytes": _bitsandbytes,
    "humming": humming.peer,
}


# ---- sweeps ----------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def sweep(
    shapes: Sequence[tuple[int, int]],
    tokens: Sequence[int],
    dtype: str,
    peers: Sequence[Peer],
    ceilings: dict[str, float],
    make_weight: Callable[[int, int], BenchWeight] = BenchWeight,
) -> Iterator[list[Row]]:
    """Rows of one (shape, number of tokens) after the other, in the result file's form."""
    for n, k in shapes:
        weight = make_weight(n, k)
        contenders = list(contenders_of(weight, DTYPES[dtype], peers))
        exact_weight = weight.dense(torch.float32).double()
        for m in tokens:
            x = torch.randn(m, k, device="cuda", dtype=DTYPES[dtype])
            exact = x.double() @ exact_weight.T
            inputs = {c.name: x if c.takes is None else x.to(c.takes) for c in contenders}
            walks = max(1, CALLS // min(len(c.layers) for c in contenders)) if m <= FEW_TOKENS else 1
            calls = {c.name: [lambda f=f, x=inputs[c.name]: f(x) for f in c.layers] * walks for c in contenders}
            us = race(calls, ROUNDS)
            yield [
                _row(weight, c, m, dtype, us[c.name], ceilings)
                | {"rel_err": _error(c.layers[0](inputs[c.name]), exact) if c.comparable else None}
                for c in contenders
            ]


@torch.inference_mode()
def tune(
    shapes: Sequence[tuple[int, int]],
    tokens: Sequence[int],
    dtype: str,
    ceilings: dict[str, float],
    make_weight: Callable[[int, int], BenchWeight] = BenchWeight,
) -> Iterator[list[Row]]:
    """Every shape and cut of every engine that fits, beside the launch table's own choice (variant "table")."""
    library = native.library("cuda")
    for n, k in shapes:
        weight = make_weight(n, k)
        keep = weight.copies()
        structs = [native.describe_weight(weight.spec, *operands) for operands in keep]
        for m in tokens:
            x = torch.randn(m, k, device="cuda", dtype=DTYPES[dtype])
            y = torch.empty(m, n, device="cuda", dtype=DTYPES[dtype])
            variants = {
                name: flags for name, flags in weight.variants(m) if library.linear(structs[0], x, None, y, flags)
            }
            calls: dict[str, list[Callable[[], Any]]] = {}
            for name, flags in variants.items():
                for launch, extra in (("plain", 0), ("pdl", native.DEPENDENT_LAUNCH)):
                    calls[f"{name} {launch}"] = [
                        lambda w=w, f=flags | extra: library.linear(w, x, None, y, f)  # noqa: B023
                        for w in structs
                    ]
            us = race(calls, ROUNDS)
            rows = []
            for key, time in us.items():
                name, launch = key.split(" ")
                contender = Contender("nf4linear", (), weight.nbytes, launch)
                rows.append(_row(weight, contender, m, dtype, time, ceilings) | {"variant": name})
            yield rows


def _row(weight: BenchWeight, c: Contender, m: int, dtype: str, us: float, ceilings: dict[str, float]) -> Row:
    n, k = weight.spec.n, weight.spec.k
    read = c.nbytes / ceilings["read_GBps"] / 1e3
    multiply = 2 * m * n * k / ceilings["bf16_TFLOPs"] / 1e6
    return {
        "op": weight.op,
        "impl": c.impl,
        "format": dtype if c.impl == "torch" else weight.format_names.get(c.impl, weight.format_name),
        "n": n,
        "k": k,
        "m": m,
        "dtype": dtype,
        "launch": c.launch,
        "protocol": "cold-graph",
        "us": us,
        "roof_us": max(read, multiply),
    } | _activations(c, dtype)


def _activations(c: Contender, dtype: str) -> Row:
    """What the contender was given, where that is not the dtype of the comparison."""
    names = {kind: name for name, kind in DTYPES.items()}
    return {} if c.takes in (None, DTYPES[dtype]) else {"activations": names[c.takes]}


def _error(got: Tensor, exact: Tensor) -> float:
    return ((got.double() - exact).norm() / exact.norm()).item()
