"""8-bit conversions: the plain one beside the packed one, and three ways from stored bytes to tensor-core fragments.

The kernels are in csrc/lab/convert.cuh. Counts are machine instructions of a kernel's loop beyond those of the same
loop without a conversion; times are of the whole loop, which also changes its inputs and folds its results (two
instructions for four weights).
"""

from __future__ import annotations

import collections
import ctypes
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import mixed
from ..bench.gpu import race
from . import program, tables

Row = dict[str, Any]

HOWS = ("nothing", "plain", "fast")
CONVERSIONS = ("u8_f16", "s8_f16", "u8_bf16", "s8_bf16")  # in the order of the library's kinds
WAYS = ("narrow loads", "register shuffles", "offline reordering")
# Gain of the packed conversion of U8 to F16, and instructions of both for four values, in the write-up (A100).
PUBLISHED_RATIO, PUBLISHED_COUNTS = 1.6, (10, 6)
SHAPE = (3456, 4096, 2048)  # m, n, k of the published figure
ROUNDS, BLOCKS, LOOP_ROUNDS = 9, 8, 2000


class ConvertLibrary:
    """The built library; every call runs on torch's current stream."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._dll = ctypes.CDLL(str(path))
        pointer, number = ctypes.c_void_p, ctypes.c_int
        self._dll.nf4l_lab_convert_loop.argtypes = (number, pointer, number, number, pointer)
        self._dll.nf4l_lab_convert_once.argtypes = (number, pointer, pointer, number, pointer)
        self._dll.nf4l_lab_product.argtypes = (number, *[pointer] * 3, number, number, number, pointer)
        self.loop_weights = self._dll.nf4l_lab_convert_weights()

    def _check(self, status: int) -> None:
        if status:
            raise program.ProgramError(f"{self.path.name}: CUDA error {status}")

    def loop(self, kind: int, out: Tensor, blocks: int, rounds: int) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        self._check(self._dll.nf4l_lab_convert_loop(kind, out.data_ptr(), blocks, rounds, stream))

    def once(self, kind: int, words: Tensor, out: Tensor) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        self._check(self._dll.nf4l_lab_convert_once(kind, words.data_ptr(), out.data_ptr(), words.numel(), stream))

    def product(self, way: int, w: Tensor, x: Tensor, d: Tensor) -> None:
        (n, m), k = d.shape, x.shape[1]
        stream = torch.cuda.current_stream().cuda_stream
        self._check(self._dll.nf4l_lab_product(way, w.data_ptr(), x.data_ptr(), d.data_ptr(), n, m, k, stream))


def kind_of(how: str, conversion: str) -> int:
    return 4 * HOWS.index(how) + CONVERSIONS.index(conversion)


def build(folder: Path, architecture: str | None = None) -> ConvertLibrary:
    """Build csrc/lab into `folder`/build and open the conversion library."""
    built = program.build(folder, architecture).parent / "libnf4l_convert.so"
    return ConvertLibrary(built)


# ---- checks ----------------------------------------------------------------------------------------------------------


def wrong_conversions(library: ConvertLibrary) -> list[str]:
    """Conversions that are not exact for every pair of codes, by name."""
    pairs = torch.arange(1 << 16, dtype=torch.int32, device="cuda")
    words = pairs | pairs.flip(0) << 16
    wrong = []
    for conversion in CONVERSIONS:
        narrow, wide = conversion.split("_")
        bias = 128 if narrow == "s8" else 0
        want = (words.view(torch.uint8).to(torch.int32) - bias).to(mixed.WIDE[wide])
        for how in ("plain", "fast"):
            out = torch.zeros(2 * words.numel(), dtype=torch.int32, device="cuda")
            library.once(kind_of(how, conversion), words, out)
            if not torch.equal(out.view(mixed.WIDE[wide]), want):
                wrong.append(f"{how} {conversion}")
    return wrong


@dataclass
class Operands:
    """u8 [n, k] in row order and in kernel order, f16 [m, k], and the product d [n, m] to be written."""

    rows: Tensor
    tiles: Tensor
    x: Tensor
    d: Tensor

    @staticmethod
    def random(n: int, m: int, k: int) -> Operands:
        rows = torch.randint(0, 256, (n, k), dtype=torch.uint8, device="cuda")
        x = torch.randn(m, k, dtype=torch.float16, device="cuda")
        tiles = mixed.reorder_a(rows).qweight
        return Operands(rows, tiles, x, torch.empty(n, m, dtype=torch.float16, device="cuda"))

    def multiply(self, library: ConvertLibrary, way: int) -> None:
        library.product(way, self.tiles if WAYS[way] == "offline reordering" else self.rows, self.x, self.d)


def wrong_products(library: ConvertLibrary) -> list[str]:
    """Ways whose product differs from float64's by more than rounding."""
    case = Operands.random(256, 384, 448)
    exact = case.rows.double() @ case.x.double().T
    wrong = []
    for way, name in enumerate(WAYS):
        case.d.fill_(torch.nan)
        case.multiply(library, way)
        if not (case.d.double() - exact).norm() <= 2**-11 * exact.norm():
            wrong.append(name)
    return wrong


# ---- measurements ----------------------------------------------------------------------------------------------------


def conversion_rows(library: ConvertLibrary) -> list[Row]:
    """Nanoseconds for a million weights on the whole GPU; instructions for four weights where they can be counted."""
    blocks = torch.cuda.get_device_properties(0).multi_processor_count * BLOCKS
    out = torch.zeros(blocks * 256, dtype=torch.int32, device="cuda")

    def call(how: str, conversion: str):
        return lambda: library.loop(kind_of(how, conversion), out, blocks, LOOP_ROUNDS)

    calls = {(how, conversion): [call(how, conversion)] for conversion in CONVERSIONS for how in HOWS}
    us = race(calls, ROUNDS)
    counts = instruction_counts(library)
    weights = blocks * 256 * LOOP_ROUNDS * library.loop_weights
    return [
        {
            "op": "convert", "conversion": conversion, "how": how, "ns_per_million": time / weights * 1e9,
            "instructions_for_four": counts.get((how, conversion)),
        }
        for (how, conversion), time in us.items()
    ]  # fmt: skip


def product_rows(library: ConvertLibrary, shape: tuple[int, int, int] = SHAPE) -> list[Row]:
    """TFLOP/s of each way on u8 [m, k] times f16 [k, n], beside torch's float16 product of the same shape."""
    m, n, k = shape
    cases = [Operands.random(m, n, k) for _ in range(4)]
    dense = [case.rows.half() for case in cases]
    calls = {
        name: [lambda case=case, way=way: case.multiply(library, way) for case in cases]
        for way, name in enumerate(WAYS)
    }
    calls["torch f16 x f16"] = [
        lambda case=case, a=a: torch.mm(a, case.x.t(), out=case.d) for case, a in zip(cases, dense, strict=True)
    ]
    us = race(calls, ROUNDS)
    return [
        {"op": "conformance", "way": way, "m": m, "n": n, "k": k, "us": time, "TFLOPs": 2 * m * n * k / time / 1e6}
        for way, time in us.items()
    ]


def _tool(name: str) -> str | None:
    wheels = [str(path) for path in Path(sysconfig.get_path("purelib")).glob("nvidia/cu*/bin")]
    return shutil.which(name) or shutil.which(name, path=":".join([*wheels, "/usr/local/cuda/bin"]))


def instruction_counts(library: ConvertLibrary) -> dict[tuple[str, str], float]:
    """Machine instructions a conversion adds to its loop, for four weights; nothing without cuobjdump."""
    cuobjdump = _tool("cuobjdump")
    if cuobjdump is None:
        return {}
    done = subprocess.run([cuobjdump, "-sass", str(library.path)], capture_output=True, text=True, check=False)
    return counts_of(done.stdout, library.loop_weights)


def counts_of(sass: str, loop_weights: int) -> dict[tuple[str, str], float]:
    """The same from a disassembly; loops are unrolled over their words, so differences of whole kernels count them."""
    totals: dict[tuple[str, str], int] = {}
    for name, code in re.findall(r"Function : (\S+)\n(.*?)(?=Function : |\Z)", sass, re.DOTALL):
        if not (found := re.search(r"convert_loopILNS0_3HowE(\d)E(6__half|13__nv_bfloat16)NS_4W8([SU])8", name)):
            continue
        how, wide, sign = found.groups()
        conversion = f"{sign.lower()}8_{'f16' if wide == '6__half' else 'bf16'}"
        opcodes = collections.Counter(re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9]+)", code))
        totals[HOWS[int(how)], conversion] = sum(n for op, n in opcodes.items() if op not in ("NOP", "BRA", "EXIT"))
    return {
        (how, conversion): (total - totals["nothing", conversion]) / (loop_weights / 4)
        for (how, conversion), total in totals.items()
        if how != "nothing" and ("nothing", conversion) in totals
    }


# ---- tables ----------------------------------------------------------------------------------------------------------


def report(rows: Sequence[Row]) -> str:
    """Both tables as Markdown, made from the rows."""
    by = {(row["how"], row["conversion"]): row for row in rows if row["op"] == "convert"}
    cells = []
    for conversion in dict.fromkeys(conversion for _, conversion in by):
        plain, fast = by["plain", conversion], by["fast", conversion]
        counts = [row["instructions_for_four"] for row in (plain, fast)]
        published = f"{PUBLISHED_RATIO}x, {PUBLISHED_COUNTS[0]} and {PUBLISHED_COUNTS[1]} instructions"
        cells.append(
            (
                conversion.replace("_", " -> "),
                *("-" if count is None else f"{count:.2f}" for count in counts),
                *(f"{row['ns_per_million']:.1f}" for row in (plain, fast)),
                f"{plain['ns_per_million'] / fast['ns_per_million']:.2f}x",
                published if conversion == "u8_f16" else "-",
            )
        )
    header = (
        "conversion", "plain, instructions for 4", "packed, instructions for 4", "plain, ns a million",
        "packed, ns a million", "gain", "published (A100)",
    )  # fmt: skip
    text = tables.markdown(header, cells)
    ways = [row for row in rows if row["op"] == "conformance"]
    if ways:
        fastest = max(row["TFLOPs"] for row in ways if row["way"] in WAYS)
        cells = [(r["way"], f"{r['us']:.1f}", f"{r['TFLOPs']:.0f}", f"{r['TFLOPs'] / fastest:.2f}") for r in ways]
        shape = f"u8 [{ways[0]['m']}, {ways[0]['k']}] x f16 [{ways[0]['k']}, {ways[0]['n']}]"
        text += "\n" + tables.markdown((shape, "us", "TFLOP/s", "of the best way"), cells)
    return text
