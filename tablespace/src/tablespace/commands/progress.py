"""A bar on the terminal for what takes longer than two seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

# Shorter work shows nothing: a bar that flickers tells nobody anything.
DELAY_S = 2.0
INTERVAL_S = 0.2
WIDTH = 30


class Progress:
    """Shows on a terminal's standard error how far something is; elsewhere it does nothing.

    Parameters
    ----------
    label : str
    total : float, optional
        What `done` comes to at the end; without it only the time is shown.
    enabled : bool
        False where standard output is on the same terminal and shows something all the time.
    stream : text stream, optional
    clock : callable, optional

    Notes
    -----
    `done` may be set by any one thread; a thread of this object's own draws, so that calls which
    take long without reporting show something too.
    """

    def __init__(
        self,
        label: str,
        total: float | None = None,
        enabled: bool = True,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.done = 0.0
        self._label = label
        self._total = total
        self._enabled = enabled
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._started = clock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Progress:
        if self._enabled and self._stream is not None and self._stream.isatty():
            self._thread = threading.Thread(target=self._draw, daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def line(self) -> str:
        """Return what is shown now."""
        seconds = f"{self._clock() - self._started:.0f} s"
        if not self._total:
            return f"{self._label} {seconds}"
        part = min(1.0, max(0.0, self.done / self._total))
        bar = ("#" * round(part * WIDTH)).ljust(WIDTH, ".")
        return f"{self._label} [{bar}] {part:4.0%} {seconds}"

    def _draw(self) -> None:
        shown = False
        if not self._ended.wait(DELAY_S):
            while True:
                self._stream.write(f"\r{self.line()}\x1b[K")
                self._stream.flush()
                shown = True
                if self._ended.wait(INTERVAL_S):
                    break
        if shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
