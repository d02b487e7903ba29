"""Limits on how long copies on the long tier count, until the copies themselves are changed."""

from __future__ import annotations

import asyncio
import logging
import time

from kvd.long_paths import LongPaths

INTERVAL_S = 0.05
RETRY_S = 1.0
MAX_WAITING = 65536  # About 200 bytes each; only a disk that does nothing lets it come to that.
BATCH = 1024

logger = logging.getLogger(__name__)


class ExpiryLimits:
    """Blocks stored or refreshed with a time to live that a copy on disk may not know of.

    Such a copy was written before, with a longer time to live or none. It is given the shorter
    one, off every request path; until that is durable the limit stands here, and lookups on the
    long tier go by it. So no block is served after its time, whichever tier it comes from.

    Parameters
    ----------
    long_paths : LongPaths
        Where the copies are.
    limits : dict
        By key on disk: expiry on the boot clock. Shared with the namespaces, which answer from
        it whether a copy counts.

    Notes
    -----
    Event loop only.
    """

    def __init__(self, long_paths: LongPaths, limits: dict[bytes, int]) -> None:
        self._long = long_paths
        self._limits = limits
        self._waiting: dict[bytes, int] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def is_full(self) -> bool:
        """Return whether no more limits can be taken: the disk has not moved for long."""
        return len(self._waiting) >= MAX_WAITING

    def set(self, disk_key: bytes, expires_ns: int) -> None:
        """Note until when a block counts now; 0 takes a limit away."""
        if expires_ns:
            self._limits[disk_key] = expires_ns
            self._waiting[disk_key] = expires_ns
            self._arm(INTERVAL_S)
        elif self._limits:
            self._limits.pop(disk_key, None)
            self._waiting.pop(disk_key, None)

    def settle(self, disk_key: bytes, expires_ns: int) -> None:
        """Note that the copy on disk goes by this expiry."""
        if self._limits and self._limits.get(disk_key) == expires_ns:
            del self._limits[disk_key]
            self._waiting.pop(disk_key, None)

    async def drain(self, timeout_s: float) -> None:
        """Change what waits to be changed; what is left at the timeout is said."""
        deadline = time.monotonic() + timeout_s
        while self._waiting and self._long.failure is None and time.monotonic() < deadline:
            before = len(self._waiting)
            await asyncio.wait(
                [self._task or self._start()], timeout=max(0.0, deadline - time.monotonic())
            )
            if len(self._waiting) >= before:
                break
        if self._timer is not None:
            self._timer.cancel()
        if self._waiting:
            logger.warning(
                "%d blocks on disk keep a longer time to live than was asked for",
                len(self._waiting),
            )

    def _arm(self, delay_s: float) -> None:
        if self._timer is None and self._task is None:
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._start)

    def _start(self) -> asyncio.Task[None]:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._task = asyncio.get_running_loop().create_task(self._run())
        return self._task

    async def _run(self) -> None:
        batch = list(self._waiting.items())[:BATCH]
        done = [False] * len(batch)
        try:
            done = await self._long.shorten(batch)
        except Exception as error:
            logger.debug("times to live were not changed on disk: %s", error)
        finally:
            self._task = None
        for (key, expires_ns), settled in zip(batch, done, strict=True):
            if settled:
                self.settle(key, expires_ns)
            elif self._waiting.get(key) == expires_ns:
                del self._waiting[key]
                if self._long.failure is None:
                    self._waiting[key] = expires_ns  # Again, behind all others.
        if self._waiting:
            self._arm(INTERVAL_S if all(done) else RETRY_S)
