"""What the CPU benchmark makes of a record: Markdown and a plot."""

from __future__ import annotations

import io
from collections.abc import Sequence

from .record import Row

NAMES = {
    "nf4linear": "nf4linear",
    "torch": "torch",
    "bitsandbytes": "bitsandbytes",
    "bitsandbytes_repacked": "bitsandbytes, repacked",  # bfloat16 arithmetic whatever x is
    "dequant_gemm": "dequantize + torch",
}
OPS = {"linear": "NF4, double quantization", "linear_w8": "8 bit, one scale a row"}


def progress_line(rows: Sequence[Row]) -> str:
    first = rows[0]
    times = ", ".join(f"{row['impl']} {row['dtype']} {row['us']:.0f}" for row in rows)
    return f"{first['op']} {first['n']}x{first['k']} M={first['m']} ({first['rounds']} rounds), us: {times}"


def made_by(record: Row) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    commit = f", commit {record['commit'][:12]}" if record["commit"] else ""
    made = f"Made by `{record['command']}` on {record['date']}{commit}, {record['driver']}; {versions}"
    return f"{made}; load of the machine in the last five minutes of it {record['load']:.1f}."


def markdown(record: Row) -> str:
    lines = [
        f"# Linear layers on a CPU ({record['machine']})",
        "",
        f"{made_by(record)} Best memory read rate: {record['ceilings']['read_GBps']:.1f} GB/s.",
        "",
        "Medians of paired rounds, weights cold (see nf4linear/bench/cpu.py). *Faster* is the median of the rounds' "
        "ratios of that time to nf4linear's for the same activations. *Read* is the rate at which the weight's bytes "
        "were consumed, as a share of the rate at which plain memory was read in the same round. *Error* is norm-wise, "
        "against float64 products with the exact float32 weight. *fp32-medium*: float32 activations after "
        "`torch.set_float32_matmul_precision('medium')`, which allows products in bfloat16; bitsandbytes' repacked "
        "layer computes in bfloat16 whatever the activations are and whatever is allowed.",
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


def plot(record: Row) -> bytes:
    """PNG: speed-up over torch's layer of the same activations, a panel for each shape and dtype of NF4."""
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
    data = io.BytesIO()
    figure.savefig(data, dpi=120, format="png")
    return data.getvalue()
