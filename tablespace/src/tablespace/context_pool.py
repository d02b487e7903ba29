"""IO contexts shared by the reading threads of one store."""

from __future__ import annotations

import threading

from tablespace._core.aligned_buffer import AlignedBuffer
from tablespace.io.device import IoContext
from tablespace.io.directory import Directory

READ_DEPTH = 32
STAGING_BYTES = 4 << 20
# Each context is a ring (or a set of threads) and some MiB: more readers than this wait.
MAX_CONTEXTS = 8


class ContextPool:
    """Hands an IO context to each reading call; made on demand, kept for the next."""

    def __init__(self, directory: Directory, engine: str, slot_bytes: int) -> None:
        self._directory = directory
        self._engine = engine
        self._staging_bytes = max(2 * slot_bytes, min(READ_DEPTH * slot_bytes, STAGING_BYTES))
        self._idle: list[IoContext] = []
        self._buried: list[IoContext] = []
        self._made = 0
        self._condition = threading.Condition()

    def take(self) -> IoContext:
        """Return a context for this thread alone, waiting while all are in use."""
        with self._condition:
            while not self._idle and self._made >= MAX_CONTEXTS:
                self._condition.wait()
            if self._idle:
                return self._idle.pop()
            self._made += 1
        try:
            return IoContext(
                self._directory.queue(self._engine, READ_DEPTH), AlignedBuffer(self._staging_bytes)
            )
        except BaseException:
            with self._condition:
                self._made -= 1
                self._condition.notify()
            raise

    def give(self, context: IoContext) -> None:
        """Take a context back."""
        with self._condition:
            self._idle.append(context)
            self._condition.notify()

    def bury(self, context: IoContext) -> None:
        """Keep a context for ever whose transfers may still be in flight."""
        with self._condition:
            self._buried.append(context)
            self._made -= 1
            self._condition.notify()

    def close(self) -> None:
        """Free the idle contexts."""
        with self._condition:
            for context in self._idle:
                context.close()
            self._idle.clear()
