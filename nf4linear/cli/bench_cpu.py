"""nf4linear bench cpu: layers, and a whole model, on this machine's processor."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress

from .. import native
from ..bench import cpu as cpu_bench
from ..bench import cpu_generate, cpu_report
from ..bench.record import write, write_record
from .loading import ModelSource
from .output import errors_to_exit, need_matplotlib

console = Console(stderr=True)
NEW_TOKENS, ROUNDS = 48, 9


def cpu(
    model: Annotated[
        str | None, typer.Argument(help="A small 16-bit model, folder or name on the hub, to generate with as well.")
    ] = None,
    linear: Annotated[bool, typer.Option(help="Measure linear layers.")] = True,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads for all.", show_default="torch's number")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One shape, fewer rounds.")] = False,
    output: Annotated[
        Path, typer.Option(help="The folder for cpu-linear and cpu-generate: JSON, table and plot of each.")
    ] = Path("benchmarks/results"),
) -> None:
    """Linear layers, and generation with MODEL, on the CPU: beside torch and bitsandbytes, in paired runs."""
    with errors_to_exit(console):
        if model is None and not linear:
            raise ValueError("nothing is left to measure: name a model, or leave out --no-linear")
        if not (library := native.library("cpu")):
            raise ValueError(f"nothing to measure: {library.why}")
        if model is not None and ModelSource(model).quantization() is not None:
            raise ValueError(f"{model}: it is quantized; the variants are made from a 16-bit model")
        if linear:
            need_matplotlib()
        if threads:
            torch.set_num_threads(threads)
        # What a reader can type: a folder by its name alone, and their own place for results.
        words = [Path(model).name] if model else []
        words += ["--no-linear"] * (not linear) + ["--threads", str(torch.get_num_threads())] + ["--quick"] * quick
        command = shlex.join(["nf4linear", "bench", "cpu", *words])
        if linear:
            _measure_linear(quick, output / "cpu-linear.json", command)
        if model is not None:
            _measure_generation(model, 3 if quick else ROUNDS, output / "cpu-generate.json", command)


@torch.inference_mode()
def _measure_linear(quick: bool, path: Path, command: str) -> None:
    shapes, seconds = (cpu_bench.SHAPES[:1], 1.0) if quick else (cpu_bench.SHAPES, 3.0)
    rates, rows = [cpu_bench.read_rate()], []
    with Progress(console=console) as progress:
        task = progress.add_task("linear layers", total=2 * len(shapes) * len(cpu_bench.ROWS))
        for cell in cpu_bench.sweep(shapes, cpu_bench.ROWS, seconds):
            rows += cell
            progress.console.print(cpu_report.progress_line(cell), highlight=False, soft_wrap=True)
            progress.advance(task)
    rates.append(cpu_bench.read_rate())
    record = cpu_bench.record_of(rows, command, ceilings={"read_GBps": max(rates)})
    text = cpu_report.markdown(record)
    write_record(path, record)
    write(path.with_suffix(".md"), text.encode())
    write(path.with_suffix(".png"), cpu_report.plot(record))
    print(text)


def _measure_generation(model: str, rounds: int, path: Path, command: str) -> None:
    done = []
    with Progress(console=console) as progress:
        task = progress.add_task("loading", total=rounds)
        for each in cpu_generate.rounds(model, NEW_TOKENS, rounds):
            done.append(each)
            progress.update(task, description="generating", advance=1)
    record = cpu_bench.record_of(cpu_generate.rows_of(Path(model).name, done), command)
    text = cpu_generate.markdown(record)
    write_record(path, record)
    write(path.with_suffix(".md"), text.encode())
    print(text)
