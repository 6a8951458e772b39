"""A progress bar over bytes written, or nothing."""

from __future__ import annotations

from types import TracebackType

_BAR = 16
# What the figures beside the bar take at most, "123.4/456.7 MB 123.4 MB/s 0:00:00", and the gaps between columns.
_FIGURES = 14 + 10 + 7 + 4


class Progress:
    """Use as a context manager; with `show` False it only counts. Drawn on stderr, so output can be piped."""

    def __init__(self, title: str, total_bytes: int, show: bool) -> None:
        self.title, self.total_bytes, self.show = title, total_bytes, show
        self.done_bytes = 0
        self._bar = None

    def __enter__(self) -> Progress:
        if self.show:
            from rich import progress
            from rich.console import Console
            from rich.table import Column

            console = Console(stderr=True)
            # A narrow terminal shortens the description, not the figures.
            description = Column(no_wrap=True, overflow="ellipsis", max_width=max(8, console.width - _BAR - _FIGURES))
            self._bar = progress.Progress(
                progress.TextColumn("{task.description}", table_column=description),
                progress.BarColumn(bar_width=_BAR),
                progress.DownloadColumn(table_column=Column(no_wrap=True)),
                progress.TransferSpeedColumn(table_column=Column(no_wrap=True)),
                progress.TimeRemainingColumn(table_column=Column(no_wrap=True)),
                console=console,
            )
            self._bar.start()
            self._task = self._bar.add_task(self.title, total=self.total_bytes)
        return self

    def advance(self, nbytes: int, what: str) -> None:
        self.done_bytes += nbytes
        if self._bar is not None:
            self._bar.update(self._task, advance=nbytes, description=f"{self.title} {what}")

    def note(self, line: str) -> None:
        """Print a line above the bar."""
        if self._bar is not None:
            self._bar.console.print(line, soft_wrap=True, highlight=False, markup=False)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
