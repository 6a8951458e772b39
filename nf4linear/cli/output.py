"""How commands end on an error or when they are stopped, and the notes of those that write folders."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text


@contextmanager
def errors_to_exit(console: Console) -> Iterator[None]:
    """Turn the errors that a user can mend into one line and exit status 1; any other keeps its traceback."""
    try:
        yield
    except BrokenPipeError:
        # Whatever read our output, such as head, has seen enough; what is still buffered has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None
    except (ValueError, OSError) as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error


def print_notes(console: Console, notes: Iterable[str]) -> None:
    for note in notes:
        console.print(Text.assemble(("note: ", "yellow"), note), soft_wrap=True)


def need_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("the plot needs matplotlib: pip install 'nf4linear[bench]'")


@contextmanager
def stoppable(console: Console) -> Iterator[None]:
    """Ctrl-C ends the command with the shell's status for it, and says that nothing is lost."""
    try:
        yield
    except KeyboardInterrupt:
        console.print("stopped; the same command goes on where it was")
        raise typer.Exit(130) from None
