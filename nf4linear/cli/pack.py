"""nf4linear pack: a checkpoint into kernel order."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from ..sizes import format_size
from .output import errors_to_exit, print_notes, stoppable


def pack(
    src: Annotated[
        str, typer.Argument(metavar="SRC", help="Folder of a bitsandbytes or plain model, or its hub name.")
    ],
    dst: Annotated[str, typer.Argument(metavar="DST", help="Folder to write; appears when it is complete.")],
    format: Annotated[
        str | None,
        typer.Option(help="For a plain SRC: nf4, fp4 or w8_s8.", show_default="nf4"),
    ] = None,
    blocksize: Annotated[
        int | None, typer.Option(help="For a plain SRC: weights that share a scale.", show_default="64")
    ] = None,
    no_double_quant: Annotated[
        bool, typer.Option("--no-double-quant", help="For a plain SRC: keep the block scales in float32.")
    ] = False,
    skip: Annotated[
        list[str] | None,
        typer.Option(
            help="For a plain SRC: leave modules of this name in 16 bit, besides the default ones. Repeatable."
        ),
    ] = None,
    lm_head: Annotated[
        str | None, typer.Option("--lm-head", help="w8: quantize the output head to 8 bit.", show_default="16 bit")
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Of one weight file.")] = "5GB",
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace DST, and throw away another unfinished run.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
) -> None:
    """Reorder a checkpoint for nf4linear, once; loading it needs no conversion then.

    A bitsandbytes 4-bit or 8-bit SRC keeps all its codes and scales, and unpack restores it byte for byte. A plain
    16/32-bit SRC is quantized. A run that was stopped goes on when it is started again.
    """
    console = Console(stderr=True)
    with errors_to_exit(console), stoppable(console):
        from ..checkpoint import pack_checkpoint

        result = pack_checkpoint(
            src,
            dst,
            format=format,
            blocksize=blocksize,
            double_quant=False if no_double_quant else None,
            skip=skip or (),
            lm_head=lm_head,
            max_shard_size=max_shard_size,
            force=force,
            revision=revision,
            progress=not quiet,
        )
        print_notes(console, result.notes)
        before, after = format_size(result.bytes_before), format_size(result.bytes_after)
        typer.echo(f"{dst}: {result.layers} layers packed, {before} -> {after}")
