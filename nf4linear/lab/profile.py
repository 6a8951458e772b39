"""Nsight Compute over the stages: the counters that say why one is faster than another."""

from __future__ import annotations

import csv
import io
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from . import tables
from .program import ProgramError

# Metric -> row label. A stall is a ratio: warps that wait for this reason at each issue of an instruction.
METRICS = {
    "gpu__time_duration.sum": "time",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "device memory, % of peak",
    "lts__throughput.avg.pct_of_peak_sustained_elapsed": "L2, % of peak",
    "l1tex__throughput.avg.pct_of_peak_sustained_active": "L1 and shared memory, % of peak",
    "sm__inst_issued.avg.pct_of_peak_sustained_active": "issue slots used, %",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "warps resident, %",
    "smsp__inst_executed.sum": "warp instructions",
    "smsp__average_warps_issue_stalled_imc_miss_per_issue_active.ratio": "stall: constant cache",
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio": "stall: global load",
    "smsp__average_warps_issue_stalled_short_scoreboard_per_issue_active.ratio": "stall: shared memory, shuffle",
    "smsp__average_warps_issue_stalled_lg_throttle_per_issue_active.ratio": "stall: queue of loads and stores",
    "smsp__average_warps_issue_stalled_wait_per_issue_active.ratio": "stall: fixed latency",
}


def command(program: Path, weight: Path, stages: Sequence[str], dtype: str) -> list[str]:
    """The ncu command: each stage once. The card's clocks are left as they are found."""
    run = [str(program), str(weight), "--stages", ",".join(stages), "--dtypes", dtype, "--repeats", "0"]
    return ["ncu", "--clock-control", "none", "--csv", "--metrics", ",".join(METRICS), *run]


def script(program: Path, weight: Path, stages: Sequence[str], dtype: str) -> str:
    """The same as a shell script, to keep or to run elsewhere."""
    line = shlex.join(command(program, weight, stages, dtype))
    return f"#!/bin/sh\n# Nsight Compute counters of each stage, as CSV on standard output.\nexec {line}\n"


def profile(program: Path, weight: Path, stages: Sequence[str], dtype: str) -> str:
    """CSV of ncu. Raises ProgramError when ncu is missing or fails."""
    if not shutil.which("ncu"):
        raise ProgramError("ncu is not on PATH; it comes with the CUDA toolkit (Nsight Compute)")
    done = subprocess.run(command(program, weight, stages, dtype), capture_output=True, text=True, check=False)
    if done.returncode:
        raise ProgramError(f"ncu failed:\n{done.stderr or done.stdout}")
    return "\n".join(line for line in done.stdout.splitlines() if line.startswith('"')) + "\n"


def counter_table(text: str) -> str:
    """Markdown of ncu's CSV: a row a counter, a column a kernel."""
    values: dict[str, dict[str, str]] = {}
    for row in csv.DictReader(io.StringIO(text)):
        kernel = _stage_of(row["Kernel Name"])
        values.setdefault(kernel, {})[row["Metric Name"]] = f"{row['Metric Value']} {row['Metric Unit']}".strip(" %")
    lines = [
        (label, *(by_metric.get(metric, "-") for by_metric in values.values())) for metric, label in METRICS.items()
    ]
    return tables.markdown(["counter", *values], lines)


def _stage_of(kernel: str) -> str:
    """Stage of a kernel's full name, such as "void lab::v0<__half>(...)"."""
    name = re.sub(r"[<(].*", "", kernel).split()[-1].split("::")[-1]
    return "v4" if name == "dequantize_kernel" else name
