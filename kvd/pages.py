"""Page-level requests on a mapping: populate, pin, huge pages, NUMA nodes; with the GIL released.

The mmap module holds the GIL over madvise, which would stop the loop for as long as the kernel
takes to zero the pages, and cannot choose an address; so these calls go through the C library.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
from collections.abc import Sequence

from kvd.slab_geometry import HUGE_PAGE_BYTES

MADV_POPULATE_WRITE = 23  # madvise(2), Linux 5.14.
MADV_COLLAPSE = 25  # madvise(2), Linux 6.1.
MLOCK_ONFAULT = 1  # mlock2(2).
MPOL_BIND, MPOL_INTERLEAVE = 2, 3  # mbind(2).
SYS_MBIND = {"x86_64": 237, "aarch64": 235}.get(platform.machine())
MAX_ATTEMPTS = 100  # A signal each time, a hundred times in 10 ms, is no accident.
MAX_NODES = 1024

PROT_NONE = 0
MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000  # mmap(2).
MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mlock2.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.mmap.restype = ctypes.c_void_p


def map_aligned(fd: int, size_bytes: int) -> ctypes.Array[ctypes.c_char]:
    """Map a file, writable and shared, at an address where huge pages can lie.

    Stays mapped until the process ends: nothing tells whether a view of it is left.

    Raises
    ------
    OSError
        When the kernel refuses.
    """
    spare = size_bytes + HUGE_PAGE_BYTES
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    start = _libc.mmap(None, spare, PROT_NONE, flags, -1, 0)
    if start is None or start == MAP_FAILED:
        raise _error()
    address = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    mapped = _libc.mmap(address, size_bytes, protection, mmap.MAP_SHARED | MAP_FIXED, fd, 0)
    if mapped != address:
        raise _error()
    return (ctypes.c_char * size_bytes).from_address(address)


def huge_memfd(name: str, size_bytes: int) -> int:
    """Return a fresh memfd of reserved huge pages, which may be sealed.

    Mapping it, shared and writable, takes the pages out of the reserve or fails with ENOMEM.

    Raises
    ------
    OSError
        When the kernel has no such pages.
    """
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | os.MFD_HUGETLB | os.MFD_HUGE_2MB
    fd = os.memfd_create(name, flags)
    try:
        os.ftruncate(fd, size_bytes)
    except OSError:
        os.close(fd)
        raise
    return fd


class Pages:
    """The pages of one writable mapping. Keeps the mapping's buffer held until `close`."""

    def __init__(self, mapping: mmap.mmap | ctypes.Array[ctypes.c_char]) -> None:
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

    def collapse(self, offset: int, size_bytes: int) -> int:
        """Make huge pages of the whole ones in a populated range; return their bytes.

        By MADV_COLLAPSE: MADV_HUGEPAGE does nothing to a memfd where shmem_enabled is `never`,
        the default.

        Raises
        ------
        OSError
            When the kernel has none, or cannot.
        """
        self._check(offset, size_bytes)
        first = -(-(self._address + offset) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        end = (self._address + offset + size_bytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        if end <= first:
            return 0
        for _ in range(MAX_ATTEMPTS):
            if _libc.madvise(first, end - first, MADV_COLLAPSE) == 0:
                return end - first
            if ctypes.get_errno() not in (errno.EINTR, errno.EAGAIN):
                break
        raise _error()

    def bind(self, nodes: Sequence[int] | None) -> None:
        """Have pages come from NUMA nodes, or (None) from all of them in turn.

        Raises
        ------
        OSError
            When the kernel refuses: there is no such node, for example.
        """
        if SYS_MBIND is None:
            raise OSError(errno.ENOSYS, f"not known on {platform.machine()}")
        mask = (ctypes.c_ulong * (MAX_NODES // (8 * ctypes.sizeof(ctypes.c_ulong))))()
        bits = 8 * ctypes.sizeof(ctypes.c_ulong)
        for node in range(MAX_NODES) if nodes is None else nodes:
            if nodes is None and not os.path.exists(f"/sys/devices/system/node/node{node}"):
                continue
            mask[node // bits] |= 1 << (node % bits)
        mode = MPOL_INTERLEAVE if nodes is None else MPOL_BIND
        if _libc.syscall(
            ctypes.c_long(SYS_MBIND),
            ctypes.c_void_p(self._address),
            ctypes.c_size_t(self._size_bytes),
            ctypes.c_int(mode),
            mask,
            ctypes.c_ulong(MAX_NODES),
            ctypes.c_uint(0),
        ):
            raise _error()

    def pin(self) -> None:
        """Ask that pages stay in memory once they have been touched; OSError when refused."""
        if _libc.mlock2(self._address, self._size_bytes, MLOCK_ONFAULT) != 0:
            raise _error()

    def close(self) -> None:
        """Let go of the mapping's buffer."""
        self._first = None

    def _check(self, offset: int, size_bytes: int) -> None:
        if self._first is None:
            raise ValueError("the pages are closed")
        if offset < 0 or size_bytes < 0 or offset + size_bytes > self._size_bytes:
            raise ValueError(f"{size_bytes} bytes at {offset} are outside the mapping")


def _error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))
