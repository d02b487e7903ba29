"""Prefetching: blocks of the long tier brought into memory before anybody waits for them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque

from kvd.namespaces import Namespace
from kvd.promotion import Promoter

MAX_WAITING_KEYS = 65536  # 300 bytes each; more than a 2M-token prompt ten times over.
PART_KEYS = 64  # One read call.
MAX_READS = 2  # At a time: the other reading threads are for those who wait.

logger = logging.getLogger(__name__)


class Prefetcher:
    """The queue of keys to be read. Event loop only.

    Parameters
    ----------
    promoter : Promoter
        Reads, once however many ask.
    """

    def __init__(self, promoter: Promoter) -> None:
        self._promoter = promoter
        self._waiting: deque[tuple[Namespace, bytes, float]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()

    def offer(self, namespace: Namespace, keys: list[bytes], deadline_s: float) -> int:
        """Queue keys to be read by a deadline; return how many the queue took."""
        deadline = time.monotonic() + deadline_s
        taken = keys[: MAX_WAITING_KEYS - len(self._waiting)]
        self._waiting.extend((namespace, key, deadline) for key in taken)
        while len(self._tasks) < min(MAX_READS, -(-len(self._waiting) // PART_KEYS)):
            task = asyncio.create_task(self._read())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return len(taken)

    async def _read(self) -> None:
        while self._waiting:
            namespace, keys = self._next_part()
            if not keys:
                continue
            try:
                await self._promoter.fetch(namespace, keys, loose=False)
            except Exception:
                logger.exception("blocks of %r were not prefetched", namespace.name)

    def _next_part(self) -> tuple[Namespace, list[bytes]]:
        """Take the next keys of one namespace; what is too late is left out."""
        namespace = self._waiting[0][0]
        now = time.monotonic()
        keys: list[bytes] = []
        while self._waiting and self._waiting[0][0] is namespace and len(keys) < PART_KEYS:
            _, key, deadline = self._waiting.popleft()
            if now < deadline:
                keys.append(key)
        return namespace, keys
