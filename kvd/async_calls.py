"""Calls that wait, made in threads of their own and awaited: no wait blocks the loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Calls:
    """A bounded pool of threads for the calls of one client.

    Parameters
    ----------
    threads : int
        How many calls may wait for the daemon at a time; further ones queue.
    timeout_s : float
        How long a call may queue for a thread. Once begun it has bounds of its own.
    """

    def __init__(self, threads: int, timeout_s: float) -> None:
        self._count = threads
        self._timeout_s = timeout_s
        self._threads: ThreadPoolExecutor | None = None
        self._pid = 0

    async def run(self, call: Callable[[], T], late: Callable[[], T]) -> T:
        """Return what a call returns, or `late()` when no thread was free for it in time.

        Notes
        -----
        Cancelled while it queues, the call is never made. Once it has begun, the cancellation
        is raised when it has ended, at most its own timeout later: it may be filling the
        caller's buffer, which must not be used for something else meanwhile.
        """
        job = self._pool().submit(call)
        future = asyncio.wrap_future(job)
        try:
            done, _ = await asyncio.wait({future}, timeout=self._timeout_s)
            if not done:
                if job.cancel():
                    return late()
                await asyncio.wait({future})
        except asyncio.CancelledError:
            if not job.cancel():
                await _ended(future)
            raise
        return future.result()

    async def finish(self, call: Callable[[], None]) -> None:
        """Make a call that gives something back. It is made to its end, also when cancelled."""
        future = asyncio.wrap_future(self._pool().submit(call))
        cancelled = await _ended(future)
        if cancelled:
            raise asyncio.CancelledError
        future.result()

    def close(self) -> None:
        """Take no more calls. Those that have begun end by their own bounds."""
        if self._threads is not None and self._pid == os.getpid():
            self._threads.shutdown(wait=False)
        self._threads = None

    def _pool(self) -> ThreadPoolExecutor:
        if self._threads is None or self._pid != os.getpid():
            # A forked child has none of its parent's threads.
            self._pid = os.getpid()
            self._threads = ThreadPoolExecutor(self._count, thread_name_prefix="kvd-client")
        return self._threads


async def _ended(future: asyncio.Future[T]) -> bool:
    """Wait for the end of a call; return whether the waiter was cancelled meanwhile."""
    was_cancelled = False
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError:
            was_cancelled = True
    if not future.cancelled():
        future.exception()  # Looked at, so that nothing is logged about it.
    return was_cancelled
