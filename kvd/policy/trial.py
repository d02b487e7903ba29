"""Two small caches beside the real one: does credit for reuse pay on this traffic?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.policy.queue import EvictionQueue

if TYPE_CHECKING:
    from kvd.policy.rules import Ranked, Rule

SAMPLE_ENTRIES = 2048
"""Entries of each small cache, at most: they see a sample of the keys and hold that share."""

SCORE_SHARE = 0.5

_MIX = 0xD6E8FEB86659FD93  # An odd constant unlike the ghosts': samples and places are unrelated.
_WORD_MASK = (1 << 64) - 1


class _Entry:
    __slots__ = ("identity", "position", "rank", "reuses", "used_at")

    fill = 1.0

    def __init__(self, identity: int, position: int) -> None:
        self.identity = identity
        self.position = position
        self.rank = 0.0
        self.reuses = 0
        self.used_at = 0


class _SmallCache:
    """The sampled keys under one rule."""

    def __init__(self, capacity: int, rule: Rule) -> None:
        self._capacity = capacity
        self._rule = rule
        self._entries: dict[int, _Entry] = {}
        self._queue: EvictionQueue[_Entry] = EvictionQueue()

    def refer(self, item: Ranked) -> bool:
        """Use or store a key and return whether it was there."""
        entry = self._entries.get(item.identity)
        if entry is not None:
            self._rule.used(entry)
            return True
        if len(self._entries) >= self._capacity:
            victim = self._queue.first()
            assert victim is not None
            self._queue.discard(victim)
            del self._entries[victim.identity]
            self._rule.left(victim)
        entry = _Entry(item.identity, 0)
        self._rule.stored(entry)
        self._entries[entry.identity] = entry
        self._queue.add(entry)
        return False


class Trial:
    """Plays a sample of the references with the credit and without.

    Notes
    -----
    Sampling by a hash of the key keeps distances in proportion (Waldspurger et al., SHARDS,
    FAST 2015), so small caches behave as large ones do.
    """

    def __init__(self, capacity: int) -> None:
        from kvd.policy.rules import LruRule
        from kvd.policy.value import ValueRule

        shift = max(0, (capacity - 1) // SAMPLE_ENTRIES).bit_length()
        entries = max(1, capacity >> shift)
        self._mask = (1 << shift) - 1
        self._with = _SmallCache(entries, ValueRule(entries, trial=False))
        self._without = _SmallCache(entries, LruRule())
        self._bound = max(1.0, entries * SCORE_SHARE)
        self._score = self._bound

    @property
    def share(self) -> float:
        """Return how much of the credit to give, 0 to 1."""
        return 0.5 + 0.5 * self._score / self._bound

    def refer(self, item: Ranked) -> None:
        """Let both see a reference, if its key is in the sample."""
        if (item.identity * _MIX & _WORD_MASK) >> 32 & self._mask:
            return
        score = self._score + self._with.refer(item) - self._without.refer(item)
        self._score = max(-self._bound, min(self._bound, score))
