"""Shows how far a long step is: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

LINE_INTERVAL_S = 5.0


class Meter:
    """Progress of one step on standard error; a context manager.

    Parameters
    ----------
    label : str
        What is going on.
    total : int
        Units until it is done.
    stream : file, optional
        Where to show it; standard error without.
    """

    def __init__(self, label: str, total: int, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._label = label
        self._total = total
        self._done = 0
        self._shown = -1
        self._next_line = time.monotonic() + LINE_INTERVAL_S
        self._bar: Progress | None = None
        if self._stream.isatty():
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                TimeRemainingColumn(),
                console=Console(file=self._stream),
                transient=True,
            )
            self._task = self._bar.add_task(label, total=total)

    def __enter__(self) -> Meter:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif kind is None and 0 <= self._shown < 100:
            self._show(100)

    def advance(self, units: int = 1) -> None:
        """Count more units as done."""
        self._done += units
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done)
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + LINE_INTERVAL_S
            self._show(min(100, 100 * self._done // max(1, self._total)))

    def _show(self, percent: int) -> None:
        self._shown = percent
        print(f"{self._label}: {percent} %", file=self._stream, flush=True)
