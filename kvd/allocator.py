"""How malloc is used by a process that runs for a year.

glibc learns from every large block that is freed to keep such blocks within its heaps, each thread
with a heap of its own. Tables that double then leave holes which the next, larger one does not
fit, and a daemon grows in steps of a MiB for hours.
"""

from __future__ import annotations

import ctypes

# mallopt(3); malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8

LARGE_BYTES = 128 << 10
"""A block from here on is a mapping of its own and goes back to the system when it is freed."""

SPARE_BYTES = 1 << 20
"""As much at the end of the heap is kept, so that it is not given back and fetched in turn."""


def hold_steady() -> bool:
    """Give large blocks back when they are freed, and have all threads share one heap.

    To be called before the first thread starts. Nearly all that is allocated is so under the
    interpreter's lock: heaps of their own would save the threads nothing.

    Returns
    -------
    bool
        False where the C library has no mallopt, or refuses.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = {
        M_MMAP_THRESHOLD: LARGE_BYTES,
        M_TRIM_THRESHOLD: SPARE_BYTES,
        M_ARENA_MAX: 1,
    }
    taken = [mallopt(name, value) for name, value in settings.items()]
    return all(taken)
