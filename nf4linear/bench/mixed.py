"""The eight products of a 16-bit and an 8-bit matrix beside torch's two of 16-bit ones: TFLOP/s, one bar each.

The first shape is that of the published figure (m = 3456, n = 4096, k = 2048); the others show where weights, tokens or
both are many. Every contender multiplies the same values: the 16-bit second operand of the plain ones is the 8-bit
one converted. Operands rotate over copies, and contenders take turns (gpu.race).
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .. import mixed
from .gpu import Row, race
from .record import made_by

PUBLISHED_SHAPE = (3456, 4096, 2048)  # m, n, k
SHAPES = (
    PUBLISHED_SHAPE, (1024, 4096, 4096), (4096, 4096, 4096), (4096, 14336, 4096), (4096, 4096, 14336),
    (8192, 8192, 8192),
)  # fmt: skip
PLAIN = ("f16_f16", "bf16_bf16")
ROUNDS = 9
COPIES = 3


def operands(variant: str, m: int, n: int, k: int, seed: int) -> tuple[Tensor | mixed.NarrowOperand, ...]:
    """a [m, k] and b [k, n] as the variant takes them, b read along k; the narrow one in kernel order."""
    generator = torch.Generator("cuda").manual_seed(seed)
    pair = []
    for kind, rows in zip(variant.split("_"), (m, n), strict=True):
        first = not pair
        if kind in mixed.WIDE:
            # A sixteenth keeps float16 sums over 14336 products with codes up to 255 finite.
            matrix = (torch.randn(rows, k, generator=generator, device="cuda") / 16).to(mixed.WIDE[kind])
            pair.append(matrix if first else matrix.t())
        else:
            codes = torch.randint(0, 256, (rows, k), dtype=torch.uint8, generator=generator, device="cuda")
            codes = codes.view(torch.int8) if kind == "s8" else codes
            pair.append(mixed.reorder_a(codes) if first else mixed.reorder_b(codes.t()))
    return tuple(pair)


def dense(operand: Tensor | mixed.NarrowOperand) -> Tensor:
    return operand.dense() if isinstance(operand, mixed.NarrowOperand) else operand


def _multiply(variant: str, a, b) -> Tensor:
    return torch.mm(a, b) if variant in PLAIN else mixed.matmul(a, b)


@torch.inference_mode()
def sweep(shapes: Sequence[tuple[int, int, int]], variants: Sequence[str]) -> Iterator[list[Row]]:
    """Rows of one shape after the other, the plain products first."""
    for m, n, k in shapes:
        chosen = [*PLAIN, *variants]
        given = {v: [operands(v, m, n, k, seed) for seed in range(COPIES)] for v in chosen}
        us = race(
            {v: [lambda v=v, pair=pair: _multiply(v, *pair) for pair in pairs] for v, pairs in given.items()}, ROUNDS
        )
        yield [_row(variant, m, n, k, us, given[variant][0]) for variant in chosen]


def _row(variant: str, m: int, n: int, k: int, us: dict[str, float], pair) -> Row:
    wide = next(kind for kind in variant.split("_") if kind in mixed.WIDE)
    rows = slice(0, 256)  # of the result, for its error
    a, b = (dense(operand).double() for operand in pair)
    exact, got = a[rows] @ b, _multiply(variant, *pair)[rows].double()
    return {
        "op": "mixed", "impl": "torch" if variant in PLAIN else "nf4linear", "variant": variant, "m": m, "n": n, "k": k,
        "dtype": {"f16": "fp16"}.get(wide, wide), "launch": "plain", "protocol": "cold-graph",
        "us": us[variant], "TFLOPs": 2 * m * n * k / us[variant] / 1e6,
        "of_plain": us[f"{wide}_{wide}"] / us[variant], "rel_err": ((got - exact).norm() / exact.norm()).item(),
    }  # fmt: skip


# ---- report ----------------------------------------------------------------------------------------------------------


def markdown(record: Row) -> str:
    """One table: TFLOP/s of every variant and shape, and in brackets its share of torch's product of the same type."""
    rows = record["rows"]
    shapes = list(dict.fromkeys((row["m"], row["n"], row["k"]) for row in rows))
    header = ["variant", *(f"{m} x {n} x {k}" for m, n, k in shapes), "error"]
    lines = [
        f"# Mixed-input products on {record['machine']}", "",
        made_by(record), "",
        "TFLOP/s of m x n x k, median; in brackets the speed in units of torch's (cuBLAS) product of two matrices of "
        "the same 16-bit type in the same run. f16_s8: float16 first operand, int8 second one, and so on; float32 "
        "sums. Error: relative, Frobenius norm, against float64.", "",
        "| " + " | ".join(header) + " |", "|" + "---|" * len(header),
    ]  # fmt: skip
    for variant in dict.fromkeys(row["variant"] for row in rows):
        by_shape = {(row["m"], row["n"], row["k"]): row for row in rows if row["variant"] == variant}
        cells = [_cell(by_shape.get(shape)) for shape in shapes]
        error = max(row["rel_err"] for row in by_shape.values() if row["rel_err"] is not None)
        lines.append("| " + " | ".join([variant, *cells, f"{error:.1e}"]) + " |")
    return "\n".join(lines) + "\n"


def _cell(row: Row | None) -> str:
    return "-" if row is None else f"{row['TFLOPs']:.0f} ({row['of_plain']:.2f})"


def plot(record: Row) -> bytes:
    """PNG: a bar for each variant at the first shape."""
    from matplotlib.figure import Figure

    first = record["rows"][0]
    shape = (first["m"], first["n"], first["k"])
    rows = [row for row in record["rows"] if (row["m"], row["n"], row["k"]) == shape]
    figure = Figure(figsize=(9, 4.2), layout="tight")
    panel = figure.subplots()
    colors = ["#888888" if row["variant"] in PLAIN else "#2a6fb0" for row in rows]
    bars = panel.bar([row["variant"] for row in rows], [row["TFLOPs"] for row in rows], color=colors)
    panel.bar_label(bars, fmt="%.0f", fontsize=8)
    panel.tick_params(axis="x", labelrotation=30)
    panel.set(ylabel="TFLOP/s", title=f"m={shape[0]}, n={shape[1]}, k={shape[2]}, {record['machine']}")
    panel.grid(True, axis="y", alpha=0.3)
    data = io.BytesIO()
    figure.savefig(data, dpi=120, format="png")
    return data.getvalue()
