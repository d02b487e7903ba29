"""IO contexts shared by the reading threads of one store."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tablespace._core.aligned_buffer import AlignedBuffer
from tablespace.errors import ClosedError
from tablespace.io.device import IoContext
from tablespace.io.directory import Directory
from tablespace.io.read_batch import ReadBatch

READ_DEPTH = 32
STAGING_BYTES = 4 << 20
# Each context is a ring (or a set of threads) and some MiB: more readers than this wait.
MAX_CONTEXTS = 8


class ContextPool:
    """Hands an IO context to each reading call; made on demand, kept for the next."""

    def __init__(
        self, directory: Directory, engine: str, slot_bytes: int, note: Callable[[str], None]
    ) -> None:
        self._directory = directory
        self._engine = engine
        # Told once when another engine had to be taken.
        self._note = note
        self._staging_bytes = max(2 * slot_bytes, min(READ_DEPTH * slot_bytes, STAGING_BYTES))
        self._idle: list[IoContext] = []
        self._buried: list[tuple[IoContext, ReadBatch]] = []
        self._closed = ""
        self._made = 0
        self._condition = threading.Condition()

    def take(self) -> IoContext:
        """Return a context for this thread alone, waiting while all are in use.

        Where no further one can be made (descriptors, locked memory, a sandbox that came later),
        those there are are waited for; where there is none, threads take the ring's place.

        Raises
        ------
        ClosedError
            The pool was closed, perhaps meanwhile.
        OSError, MemoryError
            Not one context can be made.
        """
        refused = False
        while True:
            with self._condition:
                while not self._closed and not self._idle and self._must_wait(refused):
                    self._condition.wait()
                if self._closed:
                    raise ClosedError(self._closed)
                if self._idle:
                    return self._idle.pop()
                self._made += 1
            try:
                return IoContext(
                    self._directory.queue(self._engine, READ_DEPTH),
                    AlignedBuffer(self._staging_bytes),
                )
            except BaseException as error:
                with self._condition:
                    self._made -= 1
                    self._condition.notify_all()
                    if not isinstance(error, (OSError, MemoryError)):
                        raise
                    refused = True
                    if self._made == 0 and not self._step_down(error):
                        raise

    def _must_wait(self, refused: bool) -> bool:
        return self._made >= MAX_CONTEXTS or (refused and self._made > 0)

    def _step_down(self, error: Exception) -> bool:
        """Go from rings to threads, for good; say whether that is news."""
        if self._engine != "uring":
            return False
        self._engine = "posix"
        self._note(f"reads by pread threads: a further io_uring was refused ({error})")
        return True

    def give(self, context: IoContext) -> None:
        """Take a context back."""
        with self._condition:
            self._idle.append(context)
            self._condition.notify_all()

    def bury(self, context: IoContext, batch: ReadBatch) -> None:
        """Keep a context for ever whose transfers may still be in flight, and what they fill."""
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
