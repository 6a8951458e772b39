"""Nsight Compute over the stages: the counters that say why one is faster than another."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from .program import ProgramError

# Time, the rates of memory, L1/shared and issue, instructions, and the constant cache's replays.
METRICS = (
    "gpu__time_duration.sum",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "l1tex__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__inst_executed.sum",
    "sm__inst_issued.avg.pct_of_peak_sustained_active",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "idc__requests.sum",
    "smsp__average_warps_issue_stalled_imc_miss_per_issue_active.ratio",
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",
    "smsp__average_warps_issue_stalled_lg_throttle_per_issue_active.ratio",
)


def command(program: Path, weight: Path, stage: str, dtype: str) -> list[str]:
    """The ncu command of one stage; clocks are left as they are found."""
    run = [str(program), str(weight), "--stages", stage, "--dtype", dtype, "--repeats", "0"]
    return ["ncu", "--clock-control", "none", "--csv", "--metrics", ",".join(METRICS), *run]


def script(program: Path, weight: Path, stages: Sequence[str], dtype: str) -> str:
    """The same as a shell script, to keep or to run elsewhere."""
    lines = ["#!/bin/sh", "# Nsight Compute counters of each stage, as CSV.", "set -eu"]
    lines += [f"{shlex.join(command(program, weight, stage, dtype))} > {stage}-{dtype}.csv" for stage in stages]
    return "\n".join(lines) + "\n"


def profile(program: Path, weight: Path, stage: str, dtype: str) -> str:
    """CSV of one stage. Raises ProgramError when ncu is missing or fails."""
    if not shutil.which("ncu"):
        raise ProgramError("ncu is not on PATH; it comes with the CUDA toolkit (Nsight Compute)")
    done = subprocess.run(command(program, weight, stage, dtype), capture_output=True, text=True, check=False)
    if done.returncode:
        raise ProgramError(f"ncu failed:\n{done.stderr or done.stdout}")
    return "\n".join(line for line in done.stdout.splitlines() if line.startswith('"')) + "\n"
