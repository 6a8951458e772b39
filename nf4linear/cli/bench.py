"""nf4linear bench: our layers and models beside their peers, as result files, tables and plots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress

from .. import mixed as mixed_products
from ..bench import generate as generate_bench
from ..bench import gpu, humming, linear_report, linear_w8
from ..bench import linear as linear_bench
from ..bench import mixed as mixed_bench
from ..bench.record import write, write_record
from .bench_cpu import cpu
from .loading import ModelSource
from .output import errors_to_exit, need_matplotlib

bench = typer.Typer(help="Time layers and models beside their peers.", no_args_is_help=True)
bench.command()(cpu)
console = Console(stderr=True)
RESULTS = Path("benchmarks/results")
FORMATS = {
    "nf4": (linear_bench.BenchWeight, linear_bench.PEERS),
    "w8": (linear_w8.BenchWeight8, linear_w8.PEERS),
}


@bench.command()
def linear(
    shape: Annotated[
        list[str] | None, typer.Option(help="N x K such as 4096x4096; repeatable.", show_default="all")
    ] = None,
    tokens: Annotated[list[int] | None, typer.Option("--tokens", "-m", min=1, help="Numbers of tokens.")] = None,
    dtype: Annotated[str, typer.Option(help=f"Of activations: {' or '.join(linear_bench.DTYPES)}.")] = "bf16",
    format: Annotated[str, typer.Option(help="Of weights: nf4 or w8 (int8, one scale a row).")] = "nf4",
    peer: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(linear_bench.PEERS)}; repeatable.", show_default="those installed"),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Two shapes, four numbers of tokens.")] = False,
    tune: Annotated[bool, typer.Option("--tune", help="Our kernels alone, every configuration that fits.")] = False,
    output: Annotated[Path | None, typer.Option(help="The JSON file; table and plot go beside it.")] = None,
) -> None:
    """NF4 or 8-bit linear layers: times, roofs and errors over shapes and numbers of tokens."""
    with errors_to_exit(console):
        _need_gpu()
        shapes = [_parse_shape(text) for text in shape or ()] or list(linear_bench.SHAPES[: 2 if quick else None])
        numbers = tokens or ([1, 8, 16, 64] if quick else list(linear_bench.TOKENS))
        if dtype not in linear_bench.DTYPES:
            raise ValueError(f"--dtype takes {', '.join(linear_bench.DTYPES)}; got {dtype}")
        if format not in FORMATS:
            raise ValueError(f"--format takes {' or '.join(FORMATS)}; got {format}")
        weights, known = FORMATS[format]
        if unknown := sorted(set(peer or ()) - set(known)):
            raise ValueError(f"--peer takes {', '.join(known)}; got {', '.join(unknown)}")
        if not tune:
            need_matplotlib()
        ceilings = gpu.measure_ceilings()
        if tune:
            numbers = [m for m in numbers if m <= linear_bench.TUNE_MOST_TOKENS]
            cells = linear_bench.tune(shapes, numbers, dtype, ceilings, weights)
        else:
            peers = [known[name] for name in peer or known]
            if humming.peer in peers and humming.installed():
                console.print("humming compiles its kernels")
                humming.compile_ahead(shapes, numbers, linear_bench.DTYPES[dtype], weights.humming_config)
            cells = linear_bench.sweep(shapes, numbers, dtype, peers, ceilings, weights)
        kind = f"linear{'' if format == 'nf4' else '-w8'}{'-tune' if tune else ''}"
        path = output or RESULTS / f"{gpu.machine_slug()}-{kind}.json"
        report = linear_report.tune_markdown if tune else linear_report.markdown
        record = _measure(cells, len(shapes) * len(numbers), ceilings, path, report)
        if not tune:
            write(path.with_suffix(".png"), linear_report.plot(record))
        print(report(record))


@bench.command()
def generate(
    model: Annotated[str, typer.Argument(help="A folder, a name on the hub, or the random model of that name.")] = (
        generate_bench.RANDOM_MODEL
    ),
    impl: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(generate_bench.IMPLEMENTATIONS)}; repeatable.")
    ] = None,
    plain: Annotated[bool, typer.Option("--eager/--no-eager", help="Measure transformers' plain loop.")] = True,
    compiled: Annotated[bool, typer.Option(help="Measure the loop with a static cache and torch.compile.")] = True,
    prompt: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens of the prompt; repeatable.", show_default="128")
    ] = None,
    new_tokens: Annotated[int, typer.Option("--new-tokens", "-n", min=3)] = 128,
    output: Annotated[Path | None, typer.Option(help="The JSON file; the table goes beside it.")] = None,
) -> None:
    """Whole models: time to the first token and tokens a second, eager and compiled."""
    with errors_to_exit(console):
        _need_gpu()
        if unknown := sorted(set(impl or ()) - set(generate_bench.IMPLEMENTATIONS)):
            raise ValueError(f"--impl takes {', '.join(generate_bench.IMPLEMENTATIONS)}; got {', '.join(unknown)}")
        random = model == generate_bench.RANDOM_MODEL
        load = generate_bench.random_model if random else ModelSource(model, dtype="bfloat16").load
        ways = [way for way, wanted in ((False, plain), (True, compiled)) if wanted]
        name = model if random else Path(model).name
        impls, prompts = impl or generate_bench.IMPLEMENTATIONS, prompt or [128]
        path = output or RESULTS / f"{gpu.machine_slug()}-generate.json"
        record = gpu.record_of([], {})
        for row in generate_bench.sweep(name, load, impls, ways, prompts, new_tokens):
            record["rows"].append(row)
            # After every row, so that whatever ends a long run leaves what was measured.
            write_record(path, record)
            write(path.with_suffix(".md"), generate_bench.markdown(record).encode())
            way = "compiled" if row["compile"] else "eager"
            console.print(
                f"{row['impl']}, {way}, prompt {row['prompt']}: first token {row['ttft_ms']:.1f} ms, "
                f"then {row['tok_s']:.1f} tokens/s"
            )
        print(generate_bench.markdown(record))


@bench.command()
def mixed(
    variant: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(mixed_products.VARIANTS)}; repeatable.", show_default="all"),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="The published shape alone.")] = False,
    output: Annotated[Path | None, typer.Option(help="The JSON file; table and plot go beside it.")] = None,
) -> None:
    """Products of 16-bit and 8-bit matrices beside those of two 16-bit ones: TFLOP/s over shapes."""
    with errors_to_exit(console):
        _need_gpu()
        need_matplotlib()
        if unknown := sorted(set(variant or ()) - set(mixed_products.VARIANTS)):
            raise ValueError(f"--variant takes {', '.join(mixed_products.VARIANTS)}; got {', '.join(unknown)}")
        shapes = mixed_bench.SHAPES[: 1 if quick else None]
        ceilings = gpu.measure_ceilings()
        path = output or RESULTS / f"{gpu.machine_slug()}-mixed.json"
        cells = mixed_bench.sweep(shapes, variant or mixed_products.VARIANTS)
        record = _measure(cells, len(shapes), ceilings, path, mixed_bench.markdown)
        write(path.with_suffix(".png"), mixed_bench.plot(record))
        print(mixed_bench.markdown(record))


def _parse_shape(text: str) -> tuple[int, int]:
    n, _, k = text.lower().partition("x")
    if not (n.isdigit() and k.isdigit()):
        raise ValueError(f"--shape takes N x K such as 4096x14336; got {text}")
    return int(n), int(k)


def _measure(
    cells: Iterable[list[gpu.Row]],
    total: int,
    ceilings: dict[str, float],
    path: Path,
    report: Callable[[gpu.Row], str],
) -> gpu.Row:
    """The record of all cells, with a line for each as it comes.

    File and table are written after every cell, so that whatever ends a long run leaves what was measured.
    """
    record = gpu.record_of([], ceilings)
    with Progress(console=console) as progress:
        task = progress.add_task("measuring", total=total)
        for cell in cells:
            record["rows"] += cell
            write_record(path, record)
            write(path.with_suffix(".md"), report(record).encode())
            progress.console.print(_line(cell), highlight=False, soft_wrap=True)
            progress.advance(task)
    return record


def _line(cell: Sequence[gpu.Row]) -> str:
    first = cell[0]
    times = ", ".join(f"{row.get('variant', row['impl'])} {row['launch']} {row['us']:.1f}" for row in cell)
    return f"{first['n']}x{first['k']} M={first['m']}, us: {times}"


def _need_gpu() -> None:
    if not torch.cuda.is_available():
        raise ValueError("this benchmark runs on an NVIDIA GPU and torch sees none")
