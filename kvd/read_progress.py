"""Whether a disk answers: reads that do not end must not hold up every lookup after them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, TypeVar

PROBE_S = 1.0

T = TypeVar("T")


class ReadProgress:
    """Calls that read from one region. Event loop only.

    While some wait and none has ended for as long as a read may take, the region stands still:
    lookups pass over it, but for one a second that tries, as long as a thread is free for it.
    The calls themselves go on; each gives its slots back when its transfer ends.

    Parameters
    ----------
    threads : int
        How many calls can be under way.
    """

    def __init__(self, threads: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._threads = threads
        self._clock = clock
        self._under_way: dict[int, float] = {}
        self._next = 0
        self._ended_at = 0.0
        self._probed_at = 0.0

    @property
    def calls(self) -> int:
        """Return how many calls have not ended."""
        return len(self._under_way)

    def watch(self, call: asyncio.Future[T]) -> asyncio.Future[T]:
        """Note a call until it ends."""
        number = self._next
        self._next += 1
        self._under_way[number] = self._clock()

        def ended(_: asyncio.Future[Any]) -> None:
            del self._under_way[number]
            self._ended_at = self._clock()

        call.add_done_callback(ended)
        return call

    def stands_still(self, timeout_s: float) -> bool:
        """Return whether nothing has ended for that long though something waits."""
        oldest = next(iter(self._under_way.values()), None)
        if oldest is None:
            return False
        return self._clock() - max(oldest, self._ended_at) > timeout_s

    def admits(self, timeout_s: float) -> bool:
        """Return whether a lookup may read there now."""
        if not self.stands_still(timeout_s):
            return True
        now = self._clock()
        if len(self._under_way) >= self._threads or now - self._probed_at < PROBE_S:
            return False
        self._probed_at = now
        return True
