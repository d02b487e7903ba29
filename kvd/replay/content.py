"""Derives a block's key and every byte of it from a hash id, so that reads can be verified.

A word of a block is ``pattern[position] ^ mix(id)``. The pattern is a fixed pseudo-random
sequence and the mix is a bijection of 64 bits, so a word belongs to one id and one position: a
512-byte cell taken from another block differs in all its words, and one taken from another
offset matches in no word but by a chance of 2**-64.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Words: TypeAlias = npt.NDArray[np.uint64]

CELL_BYTES = 512
"""The unit that devices write whole; blocks are made of them."""

WORD_BYTES = 8
CELL_WORDS = CELL_BYTES // WORD_BYTES
MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
POISON = np.uint64(0xDEADBEEFDEADBEEF)


def mix(value: int) -> int:
    """Return the splitmix64 finalizer of a 64-bit integer (a bijection)."""
    value = (value + GOLDEN) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def key_of(hash_id: int) -> bytes:
    """Return the 8-byte key under which the block of this id is stored."""
    return hash_id.to_bytes(8, "big")


def id_of(key: bytes) -> int:
    """Return the hash id of a key made by `key_of`."""
    return int.from_bytes(key, "big")


def pattern(word_count: int) -> Words:
    """Return the position-dependent half of every block: splitmix64 of the positions."""
    # The second half of the golden sequence keeps positions clear of the small hash ids.
    value = np.arange(1 << 63, (1 << 63) + word_count, dtype=np.uint64)
    with np.errstate(over="ignore"):
        value += np.uint64(GOLDEN)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    found: Words = value ^ (value >> np.uint64(31))
    return found


class BlockContents:
    """Generates and verifies blocks.

    Parameters
    ----------
    block_bytes : int
        The largest block's, a positive multiple of 512.

    Notes
    -----
    Not thread-safe: verification uses a scratch buffer; give every thread its own.
    """

    def __init__(self, block_bytes: int) -> None:
        if block_bytes < CELL_BYTES or block_bytes % CELL_BYTES:
            raise ValueError(
                f"blocks of {block_bytes} bytes: the size must be a multiple of {CELL_BYTES}"
            )
        self.block_bytes = block_bytes
        self._pattern = pattern(block_bytes // WORD_BYTES)
        self._expected = np.empty_like(self._pattern)
        self._differs = np.empty(len(self._pattern), dtype=np.bool_)

    def fill(self, hash_id: int, words: Words) -> None:
        """Write the block of this id and of the buffer's size, a multiple of 512 bytes."""
        np.bitwise_xor(self._pattern[: len(words)], np.uint64(mix(hash_id)), out=words)

    def wrong_bytes(self, hash_id: int, words: Words, length: int) -> int:
        """Count the bytes of a block read back that are not what `fill` wrote.

        Parameters
        ----------
        hash_id : int
            Whose block it should be.
        words : numpy.ndarray
            As many as the block should have.
        length : int
            Bytes the read reported; every byte short of a block, or beyond one, is wrong.
        """
        expected, differs = self._expected[: len(words)], self._differs[: len(words)]
        self.fill(hash_id, expected)
        np.not_equal(expected, words, out=differs)
        if length == words.nbytes and not differs.any():
            return 0
        present = min(length, words.nbytes)
        same = expected.view(np.uint8)[:present] == words.view(np.uint8)[:present]
        return present - int(np.count_nonzero(same)) + abs(length - words.nbytes)

    @staticmethod
    def poison(words: Words) -> None:
        """Spoil one word of every cell, so that a cell a read never wrote can't look right."""
        words[::CELL_WORDS] = POISON
