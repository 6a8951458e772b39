"""A progress bar over bytes written, or nothing."""

from __future__ import annotations

from types import TracebackType


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

            whole = Column(no_wrap=True)  # a narrow terminal shortens the bar, not the figures
            self._bar = progress.Progress(
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                progress.DownloadColumn(table_column=whole),
                progress.TransferSpeedColumn(),
                progress.TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._bar.start()
            self._task = self._bar.add_task(self.title, total=self.total_bytes)
        return self

    def advance(self, nbytes: int, what: str) -> None:
        self.done_bytes += nbytes
        if self._bar is not None:
            self._bar.update(self._task, advance=nbytes, description=f"{self.title} {what}")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
