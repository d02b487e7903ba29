"""The blocks of a soak: what lies under a key follows from namespace and key, its length too."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvd.replay.content import CELL_BYTES, WORD_BYTES, BlockContents, Words, key_of

SPACES = 3
SPACE_SHIFT = 48
SIZES = 4
"""Blocks are a quarter, a half, three quarters or the whole of the largest."""


@dataclass(frozen=True)
class BlockId:
    """Which block: the same numbers are keys in every namespace, with other contents in each."""

    space: int
    number: int

    @property
    def key(self) -> bytes:
        """Return its key."""
        return key_of(self.number)


def name_of(space: int) -> str:
    """Return a namespace's name."""
    return f"kvd-soak/{space}"


class SoakBlocks:
    """Makes and verifies blocks. For one thread.

    Parameters
    ----------
    block_bytes : int
        The largest size, a positive multiple of 2048.
    """

    def __init__(self, block_bytes: int) -> None:
        if block_bytes < SIZES * CELL_BYTES or block_bytes % (SIZES * CELL_BYTES):
            raise ValueError(f"{block_bytes} is no multiple of {SIZES * CELL_BYTES}")
        self._contents = [
            BlockContents(block_bytes * part // SIZES) for part in range(1, SIZES + 1)
        ]

    def size_of(self, block: BlockId) -> int:
        """Return a block's length in bytes."""
        return self._contents_of(block).block_bytes

    def fill(self, block: BlockId, words: Words) -> memoryview:
        """Write a block into a buffer and return that part of it."""
        part = words[: self.size_of(block) // WORD_BYTES]
        self._contents_of(block).fill(_content_id(block), part)
        return part.data.cast("B")

    def wrong_bytes(self, block: BlockId, found: memoryview, length: int) -> int:
        """Count the bytes that are not the block's.

        Parameters
        ----------
        block : BlockId
            What it should be.
        found : memoryview
            At least as long as the block.
        length : int
            What the read reported.
        """
        size_bytes = self.size_of(block)
        words = np.frombuffer(found, dtype=np.uint64, count=size_bytes // WORD_BYTES)
        return self._contents_of(block).wrong_bytes(_content_id(block), words, length)

    def _contents_of(self, block: BlockId) -> BlockContents:
        return self._contents[(block.number + block.space) % SIZES]


def _content_id(block: BlockId) -> int:
    return block.space << SPACE_SHIFT | block.number
