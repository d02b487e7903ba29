"""The seam below chunk files: what moves bytes between a file and registered memory."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Protocol

from kvd_connectors.gpu_direct.errors import GpuIoError
from kvd_connectors.gpu_direct.memory import ALIGNMENT, Memory

MAX_CALL_BYTES = 1 << 30
"""Asked for in one call: Linux moves at most 2 GiB less a page (read(2))."""


class Transfer(Protocol):
    """A file that is open for transfers."""

    def write(self, memory: Memory, size_bytes: int, file_offset: int) -> None:
        """Write the first bytes of memory at a place of the file; all of them or GpuIoError."""
        ...

    def read(self, memory: Memory, size_bytes: int, file_offset: int) -> None:
        """Read from a place of the file to the start of memory; all bytes or GpuIoError."""
        ...


class Driver(Protocol):
    """One way of moving bytes. Safe from any thread.

    Attributes
    ----------
    name : str
        "hipfile", "cufile", "posix-direct" or "posix-buffered".
    open_flags : int
        What files have to be opened with besides.
    """

    @property
    def name(self) -> str: ...

    @property
    def open_flags(self) -> int: ...

    def register(self, memory: Memory) -> None:
        """Take memory into use; GpuIoError where that is refused."""
        ...

    def unregister(self, memory: Memory) -> None:
        """Let go of memory."""
        ...

    def file(self, fd: int) -> AbstractContextManager[Transfer]:
        """Take an open file into use; the caller closes it afterwards."""
        ...

    def close(self) -> None:
        """End."""
        ...


def next_piece(call: str, moved: int, size_bytes: int, count: int) -> int:
    """Return how far a transfer is after a call that moved `count` bytes.

    Raises
    ------
    GpuIoError
        It moved nothing, or ended where none can go on.
    """
    if count <= 0 or (moved + count) % ALIGNMENT or moved + count > size_bytes:
        raise GpuIoError(call, 0, f"{moved + count} of {size_bytes} bytes were moved")
    return moved + count


def check_aligned(call: str, memory: Memory, size_bytes: int, file_offset: int) -> None:
    """Raise ValueError for what O_DIRECT would not take, before anything is moved."""
    if memory.pointer % ALIGNMENT or size_bytes % ALIGNMENT or file_offset % ALIGNMENT:
        raise ValueError(f"{call}: address, length and place have to be multiples of {ALIGNMENT}")
    if not 0 < size_bytes <= memory.size_bytes:
        raise ValueError(f"{call}: {size_bytes} bytes of memory of {memory.size_bytes}")


DIRECT = os.O_DIRECT
