"""The experiments of `nf4linear lab`: correctness of every stage, the ladder, and V4 beside bitsandbytes over sizes.

Each takes `progress`, a wrapper of an iterable (rich's track, for one), so that long work shows how far it is.
"""

from __future__ import annotations

import datetime
import json
import platform
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..bench import record
from . import bench, generate, program, tables, verify
from .bench import Repeats, Row
from .generate import Case

Progress = Callable[[Sequence[Any], str], Iterable[Any]]

# The report's shapes, and one that is a multiple of nothing.
CORRECTNESS = ((4096, 4096), (2047, 4096), (1023, 1001))
SIZES = ((1024, 1024), (2048, 2048), (4096, 4096), (4096, 14336), (8192, 8192), (57344, 8192))


def correctness(
    cases: Sequence[Case], dtypes: Sequence[str], folder: Path, progress: Progress
) -> tuple[str, list[str]]:
    """(Markdown table, names of the outputs that failed): every stage's output against the reference output."""
    built = program.find(folder)
    cells, failed = [], []
    for case in progress(cases, "comparing"):
        generate.generate(case, folder, dtypes)
        program.run_stages(built, case.weight_path(folder), program.STAGES, dtypes, output=folder / case.name)
        for dtype in dtypes:
            wanted = generate.read_raw(case.reference_path(folder, dtype), case, dtype)
            for stage in program.STAGES:
                output = folder / f"{case.name}-{stage}-{dtype}.raw"
                errors = verify.compare(generate.read_raw(output, case, dtype), wanted)
                output.unlink()
                if not errors.exact:
                    failed.append(f"{stage} {dtype} {case.name}")
                cells.append((f"{case.rows} x {case.columns}", dtype, stage, *errors.cells()))
    return tables.markdown(["shape", "dtype", "stage", *verify.HEADER], cells), failed


def ladder_rows(case: Case, dtypes: Sequence[str], times: Repeats, folder: Path, ceiling: float) -> list[Row]:
    """Every stage, each optimisation alone and bitsandbytes, in each dtype and by both protocols."""
    generate.generate(case, folder, ())
    ours = bench.stage_rows(case, folder, program.STAGES, dtypes, times, ceiling)
    return ours + bench.bitsandbytes_rows(case, folder, dtypes, times, ceiling)


def sweep_rows(
    cases: Sequence[Case], dtypes: Sequence[str], times: Repeats, folder: Path, ceiling: float, progress: Progress
) -> list[Row]:
    """V4 and bitsandbytes on each case, in each dtype and by both protocols."""
    found = []
    for case in progress(cases, "sizes"):
        generate.generate(case, folder, ())
        found += bench.stage_rows(case, folder, ("v4",), dtypes, times, ceiling)
        found += bench.bitsandbytes_rows(case, folder, dtypes, times, ceiling)
    return found


def write_results(stem: Path, ladder: Sequence[Row], sweep: Sequence[Row], ceiling: float) -> str:
    """Write `stem`.json, .md and .png, the last two made from the first; returns the Markdown."""
    rows = [row | {"table": "ladder"} for row in ladder] + [row | {"table": "sizes"} for row in sweep]
    record.write_record(stem.with_suffix(".json"), environment(ceiling) | {"rows": rows})
    return write_tables(stem)


def write_tables(stem: Path) -> str:
    """Write `stem`.md and .png from `stem`.json; returns the Markdown."""
    made = json.loads(stem.with_suffix(".json").read_text())
    text = results_text(made)
    record.write(stem.with_suffix(".md"), text.encode())
    idle = [row for row in made["rows"] if row["table"] == "ladder" and row["protocol"] == "idle-events"]
    tables.ladder_chart(stem.with_suffix(".png"), idle, f"NF4 dequantize, {idle[0]['n']} x {idle[0]['k']}, idle-events")
    return text


def results_text(made: Row) -> str:
    """A result file as Markdown: what it was made with, and all tables."""
    rows = made["rows"]
    ladder = [row for row in rows if row["table"] == "ladder"]
    sections = [f"{made['machine']}, driver {made['driver']}: {record.made_by(made)}\n"]
    for dtype, protocol in dict.fromkeys((row["dtype"], row["protocol"]) for row in ladder):
        chosen = [row for row in ladder if (row["dtype"], row["protocol"]) == (dtype, protocol)]
        shown = [row for row in chosen if row["impl"] in (*program.LADDER, "bitsandbytes")]
        title = f"### Ladder, {chosen[0]['n']} x {chosen[0]['k']}, {dtype}, {protocol}"
        sections.append(f"{title}\n\n{tables.ladder_table(shown)}")
        sections.append(f"Each optimisation alone and in the ladder:\n\n{tables.interaction_table(chosen)}")
    if sizes := [row for row in rows if row["table"] == "sizes"]:
        sections.append(f"### V4 beside bitsandbytes\n\n{tables.sweep_table(sizes)}")
    return "\n".join(sections)


def environment(ceiling: float) -> Row:
    """Machine, driver, versions, command, date and commit of a result file."""
    import bitsandbytes

    return {
        "machine": torch.cuda.get_device_name(0),
        "driver": record.first_line_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "bitsandbytes": bitsandbytes.__version__,
        },
        "command": shlex.join(["nf4linear", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "commit": record.commit(),
        "ceilings": {"copy_GBps": ceiling},
    }
