"""Transfers by pread and pwrite: what is left where no library moves bytes to the GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from kvd_connectors.gpu_direct.driver import (
    DIRECT,
    MAX_CALL_BYTES,
    Transfer,
    check_aligned,
    next_piece,
)
from kvd_connectors.gpu_direct.errors import io_error
from kvd_connectors.gpu_direct.memory import HostMemory, Memory, host_view

BOUNCE_BYTES = 8 << 20
"""Copied at a time to or from a GPU: enough for a disk, little beside a chunk."""


class PosixTransfer:
    """An open file. Memory of a GPU goes through a host buffer, piece by piece."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, memory: Memory, size_bytes: int, file_offset: int) -> None:
        """Write the first bytes of memory at a place of the file."""
        check_aligned("pwrite", memory, size_bytes, file_offset)
        if memory.is_host:
            self._write(host_view(memory.pointer, size_bytes), file_offset)
            return
        bounce = HostMemory(min(BOUNCE_BYTES, size_bytes))
        for first in range(0, size_bytes, bounce.size_bytes):
            size = min(bounce.size_bytes, size_bytes - first)
            memory.copy_out(first, bounce.array[:size])
            self._write(bounce.view[:size], file_offset + first)

    def read(self, memory: Memory, size_bytes: int, file_offset: int) -> None:
        """Read from a place of the file to the start of memory."""
        check_aligned("pread", memory, size_bytes, file_offset)
        if memory.is_host:
            self._read(host_view(memory.pointer, size_bytes), file_offset)
            return
        bounce = HostMemory(min(BOUNCE_BYTES, size_bytes))
        for first in range(0, size_bytes, bounce.size_bytes):
            size = min(bounce.size_bytes, size_bytes - first)
            self._read(bounce.view[:size], file_offset + first)
            memory.copy_in(first, bounce.array[:size])

    def _write(self, source: memoryview, file_offset: int) -> None:
        moved = 0
        while moved < len(source):
            part = source[moved : moved + MAX_CALL_BYTES]
            try:
                count = os.pwritev(self._fd, [part], file_offset + moved)
            except OSError as error:
                raise io_error("pwrite", error.errno or 0) from error
            moved = next_piece("pwrite", moved, len(source), count)

    def _read(self, target: memoryview, file_offset: int) -> None:
        moved = 0
        while moved < len(target):
            part = target[moved : moved + MAX_CALL_BYTES]
            try:
                count = os.preadv(self._fd, [part], file_offset + moved)
            except OSError as error:
                raise io_error("pread", error.errno or 0) from error
            moved = next_piece("pread", moved, len(target), count)


class PosixDriver:
    """pread and pwrite, with O_DIRECT or through the page cache.

    Parameters
    ----------
    direct : bool
    """

    def __init__(self, *, direct: bool) -> None:
        self.name = "posix-direct" if direct else "posix-buffered"
        self.open_flags = DIRECT if direct else 0

    def register(self, memory: Memory) -> None:
        """Nothing to do."""

    def unregister(self, memory: Memory) -> None:
        """Nothing to do."""

    @contextmanager
    def file(self, fd: int) -> Iterator[Transfer]:
        """Take an open file into use."""
        yield PosixTransfer(fd)

    def close(self) -> None:
        """Nothing to do."""
