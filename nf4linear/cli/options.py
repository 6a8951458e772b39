"""Arguments and options that several commands share, and how they end on an error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from .loading import DTYPES, LoadError

ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="Packed, bitsandbytes or plain model: a folder or a name on the hub.")
]
DeviceOption = Annotated[
    str | None,
    typer.Option(help="cpu, cuda, cuda:1, ... or auto for all GPUs.", show_default="first GPU, else cpu"),
]
DtypeOption = Annotated[str, typer.Option(help=f"Of activations: {', '.join(DTYPES)} (auto: the model's own).")]
FormatOption = Annotated[str, typer.Option(help="What a plain model is quantized to: nf4, fp4 or w8_s8.")]


@contextmanager
def errors_to_exit(console: Console) -> Iterator[None]:
    """Turn the errors that a user can mend into one line and exit status 1; any other keeps its traceback."""
    try:
        yield
    except (LoadError, ValueError, OSError) as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error
