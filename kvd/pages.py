"""Page-level requests on a mapping: populate and pin, with the GIL released.

The mmap module holds the GIL over madvise, which would stop the loop for as long as the kernel
takes to zero the pages, so the two calls go through the C library directly.
"""

import ctypes
import errno
import mmap
import os

MADV_POPULATE_WRITE = 23  # madvise(2), Linux 5.14.
MLOCK_ONFAULT = 1  # mlock2(2).
MAX_ATTEMPTS = 100  # A signal each time, a hundred times in 10 ms, is no accident.

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mlock2.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]


class Pages:
    """The pages of one writable mapping. Keeps the mapping's buffer held until `close`."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self._first: ctypes.c_char | None = ctypes.c_char.from_buffer(mapping)
        self._address = ctypes.addressof(self._first)
        self._size_bytes = len(mapping)

    def populate(self, offset: int, size_bytes: int) -> None:
        """Give a range of fresh, zero memory its pages now.

        Raises
        ------
        OSError
            ENOMEM when there is no memory.
        """
        self._check(offset, size_bytes)
        for _ in range(MAX_ATTEMPTS):
            if _libc.madvise(self._address + offset, size_bytes, MADV_POPULATE_WRITE) == 0:
                return
            code = ctypes.get_errno()
            if code == errno.EINVAL:
                # Kernels before 5.14: writing the zeros does the same, only slower.
                ctypes.memset(self._address + offset, 0, size_bytes)
                return
            if code not in (errno.EINTR, errno.EAGAIN):
                break
        raise OSError(code, os.strerror(code))

    def pin(self) -> None:
        """Ask that pages stay in memory once they have been touched; OSError when refused."""
        if _libc.mlock2(self._address, self._size_bytes, MLOCK_ONFAULT) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    def close(self) -> None:
        """Let go of the mapping's buffer."""
        self._first = None

    def _check(self, offset: int, size_bytes: int) -> None:
        if self._first is None:
            raise ValueError("the pages are closed")
        if offset < 0 or size_bytes < 0 or offset + size_bytes > self._size_bytes:
            raise ValueError(f"{size_bytes} bytes at {offset} are outside the mapping")
