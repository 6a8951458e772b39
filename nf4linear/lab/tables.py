"""Tables and the bar chart of measured rows: everything shown is made from the rows, nothing is typed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from pathlib import Path

from .bench import Row
from .program import LADDER

# The speed-ups over V0 of the published ladder (A100-SXM4-80GB, 4096 x 4096, fp16, blocksize 64).
PUBLISHED = {"v0": 1.00, "v1": 1.44, "v2": 1.75, "v3": 2.64}
# The published interactions, which come from unrounded times: the rounded speed-ups would give 1.11 and 1.46.
PUBLISHED_INTERACTION = {"v1": 1.00, "v2": 1.12, "v3": 1.48}
# Ladder step, the stage before it, and the same optimisation alone on V0.
STEPS = (("v1", "v0", "v1"), ("v2", "v1", "vectors_alone"), ("v3", "v2", "shifts_alone"))


def require_matplotlib() -> None:
    """Raise ValueError unless a chart can be drawn: better before a long measurement than after it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("the chart needs matplotlib: pip install 'nf4linear[bench]'")


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def ladder_table(rows: Sequence[Row]) -> str:
    """Rows of one size, dtype and protocol, V0 among them; with bitsandbytes' row the last column is filled."""
    us = {row["impl"]: row["us"] for row in rows}
    header = ["stage", "median us", "GB/s", "share of copy roof", "over V0", "published (A100)", "over bitsandbytes"]
    cells = []
    for row in rows:
        published = f"{PUBLISHED[row['impl']]:.2f}" if row["impl"] in PUBLISHED else "-"
        over_bnb = f"{us['bitsandbytes'] / row['us']:.2f}" if "bitsandbytes" in us else "-"
        share = f"{100 * row['roof_us'] / row['us']:.0f} %"
        cells.append(
            (
                row["impl"],
                f"{row['us']:.1f}",
                f"{row['gb_per_s']:.0f}",
                share,
                f"{us['v0'] / row['us']:.2f}",
                published,
                over_bnb,
            )
        )
    return markdown(header, cells)


def interaction_table(rows: Sequence[Row]) -> str:
    """Gain of each optimisation in the ladder over its gain alone on V0: above 1, the optimisations help each other."""
    us = {row["impl"]: row["us"] for row in rows}
    cells = []
    for stage, before, alone in STEPS:
        in_ladder, by_itself = us[before] / us[stage], us["v0"] / us[alone]
        figures = (by_itself, in_ladder, in_ladder / by_itself, PUBLISHED_INTERACTION[stage])
        cells.append((stage, *(f"{figure:.2f}" for figure in figures)))
    return markdown(["optimisation of", "alone on V0", "in the ladder", "interaction", "published (A100)"], cells)


def sweep_table(rows: Sequence[Row]) -> str:
    """V4 beside bitsandbytes, a line for each size, dtype and protocol."""
    paired: dict[tuple, dict[str, Row]] = {}
    for row in rows:
        paired.setdefault((row["n"], row["k"], row["dtype"], row["protocol"]), {})[row["impl"]] = row
    cells = []
    for (n, k, dtype, protocol), by_impl in paired.items():
        ours, theirs = by_impl["v4"], by_impl["bitsandbytes"]
        share = f"{100 * ours['roof_us'] / ours['us']:.0f} %"
        ratio = f"{theirs['us'] / ours['us']:.2f}"
        cells.append(
            (
                f"{n} x {k}",
                dtype,
                protocol,
                f"{ours['roof_us']:.1f}",
                f"{ours['us']:.1f}",
                share,
                f"{theirs['us']:.1f}",
                ratio,
            )
        )
    header = [
        "N x K",
        "dtype",
        "protocol",
        "roof us",
        "v4 us",
        "v4 share of roof",
        "bitsandbytes us",
        "v4 over bitsandbytes",
    ]
    return markdown(header, cells)


def ladder_chart(path: Path, rows: Sequence[Row], title: str) -> None:
    """PNG of the stages' medians, one bar a dtype."""
    from matplotlib.figure import Figure

    stages = [stage for stage in (*LADDER, "bitsandbytes") if any(row["impl"] == stage for row in rows)]
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    us = {(row["impl"], row["dtype"]): row["us"] for row in rows}
    figure = Figure(figsize=(8, 4), layout="tight")
    axes = figure.subplots()
    width = 0.8 / len(dtypes)
    for index, dtype in enumerate(dtypes):
        places = [i + (index - (len(dtypes) - 1) / 2) * width for i in range(len(stages))]
        bars = axes.bar(places, [us[stage, dtype] for stage in stages], width, label=dtype)
        axes.bar_label(bars, fmt="%.0f", fontsize=8)
    axes.set_xticks(range(len(stages)), stages)
    axes.set_ylabel("median, microseconds")
    axes.set_title(title)
    axes.legend()
    figure.savefig(path, dpi=120)
