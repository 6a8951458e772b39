"""What the folder-writing commands share: sizes in words, notes, and how they end when they are stopped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.text import Text


def size(nbytes: int) -> str:
    """Bytes in decimal units, as file managers and the model hub count them."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes} B"


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
