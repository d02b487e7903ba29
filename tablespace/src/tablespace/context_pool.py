"""IO contexts shared by the reading threads of one store."""

from __future__ import annotations

import errno
from collections.abc import Callable

from tablespace._core.aligned_buffer import AlignedBuffer
from tablespace._core.lending import Lending
from tablespace.io import uring_device
from tablespace.io.device import IoContext
from tablespace.io.directory import Directory

READ_DEPTH = 32
STAGING_BYTES = 4 << 20
# Each context is a ring (or a set of threads) and some MiB: more readers than this wait.
MAX_CONTEXTS = 8
# Contexts whose transfers hang keep their memory for ever: a disk that goes on like that is given
# up after so many.
MAX_BURIED = 64


class ContextPool:
    """Makes the IO contexts that `lending` lends to reading calls.

    Notes
    -----
    Where no further one can be made (descriptors, locked memory, a sandbox that came later), those
    there are are waited for; where there is none, threads take the ring's place.
    """

    def __init__(
        self,
        directory: Directory,
        engine: str,
        slot_bytes: int,
        note: Callable[[str], None],
        *,
        concurrency: int = READ_DEPTH,
        timeout_ns: int = 0,
    ) -> None:
        self._directory = directory
        self._engine = engine
        # Told once when another engine had to be taken.
        self._note = note
        self._depth = min(READ_DEPTH, concurrency)
        self._timeout_ns = timeout_ns
        self._staging_bytes = max(2 * slot_bytes, min(READ_DEPTH * slot_bytes, STAGING_BYTES))
        self._prepared = 0
        self.lending: Lending[IoContext] = Lending(self._make, MAX_CONTEXTS)
        # Those of before `enlarge`, whose loans may still be out.
        self._earlier: list[Lending[IoContext]] = []

    def enlarge(self, slot_bytes: int) -> None:
        """Let contexts lent from now on have room for larger slots."""
        if self._staging_bytes >= 2 * slot_bytes:
            return
        self._staging_bytes = 2 * slot_bytes
        self._earlier.append(self.lending)
        self.lending = Lending(self._make, MAX_CONTEXTS)
        self.lending.fill(self._prepared)

    def prepare(self, calls: int) -> None:
        """Make now what so many calls at once need, with its memory resident."""
        self._prepared = calls
        self.lending.fill(calls)

    def _make(self) -> IoContext:
        if len(self.lending.buried) >= MAX_BURIED:
            raise OSError(
                errno.EIO,
                f"{MAX_BURIED} reads met a queue that failed or hung, and each holds memory "
                "for ever. Remedy: look after the disk, then start the process anew",
            )
        engine = self._engine
        try:
            return self._context(engine)
        except OSError as error:
            # `made` counts this one too.
            if engine != "uring" or self.lending.made > 1:
                raise
            context = self._context("posix")
            self._engine = "posix"
            why = uring_device.refusal("io_uring_setup", error)
            self._note(f"reads by pread threads: a further io_uring was refused ({why})")
            return context

    def _context(self, engine: str) -> IoContext:
        queue = self._directory.queue(engine, self._depth)
        queue.timeout_ns = self._timeout_ns
        staging = AlignedBuffer(self._staging_bytes)
        if self._prepared:
            staging.populate()
        return IoContext(queue, staging)

    def close(self, reason: str) -> None:
        """Wait for the contexts in use and free all; later calls are told the reason."""
        for lending in (*self._earlier, self.lending):
            for context in lending.close(reason):
                context.close()
