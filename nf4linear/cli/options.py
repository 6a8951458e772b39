"""Arguments and options that the commands which run a model share."""

from __future__ import annotations

from typing import Annotated

import typer

from .loading import DTYPES

ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="Packed, bitsandbytes or plain model: a folder or a name on the hub.")
]
DeviceOption = Annotated[
    str | None,
    typer.Option(help="cpu, cuda, cuda:1, ... or auto for all GPUs.", show_default="first GPU, else cpu"),
]
DtypeOption = Annotated[str, typer.Option(help=f"Of activations: {', '.join(DTYPES)} (auto: the model's own).")]
FormatOption = Annotated[str, typer.Option(help="What a plain model is quantized to: nf4, fp4 or w8_s8.")]
