"""The command line: `nf4linear COMMAND ...`. A command's module is imported only when that command runs."""

from __future__ import annotations

import importlib
import io
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

# In the order of a user's day. Each is the function, or the group, of that name in the module of that name beside this
# file.
COMMANDS = {
    "pack": "Reorder a bitsandbytes or plain checkpoint for nf4linear, once.",
    "unpack": "Write a packed checkpoint as a bitsandbytes one again.",
    "info": "Say what a checkpoint folder holds and whether it is sound.",
    "generate": "Generate text.",
    "perplexity": "Measure perplexity on a text.",
    "bench": "Time layers and models beside their peers.",
    "lab": "Reproduce the published ladder of dequantize kernels and measure ours beside it.",
}


class _LazyGroup(TyperGroup):
    """Lists the commands from COMMANDS and imports one when it is called: `--help` needs neither torch nor a model."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return TyperCommand(cmd_name, help=COMMANDS[cmd_name]) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return name, _load(name) if command is not None else None, rest


def _load(name: str) -> Any:
    command = getattr(importlib.import_module(f".{name}", __package__), name)
    if isinstance(command, typer.Typer):  # a group of commands of its own
        return typer.main.get_command(command)
    alone = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_show_locals=False)
    alone.command(name)(command)
    return typer.main.get_command(alone)


app = typer.Typer(cls=_LazyGroup, add_completion=False, pretty_exceptions_show_locals=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        from ..version import installed_version

        typer.echo(f"nf4linear {installed_version()}")
        raise typer.Exit


@app.callback(no_args_is_help=True)
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Quantized linear layers for Hugging Face models: pack a checkpoint once, load it, generate, measure."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a locale without some sign must not cost a finished result


if __name__ == "__main__":
    app()
