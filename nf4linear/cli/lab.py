"""nf4linear lab: the dequantize ladder V0..V4 and the 8-bit conversions, built, tested, measured and profiled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track

from ..bench.gpu import record_of
from ..bench.record import write_record
from ..lab import bench as bench_step
from ..lab import convert as convert_step
from ..lab import experiment, program
from ..lab import generate as generate_step
from ..lab import profile as profile_step
from ..lab import tables as chart
from ..lab.bench import Repeats
from ..lab.generate import DTYPES, Case
from .output import errors_to_exit

lab = typer.Typer(
    help="The dequantize ladder: the published stages V0..V3, and V4 beside them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
console = Console(stderr=True)

Rows = Annotated[int, typer.Option(min=1, help="Rows of the weight (out_features).")]
Columns = Annotated[int, typer.Option(min=1, help="Columns of the weight (in_features).")]
Blocksize = Annotated[int, typer.Option(help="Weights a scale: a power of two, 32 to 4096.")]
Dtype = Annotated[list[str] | None, typer.Option(help="fp32, fp16 or bf16; may be repeated.", show_default="all")]
Tables = Annotated[str, typer.Option(help="Type of the second-level tables in the file: fp32 or fp16.")]
Folder = Annotated[Path, typer.Option(help="Where files and the program go.")]
Warmup = Annotated[int, typer.Option(min=0, help="Launches before the measured ones.")]
Repeat = Annotated[int, typer.Option(min=1, help="Measured launches.")]
Arch = Annotated[str | None, typer.Option(help="CUDA architecture such as 90.", show_default="this GPU's")]
Output = Annotated[Path | None, typer.Option(help="Stem of the files.", show_default="FOLDER/dequant")]
Sweep = Annotated[bool, typer.Option(help="Also V4 beside bitsandbytes over six sizes.")]
FOLDER = Path("build/lab")


def _dtypes(chosen: Sequence[str] | None) -> tuple[str, ...]:
    if unknown := sorted(set(chosen or ()) - set(DTYPES)):
        raise ValueError(f"--dtype takes {', '.join(DTYPES)}; got {', '.join(unknown)}")
    return tuple(chosen or DTYPES)


def _need_gpu() -> None:
    if not torch.cuda.is_available():
        raise ValueError(
            "this step runs kernels and needs an NVIDIA GPU; `generate` and `build --arch 90` work without one"
        )


def _progress(items: Sequence[Any], description: str) -> Iterable[Any]:
    return track(items, description, console=console)


@lab.command()
def generate(
    rows: Rows = 4096,
    columns: Columns = 4096,
    blocksize: Blocksize = 64,
    dtype: Dtype = None,
    tables: Tables = "fp32",
    folder: Folder = FOLDER,
    seed: Annotated[int, typer.Option(help="Of the random weight.")] = 0,
) -> None:
    """Quantize random weights with bitsandbytes; write the binary file and the reference output."""
    with errors_to_exit(console):
        case = Case(rows, columns, blocksize, tables, seed)
        made = generate_step.generate(case, folder, _dtypes(dtype))
        who = f"quantized by {made['quantized_by']}, reference output by {made['reference_by']}"
        console.print(f"{case.weight_path(folder)}: {who}", soft_wrap=True, highlight=False)


@lab.command()
def build(folder: Folder = FOLDER, arch: Arch = None) -> None:
    """Build the stand-alone C++ program with CMake."""
    with errors_to_exit(console):
        console.print(f"built {program.build(folder, arch)}", soft_wrap=True, highlight=False)


@lab.command()
def test(
    rows: Annotated[int | None, typer.Option(min=1, show_default="the report's cases")] = None,
    columns: Columns = 4096,
    blocksize: Blocksize = 64,
    dtype: Dtype = None,
    tables: Tables = "fp32",
    folder: Folder = FOLDER,
) -> None:
    """Compare every stage's output with the reference: a table of errors; exit status 1 unless all bits are equal."""
    with errors_to_exit(console):
        _need_gpu()
        shapes = experiment.CORRECTNESS if rows is None else ((rows, columns),)
        cases = [Case(*shape, blocksize, tables) for shape in shapes]
        table, failed = experiment.correctness(cases, _dtypes(dtype), folder, _progress)
        print(table)
        if failed:
            raise ValueError(f"{len(failed)} outputs differ from the reference: {', '.join(failed)}")


@lab.command()
def bench(
    rows: Rows = 4096,
    columns: Columns = 4096,
    blocksize: Blocksize = 64,
    dtype: Dtype = None,
    tables: Tables = "fp32",
    warmup: Warmup = 20,
    repeats: Repeat = 100,
    folder: Folder = FOLDER,
    sweep: Sweep = True,
    output: Output = None,
) -> None:
    """Time the ladder, each optimisation alone, and V4 beside bitsandbytes; Markdown, JSON and a chart."""
    with errors_to_exit(console):
        _need_gpu()
        chart.require_matplotlib()
        case, times, dtypes = Case(rows, columns, blocksize, tables), Repeats(warmup, repeats), _dtypes(dtype)
        ceiling = bench_step.copy_ceiling()
        ladder = experiment.ladder_rows(case, dtypes, times, folder, ceiling)
        cases = [Case(*size, blocksize, tables) for size in experiment.SIZES]
        sizes = experiment.sweep_rows(cases, dtypes, times, folder, ceiling, _progress) if sweep else []
        print(experiment.write_results(output or folder / "dequant", ladder, sizes, ceiling))


@lab.command()
def profile(
    rows: Rows = 4096,
    columns: Columns = 4096,
    blocksize: Blocksize = 64,
    dtype: Annotated[str, typer.Option(help="fp32, fp16 or bf16.")] = "fp16",
    tables: Tables = "fp32",
    folder: Folder = FOLDER,
    script: Annotated[bool, typer.Option("--script", help="Only write the script and its weight file.")] = False,
) -> None:
    """Nsight Compute counters of every stage: a script, its CSV and a table."""
    with errors_to_exit(console):
        _dtypes([dtype])
        case, built = Case(rows, columns, blocksize, tables), program.find(folder)
        weight, stem = case.weight_path(folder), folder / f"profile-{dtype}"
        stem.with_suffix(".sh").write_text(profile_step.script(built, weight, program.STAGES, dtype))
        console.print(f"wrote {stem}.sh", soft_wrap=True, highlight=False)
        generate_step.generate(case, folder, ())
        if not script:
            counters = profile_step.profile(built, weight, program.STAGES, dtype)
            stem.with_suffix(".csv").write_text(counters)
            print(profile_step.counter_table(counters))


@lab.command()
def convert(
    folder: Folder = FOLDER,
    arch: Arch = None,
    output: Annotated[Path | None, typer.Option(help="JSON file of the result.", show_default="none")] = None,
) -> None:
    """8-bit conversions, plain and packed, and three ways of weights to the tensor cores: counts, times, checks."""
    with errors_to_exit(console):
        _need_gpu()
        with console.status("building"):
            library = convert_step.build(folder, arch)
        if wrong := convert_step.wrong_conversions(library) + convert_step.wrong_products(library):
            raise ValueError(f"wrong results: {', '.join(wrong)}")
        with console.status("measuring"):
            rows = convert_step.conversion_rows(library) + convert_step.product_rows(library)
        print(convert_step.report(rows))
        if output is not None:
            write_record(output, record_of(rows, {}))
            console.print(f"wrote {output}", soft_wrap=True, highlight=False)


@lab.command(name="all")
def run_all(
    rows: Rows = 4096,
    columns: Columns = 4096,
    blocksize: Blocksize = 64,
    dtype: Dtype = None,
    tables: Tables = "fp32",
    warmup: Warmup = 20,
    repeats: Repeat = 100,
    folder: Folder = FOLDER,
    arch: Arch = None,
    sweep: Sweep = True,
    output: Output = None,
) -> None:
    """generate, build, test and bench, one after the other."""
    generate(rows, columns, blocksize, dtype, tables, folder)
    build(folder, arch)
    test(None, columns, blocksize, dtype, tables, folder)
    bench(rows, columns, blocksize, dtype, tables, warmup, repeats, folder, sweep, output)
