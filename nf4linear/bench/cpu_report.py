"""What the CPU benchmark writes: one JSON file, and a Markdown table and a plot made from it.

python -m nf4linear.bench.cpu_report benchmarks/results/cpu-linear.json
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

NAMES = {
    "nf4linear": "nf4linear",
    "torch": "torch",
    "bitsandbytes": "bitsandbytes",
    "bitsandbytes_repacked": "bitsandbytes, repacked",  # bfloat16 arithmetic whatever x is
    "dequant_gemm": "dequantize + torch",
}
OPS = {"linear": "NF4, double quantization", "linear_w8": "8 bit, one scale a row"}


def write(record: Row, path: Path, table: Callable[[Row], str] | None = None) -> None:
    """The JSON file, and beside it `table` of it, or the table (.md) and plot (.png) of linear layers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _replace(path, (json.dumps(record, indent=1) + "\n").encode())
    if table:
        _replace(path.with_suffix(".md"), table(record).encode())
    else:
        render(path)


def render(path: Path) -> None:
    """Table and plot of a file of linear layers; no plot where matplotlib is missing."""
    record = json.loads(path.read_text())
    _replace(path.with_suffix(".md"), markdown(record).encode())
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed: no plot")
        return
    matplotlib.use("Agg")
    temporary = path.with_name(f".{path.stem}.png")
    plot(record).savefig(temporary, dpi=120)
    os.replace(temporary, path.with_suffix(".png"))


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_bytes(data)
    os.replace(temporary, path)


def progress_line(op: str, rows: Sequence[Row]) -> str:
    first = rows[0]
    times = ", ".join(f"{row['impl']} {row['dtype']} {row['us']:.0f}" for row in rows)
    return f"{op} {first['n']}x{first['k']} M={first['m']} ({first['rounds']} rounds), us: {times}"


def made_by(record: Row) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    made = f"Made by `{record['command']}` on {record['date']}, commit {record['commit'][:12]}"
    return f"{made}, {record['driver']}; {versions}."


def markdown(record: Row) -> str:
    lines = [
        f"# Linear layers on a CPU ({record['machine']})",
        "",
        f"{made_by(record)} Best memory read rate: {record['ceilings']['read_GBps']:.1f} GB/s.",
        "",
        "Medians of paired rounds, weights cold (see nf4linear/bench/cpu.py). *Faster* is the median of the rounds' "
        "ratios of that time to nf4linear's for the same activations. *Read* is the rate at which the weight's bytes "
        "were consumed, as a share of the rate at which plain memory was read in the same round. *Error* is norm-wise, "
        "against float64 products with the exact float32 weight; bitsandbytes' repacked layer computes in bfloat16 "
        "whatever the activations are.",
    ]
    for op, n, k in sorted({(row["op"], row["n"], row["k"]) for row in record["rows"]}):
        rows = [row for row in record["rows"] if (row["op"], row["n"], row["k"]) == (op, n, k)]
        lines += ["", f"## {OPS[op]}, {n} x {k}", "", "| M | x | implementation | us | faster | read | error |"]
        lines += ["|--:|---|---|--:|--:|--:|--:|"]
        lines += [
            _table_row(row) for row in sorted(rows, key=lambda r: (r["m"], r["dtype"], list(NAMES).index(r["impl"])))
        ]
    return "\n".join(lines) + "\n"


def _table_row(row: Row) -> str:
    faster = "" if row["impl"] == "nf4linear" else f"{row['ours_faster']:.2f}x"
    share = f"{row['read_share']:.0%}" if row["m"] == 1 else ""
    name = NAMES[row["impl"]]
    return f"| {row['m']} | {row['dtype']} | {name} | {row['us']:.0f} | {faster} | {share} | {row['rel_err']:.2e} |"


def plot(record: Row) -> Any:
    """Speed-up over torch's layer of the same activations, one panel a shape and dtype of NF4."""
    from matplotlib.figure import Figure

    nf4 = [row for row in record["rows"] if row["op"] == "linear"]
    panels = sorted({(row["n"], row["k"], row["dtype"]) for row in nf4})
    figure = Figure(figsize=(5 * len(panels), 4), layout="constrained")
    for axes, (n, k, dtype) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        rows = [row for row in nf4 if (row["n"], row["k"], row["dtype"]) == (n, k, dtype)]
        torch_us = {row["m"]: row["us"] for row in rows if row["impl"] == "torch"}
        for impl, name in NAMES.items():
            line = sorted((row["m"], torch_us[row["m"]] / row["us"]) for row in rows if row["impl"] == impl)
            if line:
                axes.plot(*zip(*line, strict=True), marker="o", label=name)
        axes.set(title=f"{n} x {k}, {dtype}", xlabel="M (rows of x)", xscale="log")
        axes.set_xticks(sorted(torch_us), [str(m) for m in sorted(torch_us)])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("times as fast as torch")
    figure.axes[0].legend(fontsize="small")
    figure.suptitle(record["machine"])
    return figure


if __name__ == "__main__":
    render(Path(sys.argv[1]))
