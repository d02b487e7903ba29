"""Admission to the long tier: by default all, or only what was stored or used before."""

from __future__ import annotations

from kvd.block import Block
from tablespace import key_hash

MIN_KEYS = 1 << 16
MAX_KEYS = 1 << 22
BITS_PER_KEY = 16  # With four hashes 0.24 % of new keys look like old ones, in a full filter.


class KeyFilter:
    """A Bloom filter of a bounded number of keys."""

    def __init__(self, max_keys: int) -> None:
        self._bits = bytearray(max_keys * BITS_PER_KEY // 8)
        self._mask = max_keys * BITS_PER_KEY - 1
        self.keys = 0

    def add(self, hash_64: int) -> bool:
        """Add a key by its hash and return whether it may have been there."""
        bits, mask = self._bits, self._mask
        step = (hash_64 >> 32) | 1
        there = True
        at = hash_64
        for _ in range(4):
            place = at & mask
            bit = 1 << (place & 7)
            if not bits[place >> 3] & bit:
                there = False
                bits[place >> 3] |= bit
            at += step
        self.keys += not there
        return there

    def __contains__(self, hash_64: int) -> bool:
        bits, mask = self._bits, self._mask
        step = (hash_64 >> 32) | 1
        at = hash_64
        for _ in range(4):
            place = at & mask
            if not bits[place >> 3] & (1 << (place & 7)):
                return False
            at += step
        return True


class SecondHit:
    """Admits a block when its key was seen before: stored earlier, or used while in memory.

    What was seen is remembered in two filters, the older one emptied when the younger is full;
    so at least the last `max_keys` keys are known, at 4 bytes a key. A key that was never seen
    is taken for a known one in about 0.5 % of the cases; no known one is missed.

    Parameters
    ----------
    max_keys : int
        Rounded to a power of two between `MIN_KEYS` and `MAX_KEYS`.
    """

    def __init__(self, max_keys: int) -> None:
        wanted = min(MAX_KEYS, max(MIN_KEYS, max_keys))
        self._max_keys = 1 << (wanted - 1).bit_length()
        self._young = KeyFilter(self._max_keys)
        self._old = KeyFilter(self._max_keys)
        self._waiting: dict[bytes, Block] = {}
        self._waiting_limit = 2 * MIN_KEYS
        self.admitted = 0
        self.refused = 0

    def stored(self, block: Block) -> bool:
        """Return whether a block that was just stored is admitted, and remember its key."""
        hash_64 = key_hash(block.disk_key)
        known = self._young.add(hash_64) or hash_64 in self._old
        if self._young.keys >= self._max_keys:
            self._old, self._young = self._young, KeyFilter(self._max_keys)
        if known:
            self.admitted += 1
            return True
        self.refused += 1
        self._waiting[block.disk_key] = block
        if len(self._waiting) > self._waiting_limit:
            # Those gone meanwhile are worth nothing.
            self._waiting = {k: b for k, b in self._waiting.items() if not b.gone}
            self._waiting_limit = 2 * max(MIN_KEYS, len(self._waiting))
        return False

    def used(self, key: bytes) -> Block | None:
        """Return the block that a use admits now, or None."""
        block = self._waiting.pop(key, None)
        if block is None or block.gone:
            return None
        self.admitted += 1
        return block

    def forget(self, block: Block) -> None:
        """Note that a block needs no use any more to be admitted."""
        if self._waiting.get(block.disk_key) is block:
            del self._waiting[block.disk_key]
