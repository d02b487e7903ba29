"""The payload's checksum: the same number from host memory and from a GPU's, by array arithmetic.

A GPU-direct transfer never brings the payload into host memory, so the checksum has to be
computed where the payload lies. It is therefore made of operations that numpy's arrays and torch's
tensors both have on 64-bit integers: XOR, multiplication that wraps, shift, sum. Each word goes
through a bijection that depends on its place, so that no change of a single word goes unseen, nor
words that changed places.
"""

from __future__ import annotations

from typing import Any

WORD_BYTES = 8
# Words that are summed at a time: small enough for a processor's cache with its temporaries.
ROW_WORDS = 1 << 15
ROW_BYTES = ROW_WORDS * WORD_BYTES

# Odd, from the golden ratio and from murmur3's finalizer; as signed, which is all that torch has.
STEP = 0x9E3779B97F4A7C15 - (1 << 64)
FIRST = 0xFF51AFD7ED558CCD - (1 << 64)
SECOND = 0xC4CEB9FE1A85EC53 - (1 << 64)
LOW_32 = 0xFFFFFFFF
MASK_64 = (1 << 64) - 1


def salts_from(numbers: Any) -> Any:
    """Return what the words of a row are mixed with.

    Parameters
    ----------
    numbers : array of int64
        1 to ROW_WORDS, where the payload lies.
    """
    return numbers * STEP


def row_sums(rows: Any, salts: Any) -> Any:
    """Return the sum of each row's mixed words.

    Parameters
    ----------
    rows : array of int64, shape [rows, words]
        At most ROW_WORDS words.
    salts : array of int64, shape [words]

    Returns
    -------
    array of int64, shape [rows]
    """
    mixed = rows ^ salts
    # Before the product too: the top bits of it would move nothing but themselves.
    # A signed shift brings in the sign; only what came down is wanted.
    mixed ^= (mixed >> 32) & LOW_32
    mixed *= FIRST
    mixed ^= (mixed >> 32) & LOW_32
    mixed *= SECOND
    return mixed.sum(axis=1)


def combine(size_bytes: int, sums: list[int]) -> int:
    """Return the checksum of a payload of so many bytes whose rows have these sums."""
    state = size_bytes & MASK_64
    for each in sums:
        state = ((state ^ (each & MASK_64)) * (FIRST & MASK_64)) & MASK_64
        state ^= state >> 29
    return state
