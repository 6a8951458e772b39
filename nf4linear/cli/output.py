"""What the folder-writing commands share: notes, and how they end when they are stopped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.text import Text


def print_notes(console: Console, notes: Iterable[str]) -> None:
    for note in notes:
        console.print(Text.assemble(("note: ", "yellow"), note), soft_wrap=True)


@contextmanager
def stoppable(console: Console) -> Iterator[None]:
    """Ctrl-C ends the command with the shell's status for it, and says that nothing is lost."""
    try:
        yield
    except KeyboardInterrupt:
        console.print("stopped; the same command goes on where it was")
        raise typer.Exit(130) from None
