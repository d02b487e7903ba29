"""Memory that chunks are written from and read into: an address and a length, on host or GPU."""

from __future__ import annotations

import ctypes
import mmap
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvd_connectors.gpu_direct import checksum

Bytes = npt.NDArray[np.uint8]

ALIGNMENT = 4096
"""Of addresses, lengths and places in files: what every O_DIRECT file system takes (open(2))."""


def aligned(size_bytes: int) -> int:
    """Return the next multiple of the alignment."""
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


class Memory(Protocol):
    """A buffer that is registered with a driver once and used for many chunks.

    Attributes
    ----------
    pointer : int
        Its address, a multiple of ALIGNMENT.
    size_bytes : int
        A multiple of ALIGNMENT.
    is_host : bool
        Whether the processor can read and write at `pointer`.
    """

    @property
    def pointer(self) -> int: ...

    @property
    def size_bytes(self) -> int: ...

    @property
    def is_host(self) -> bool: ...

    def checksum(self, size_bytes: int) -> int:
        """Return the checksum of the first bytes; `size_bytes` is a multiple of ALIGNMENT."""
        ...

    def zero(self, first: int, last: int) -> None:
        """Zero the bytes from one place to before another."""
        ...

    def copy_out(self, offset_bytes: int, target: Bytes) -> None:
        """Copy into host memory."""
        ...

    def copy_in(self, offset_bytes: int, source: Bytes) -> None:
        """Copy from host memory."""
        ...


class HostMemory:
    """Anonymous pages of this process.

    Attributes
    ----------
    array : numpy.ndarray
        Shape [size_bytes], dtype uint8: the memory itself.
    view : memoryview
        The same.
    """

    is_host = True

    def __init__(self, size_bytes: int) -> None:
        if size_bytes <= 0:
            raise ValueError(f"a buffer of {size_bytes} bytes: give at least one")
        self.size_bytes = aligned(size_bytes)
        # Pages of an anonymous mapping begin at multiples of the page size, 4096 or more.
        self.view = memoryview(mmap.mmap(-1, self.size_bytes))
        self.array: Bytes = np.frombuffer(self.view, dtype=np.uint8)
        self.pointer = int(self.array.ctypes.data)
        assert self.pointer % ALIGNMENT == 0
        self._salts = checksum.salts_from(np.arange(1, checksum.ROW_WORDS + 1, dtype=np.int64))

    def checksum(self, size_bytes: int) -> int:
        """Return the checksum of the first bytes."""
        words = self.array[:size_bytes].view(np.int64)
        sums: list[int] = []
        for first in range(0, len(words), checksum.ROW_WORDS):
            row = words[first : first + checksum.ROW_WORDS]
            sums.append(int(checksum.row_sums(row[None, :], self._salts[: len(row)])[0]))
        return checksum.combine(size_bytes, sums)

    def zero(self, first: int, last: int) -> None:
        """Zero the bytes from one place to before another."""
        self.array[first:last] = 0

    def copy_out(self, offset_bytes: int, target: Bytes) -> None:
        """Copy into other host memory."""
        target[:] = self.array[offset_bytes : offset_bytes + len(target)]

    def copy_in(self, offset_bytes: int, source: Bytes) -> None:
        """Copy from other host memory."""
        self.array[offset_bytes : offset_bytes + len(source)] = source


def host_view(pointer: int, size_bytes: int) -> memoryview:
    """Return host memory at an address as a writable buffer; its owner keeps it alive."""
    return memoryview((ctypes.c_uint8 * size_bytes).from_address(pointer)).cast("B")
