"""IO contexts shared by the reading threads of one store."""

from __future__ import annotations

import errno
import threading

from tablespace._core.aligned_buffer import AlignedBuffer
from tablespace.errors import ClosedError
from tablespace.io.device import IoContext
from tablespace.io.directory import Directory
from tablespace.io.read_batch import ReadBatch

READ_DEPTH = 32
STAGING_BYTES = 4 << 20
# Each context is a ring (or a set of threads) and some MiB: more readers than this wait.
MAX_CONTEXTS = 8
# Contexts whose transfers never ended, each with its memory; a disk as dead as that is given up.
MAX_BURIED = 64


class ContextPool:
    """Hands an IO context to each reading call; made on demand, kept for the next."""

    def __init__(
        self,
        directory: Directory,
        engine: str,
        slot_bytes: int,
        concurrency: int = READ_DEPTH,
        timeout_ns: int = 0,
    ) -> None:
        self._directory = directory
        self._timeout_ns = timeout_ns
        self._engine = engine
        self._depth = min(READ_DEPTH, concurrency)
        self._staging_bytes = max(2 * slot_bytes, min(READ_DEPTH * slot_bytes, STAGING_BYTES))
        self._idle: list[IoContext] = []
        self._buried: list[tuple[IoContext, ReadBatch]] = []
        self._closed = ""
        self._made = 0
        self._condition = threading.Condition()

    def enlarge(self, slot_bytes: int) -> None:
        """Let contexts taken from now on have room for larger slots."""
        with self._condition:
            if self._staging_bytes >= 2 * slot_bytes:
                return
            self._staging_bytes = 2 * slot_bytes
            for context in self._idle:
                context.close()
            self._made -= len(self._idle)
            self._idle.clear()
            self._condition.notify_all()

    def take(self) -> IoContext:
        """Return a context for this thread alone, waiting while all are in use.

        Raises
        ------
        ClosedError
            The pool was closed, perhaps meanwhile.
        OSError
            Too many contexts are buried.
        """
        with self._condition:
            while not self._closed and not self._idle and self._made >= MAX_CONTEXTS:
                self._condition.wait()
            if self._closed:
                raise ClosedError(self._closed)
            if self._idle:
                return self._idle.pop()
            if len(self._buried) >= MAX_BURIED:
                raise OSError(
                    errno.EIO,
                    f"{MAX_BURIED} reads met a queue that failed or hung, and each holds memory "
                    "for ever. Remedy: look after the disk, then start the process anew",
                )
            self._made += 1
        try:
            queue = self._directory.queue(self._engine, self._depth)
            queue.timeout_ns = self._timeout_ns
            return IoContext(queue, AlignedBuffer(self._staging_bytes))
        except BaseException:
            with self._condition:
                self._made -= 1
                self._condition.notify()
            raise

    def give(self, context: IoContext) -> None:
        """Take a context back."""
        with self._condition:
            if context.staging.size_bytes < self._staging_bytes:
                context.close()
                self._made -= 1
            else:
                self._idle.append(context)
            self._condition.notify_all()

    def bury(self, context: IoContext, batch: ReadBatch) -> None:
        """Keep a context for ever whose transfers may still be in flight, and what they fill."""
        context.abandon()
        with self._condition:
            self._buried.append((context, batch))
            self._made -= 1
            self._condition.notify()

    def close(self, reason: str) -> None:
        """Wait for the contexts in use and free all; later calls are told the reason."""
        with self._condition:
            self._closed = reason
            self._condition.notify_all()
            while len(self._idle) < self._made:
                self._condition.wait()
            self._made = 0
            for context in self._idle:
                context.close()
            self._idle.clear()
