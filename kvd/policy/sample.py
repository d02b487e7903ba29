"""Chooses keys by a hash: a small cache that sees a share of the keys behaves as a large one.

Waldspurger et al., "Efficient MRC Construction with SHARDS", FAST 2015.
"""

from __future__ import annotations

_MIX = 0xD6E8FEB86659FD93  # An odd constant unlike the ghosts': samples and places are unrelated.
_WORD_MASK = (1 << 64) - 1


class Sample:
    """One key in 2^n, such that a cache of `capacity` entries shrinks to at most `entries`."""

    def __init__(self, capacity: int, entries: int) -> None:
        shift = max(0, (capacity - 1) // entries).bit_length()
        self.scale = 1 << shift
        self.entries = max(1, capacity >> shift)

    def __contains__(self, identity: int) -> bool:
        return not (identity * _MIX & _WORD_MASK) >> 32 & self.scale - 1
