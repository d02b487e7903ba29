"""What is remembered of entries that left: one word each, in a table of fixed size."""

from __future__ import annotations

from array import array

PLACES_PER_ENTRY = 8
"""Per entry of the cache: a reuse some five turnovers of the cache away is still seen."""

WAYS = 4
"""Places a key may lie in; the one used longest ago gives way."""

TIME_BITS = 42
REUSE_BITS = 2
MAX_REUSES = 2
"""What is credited at most; more would keep what is no longer asked for."""
_TAG_SHIFT = TIME_BITS + REUSE_BITS
_REUSE_MASK = (1 << REUSE_BITS) - 1
_TIME_MASK = (1 << TIME_BITS) - 1
_TAG_MASK = (1 << 64 - _TAG_SHIFT) - 1
_MIX = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: spreads small integers too (Knuth, TAOCP 6.4).
_WORD_MASK = (1 << 64) - 1


class GhostTable:
    """Last use and number of reuses of entries that left, by a hash of their key.

    Parameters
    ----------
    capacity : int
        Entries the cache holds.

    Notes
    -----
    The memory is fixed: 64 to 128 bytes an entry of the cache. Two keys are mistaken for each
    other about once in 260,000 looks; that costs a wrong rank and nothing else.
    """

    def __init__(self, capacity: int) -> None:
        places = 1 << max(6, (PLACES_PER_ENTRY * capacity - 1).bit_length())
        self._words = array("Q", bytes(8 * places))
        self._mask = places - WAYS

    def put(self, identity: int, used_at: int, reuses: int) -> None:
        """Remember an entry that leaves, last used at reference number `used_at` (not 0)."""
        words = self._words
        mixed = identity * _MIX & _WORD_MASK
        first = mixed >> 20 & self._mask
        chosen, oldest = first, _WORD_MASK
        for place in range(first, first + WAYS):
            last = words[place] & _TIME_MASK
            if last < oldest:
                chosen, oldest = place, last
        tag = (mixed & _TAG_MASK) << _TAG_SHIFT
        words[chosen] = tag | min(reuses, MAX_REUSES) << TIME_BITS | used_at

    def take(self, identity: int) -> tuple[int, int] | None:
        """Return (used_at, reuses) of an entry that comes back, and forget it."""
        words = self._words
        mixed = identity * _MIX & _WORD_MASK
        first = mixed >> 20 & self._mask
        tag = mixed & _TAG_MASK
        for place in range(first, first + WAYS):
            word = words[place]
            if word >> _TAG_SHIFT == tag and word:
                words[place] = 0
                return word & _TIME_MASK, word >> TIME_BITS & _REUSE_MASK
        return None
