"""Tables and plots of the linear benchmark, made from its rows and nothing else."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from .gpu import Row
from .record import made_by

NAMES = {
    ("nf4linear", "plain"): "nf4linear",
    ("nf4linear", "pdl"): "nf4linear, dependent",
    ("dequant_gemm", "plain"): "dequantize + GEMM",
    ("torch", "plain"): "torch, 16 bit",
    ("bitsandbytes", "plain"): "bitsandbytes",
    ("humming", "plain"): "humming",
}


def markdown(record: Row) -> str:
    """One table a shape: microseconds of every contender, and how ours stands to the roof and to the best other."""
    ceilings = record["ceilings"]
    lines = [
        f"# {_kind(record['rows'])} linear layers on {record['machine']}",
        "",
        made_by(record),
        "",
        "Microseconds a call, median; cold weights (copies beyond four times the L2), CUDA graphs, contenders in "
        f"turns. Roof: the weight's bytes at {ceilings['read_GBps'] / 1e3:.2f} TB/s (a sum over 2 GiB) or the "
        f"multiplications at {ceilings['bf16_TFLOPs']:.0f} TFLOP/s (torch, 8192^3), whichever is longer. *Dependent* "
        "is programmatic dependent launch, which no peer uses; *faster* compares plain launches with the fastest peer. "
        "Error: relative, Frobenius norm, against a float64 product with the exact float32 weight."
        + _other_activations(record["rows"]),
    ]
    for n, k, dtype in dict.fromkeys((row["n"], row["k"], row["dtype"]) for row in record["rows"]):
        rows = [row for row in record["rows"] if (row["n"], row["k"], row["dtype"]) == (n, k, dtype)]
        lines += ["", f"## {n} x {k}, {dtype}", "", *_shape_table(rows)]
    return "\n".join(lines) + "\n"


def _other_activations(rows: Sequence[Row]) -> str:
    """A sentence for each contender that was given activations of another dtype than those it is compared with."""
    given = {(row["impl"], row["launch"]): row["activations"] for row in rows if "activations" in row}
    return "".join(f" {NAMES[kind]} is given {dtype} activations: it takes no others." for kind, dtype in given.items())


def _kind(rows: Sequence[Row]) -> str:
    return "8-bit" if rows[0]["op"] == "linear_w8" else "NF4"


def _shape_table(rows: Sequence[Row]) -> list[str]:
    kinds = [kind for kind in NAMES if any((row["impl"], row["launch"]) == kind for row in rows)]
    header = ["M", "roof", *(NAMES[kind] for kind in kinds), "of roof", "faster", "error", "error of bitsandbytes"]
    lines = ["| " + " | ".join(header) + " |", "|" + "--:|" * len(header)]
    for m in dict.fromkeys(row["m"] for row in rows):
        cells = {(row["impl"], row["launch"]): row for row in rows if row["m"] == m}
        ours = cells["nf4linear", "plain"]
        peers = [row["us"] for (impl, _), row in cells.items() if impl not in ("nf4linear", "dequant_gemm")]
        line = [
            str(m),
            f"{ours['roof_us']:.1f}",
            *(f"{cells[kind]['us']:.1f}" if kind in cells else "-" for kind in kinds),
            f"{100 * ours['roof_us'] / ours['us']:.0f} %",
            f"{min(peers) / ours['us']:.2f}x" if peers else "-",
            _scientific(ours),
            _scientific(cells.get(("bitsandbytes", "plain"))),
        ]
        lines.append("| " + " | ".join(line) + " |")
    return lines


def _scientific(row: Row | None) -> str:
    return "-" if row is None or row["rel_err"] is None else f"{row['rel_err']:.2e}"


def tune_markdown(record: Row) -> str:
    """The fastest variants of each cell, plain | dependent, and what the launch table takes."""
    lines = ["| N x K | M | roof | table | fastest, plain | fastest, dependent |", "|---|--:|--:|--:|---|---|"]
    for n, k, m in dict.fromkeys((row["n"], row["k"], row["m"]) for row in record["rows"]):
        times: dict[str, dict[str, float]] = {}
        rows = [row for row in record["rows"] if (row["n"], row["k"], row["m"]) == (n, k, m)]
        for row in rows:
            times.setdefault(row["variant"], {})[row["launch"]] = row["us"]
        cells = [f"{n} x {k}", str(m), f"{rows[0]['roof_us']:.1f}"]
        cells.append(_pair(times.pop("table")) if "table" in times else "-")
        for launch in ("plain", "pdl"):
            best = sorted(times, key=lambda variant: times[variant][launch])[:4]
            cells.append(", ".join(f"{variant} {_pair(times[variant])}" for variant in best) or "-")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _pair(us: dict[str, float]) -> str:
    return f"{us['plain']:.2f} \\| {us['pdl']:.2f}"


def plot(record: Row) -> bytes:
    """PNG: microseconds against M, a panel for each shape, log-log, with the roof."""
    from matplotlib.figure import Figure

    rows = [row for row in record["rows"] if row["dtype"] == record["rows"][0]["dtype"]]
    shapes = list(dict.fromkeys((row["n"], row["k"]) for row in rows))
    columns = min(3, len(shapes))
    height = -(-len(shapes) // columns)
    figure = Figure(figsize=(5 * columns, 3.8 * height), layout="constrained")
    panels = figure.subplots(height, columns, squeeze=False).flatten()
    for panel, (n, k) in zip(panels, shapes, strict=False):
        _panel(panel, [row for row in rows if (row["n"], row["k"]) == (n, k)], f"{n} x {k}")
    for panel in panels[len(shapes) :]:
        panel.set_visible(False)
    panels[0].legend(fontsize=8)
    figure.suptitle(f"{_kind(rows)} linear layers, {record['machine']}, {rows[0]['dtype']}, cold weights")
    data = io.BytesIO()
    figure.savefig(data, dpi=120, format="png")
    return data.getvalue()


def _panel(panel: Any, rows: Sequence[Row], title: str) -> None:
    for kind, name in NAMES.items():
        line = [(row["m"], row["us"]) for row in rows if (row["impl"], row["launch"]) == kind]
        if line:
            ours = kind[0] == "nf4linear"
            style = {"linewidth": 2.2 if ours else 1.2, "linestyle": "--" if kind[1] == "pdl" else "-"}
            panel.plot(*zip(*line, strict=True), marker="o", markersize=3, label=name, **style)
    roof = [(row["m"], row["roof_us"]) for row in rows if (row["impl"], row["launch"]) == ("nf4linear", "plain")]
    panel.plot(*zip(*roof, strict=True), color="black", linestyle=":", label="roof")
    panel.set(xscale="log", yscale="log", title=title, xlabel="M (tokens)", ylabel="us")
    panel.set_xscale("log", base=2)
    panel.grid(True, which="major", alpha=0.3)
