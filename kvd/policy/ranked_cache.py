"""A cache of keys alone under one rule: what simulations and trials are made of."""

from __future__ import annotations

from kvd.policy.queue import EvictionQueue
from kvd.policy.ranked import Rule


class Entry:
    """A key of the cache."""

    __slots__ = ("identity", "position", "rank", "reuses", "used_at")

    fill = 1.0

    def __init__(self, identity: int, position: int) -> None:
        self.identity = identity
        self.position = position
        self.rank = 0.0
        self.reuses = 0
        self.used_at = 0


class RankedCache:
    """At most `capacity` keys; an absent one comes in at once and the lowest rank leaves."""

    def __init__(self, capacity: int, rule: Rule) -> None:
        self._capacity = capacity
        self._rule = rule
        self._entries: dict[int, Entry] = {}
        self._queue: EvictionQueue[Entry] = EvictionQueue(rule.resolution)

    def refer(self, identity: int, position: int) -> bool:
        """Use a key, or store it; return whether it was there."""
        entry = self._entries.get(identity)
        if entry is not None:
            self._rule.used(entry)
            self._queue.moved(entry)
            return True
        if len(self._entries) >= self._capacity:
            victim = self._queue.first()
            assert victim is not None
            self._queue.discard(victim)
            del self._entries[victim.identity]
            self._rule.left(victim)
        entry = Entry(identity, position)
        self._rule.stored(entry)
        self._entries[identity] = entry
        self._queue.add(entry)
        return False
