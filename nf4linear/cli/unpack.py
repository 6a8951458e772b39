"""nf4linear unpack: a packed checkpoint back into a bitsandbytes or a plain one."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from .output import errors_to_exit, print_notes, stoppable


def unpack(
    src: Annotated[str, typer.Argument(metavar="SRC", help="Folder of a packed checkpoint.")],
    dst: Annotated[str, typer.Argument(metavar="DST", help="Folder to write; appears when it is complete.")],
    synthesize: Annotated[
        bool,
        typer.Option(
            "--synthesize", help="Write a new bitsandbytes checkpoint of equal values, not the source's own bytes."
        ),
    ] = False,
    dequantize: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE",
            help="Write a plain checkpoint instead, weights dequantized to bfloat16, float16 or float32.",
            show_default="a bitsandbytes one",
        ),
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Of one new weight file.")] = "5GB",
    force: Annotated[bool, typer.Option("--force", help="Replace DST, and throw away another unfinished run.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
) -> None:
    """Write a packed checkpoint as a bitsandbytes one again, or as a plain one.

    When SRC was packed from a bitsandbytes checkpoint, every tensor, the key order and the file split are the ones
    it had.
    """
    console = Console(stderr=True)
    with errors_to_exit(console), stoppable(console):
        from ..checkpoint import unpack_checkpoint

        result = unpack_checkpoint(
            src,
            dst,
            synthesize=synthesize,
            dequantize=dequantize,
            max_shard_size=max_shard_size,
            force=force,
            progress=not quiet,
        )
        print_notes(console, result.notes)
        if dequantize:
            typer.echo(f"{dst}: {result.layers} layers dequantized to {dequantize}")
        else:
            how = "byte for byte as before pack" if result.exact else "equal in value"
            typer.echo(f"{dst}: {result.layers} layers unpacked, {how}")
