"""nf4linear generate: text from a prompt, streamed, with its speed and memory."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console

from .. import generation
from .loading import VARIANTS, ModelSource
from .options import DeviceOption, DtypeOption, FormatOption, ModelArgument
from .output import errors_to_exit


def generate(
    model: ModelArgument,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="What to continue or answer; - reads it from stdin.")],
    system: Annotated[str | None, typer.Option(help="System message, for models with a chat template.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is: no chat template.")] = False,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=1)] = 128,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.", show_default="the model's own")] = None,
    top_p: Annotated[float | None, typer.Option(show_default="the model's own")] = None,
    top_k: Annotated[int | None, typer.Option(show_default="the model's own")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.", show_default="fresh")] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = "auto",
    format: FormatOption = "nf4",
    variant: Annotated[str, typer.Option(help=f"How to run it: {', '.join(VARIANTS)}.")] = "nf4linear",
    static_cache: Annotated[
        bool, typer.Option("--compile", help="Compile the decode step with a static cache (GPU); warms up first.")
    ] = False,
) -> None:
    """Generate text: streamed to stdout; tokens per second and peak memory to stderr."""
    console = Console(stderr=True)
    with errors_to_exit(console):
        sampling = generation.Sampling(temperature, top_p, top_k, seed)
        source = ModelSource(model, device, dtype, format)
        loaded, tokenizer = source.load(variant), source.tokenizer()
        result = generation.generate(
            loaded,
            tokenizer,
            sys.stdin.read() if prompt == "-" else prompt,
            chat=False if raw else None,
            system=system,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            write=_write,
            static_cache=static_cache,
        )
        _write("\n")
    where = "GPU, torch" if loaded.device.type == "cuda" else "process"
    console.print(summary(result, where), highlight=False, style="dim", soft_wrap=True)


def summary(result: generation.Generation, where: str) -> str:
    """Speed and memory of one generation in a line; `where` says whose peak memory it is."""
    parts = [
        f"prefill {result.prompt_tokens} tokens, {result.prefill_tokens_per_second:.1f} tokens/s",
        f"decode {result.new_tokens} tokens"
        + (f", {speed:.1f} tokens/s" if (speed := result.decode_tokens_per_second) else ""),
    ]
    if result.peak_bytes is not None:
        parts.append(f"peak memory {result.peak_bytes / 2**30:.2f} GiB ({where})")
    return " | ".join(parts)


def _write(text: str) -> None:
    typer.echo(text, nl=False)  # which flushes
