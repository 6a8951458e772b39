"""nf4linear info: what a checkpoint folder holds."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ..sizes import format_size
from .output import errors_to_exit

if TYPE_CHECKING:
    from ..checkpoint import Description

_SHOWN_NAMES = 8


def info(
    path: Annotated[str, typer.Argument(metavar="PATH", help="Folder of a packed, bitsandbytes or plain model.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Say what a checkpoint folder holds and whether it is sound; reads headers, scales and tables.

    Exit status 1 if problems were found.
    """
    with errors_to_exit(Console(stderr=True)):
        from ..checkpoint import describe

        description = describe(path)
        if as_json:
            typer.echo(json.dumps(description.to_dict(), indent=2))
        else:
            _print_table(description)
    if description.problems:
        raise typer.Exit(1)


def _print_table(description: Description) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, title=description.path, title_justify="left")
    for label, value in _rows(description):
        table.add_row(label, Text(value))
    console = Console()
    console.print(table)
    for problem in description.problems:
        console.print(Text(f"problem: {problem}", style="red"), soft_wrap=True)


def _rows(d: Description) -> list[tuple[str, str]]:
    rows = [("kind", d.kind + (f", format version {d.format_version}" if d.format_version is not None else ""))]
    rows.append(("architecture", d.architecture))
    rows += [("layers", f"{count} x {what}") for what, count in d.formats.items()]
    if d.bits_per_weight is not None:
        rows.append(("quantized weights", f"{d.quantized_weights:,}, {d.bits_per_weight:.3f} bits each with scales"))
    if d.bytes_codes:
        rows.append(("codes", format_size(d.bytes_codes)))
        rows.append(("scales and tables", format_size(d.bytes_scales)))
    rows.append(("not quantized", format_size(d.bytes_other)))
    if d.skipped:
        more = f" and {len(d.skipped) - _SHOWN_NAMES} more" if len(d.skipped) > _SHOWN_NAMES else ""
        rows.append(("skipped modules", ", ".join(d.skipped[:_SHOWN_NAMES]) + more))
    if d.restores_source is not None:
        rows.append(("unpack", "byte for byte" if d.restores_source else "equal in value"))
    rows += [("file", f"{name}, {format_size(nbytes)}") for name, nbytes in d.files.items()]
    rows.append(("problems", str(len(d.problems)) if d.problems else "none"))
    return rows
