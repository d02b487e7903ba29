"""Provides page-aligned block buffers, allocated once and reused by every call."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np

from kvd.replay.content import WORD_BYTES, Words


class BlockBuffers:
    """A row of private, page-aligned buffers of one block each.

    Parameters
    ----------
    block_bytes : int
        A multiple of 512, so that every row stays aligned for direct IO.
    count : int
        How many blocks.

    Attributes
    ----------
    words : list of numpy.ndarray
        Each block as 64-bit words.
    views : list of memoryview
        The same blocks as bytes, for a client to fill or to read.
    """

    def __init__(self, block_bytes: int, count: int) -> None:
        # Private memory: a shared anonymous mapping would be shmem, which gets no huge pages.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        memory = mmap.mmap(-1, block_bytes * count, flags=flags)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                memory.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                pass  # A kernel without transparent huge pages: slower, nothing else.
        table = np.frombuffer(memory, dtype=np.uint64).reshape(count, block_bytes // WORD_BYTES)
        table[:] = 0  # Touched now, so that no timed call pays for the page faults.
        view = memoryview(memory)
        self.words: Sequence[Words] = [table[row] for row in range(count)]
        self.views: Sequence[memoryview] = [
            view[row * block_bytes : (row + 1) * block_bytes] for row in range(count)
        ]
