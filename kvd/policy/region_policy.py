"""The rule on the long tier: what `tablespace.open` takes for `eviction`."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from tablespace.policy import EvictionQueue, Ranked, Rule

MAX_HINTS = 4096
"""Blocks of a few write groups: what was told of blocks that were then not stored is let go."""

SPARE_NAMES = 64
"""Named beyond those wanted, in place of entries that are being read just then."""


class _Entry(Ranked):
    """A block on disk; `inserted_many` fills it, a constructor costs as much as all the rest."""

    __slots__ = ("key", "slot_bytes")

    key: bytes
    slot_bytes: int


class RegionPolicy:
    """Ranks the entries of a region by a rule, slots of each size by themselves.

    Attributes
    ----------
    evictions, reclaimed_bytes : int
        Entries that left after they were named here, and the bytes of their slots.

    Notes
    -----
    Safe from any thread. Nothing is persisted: after a restart the entries come in the order of
    their last use, as far as the region kept it, without their reuses and positions.
    """

    def __init__(self, rule: Rule) -> None:
        self.evictions = 0
        self.reclaimed_bytes = 0
        self._rule = rule
        self._lock = threading.Lock()
        self._entries: dict[bytes, _Entry] = {}
        self._queues: dict[int, EvictionQueue[_Entry]] = {}
        self._named: set[bytes] = set()
        self._hints: dict[bytes, tuple[int, int]] = {}

    def expect(self, key: bytes, position: int, length: int) -> None:
        """Tell of a block about to be stored: its place in its prompt and its bytes."""
        with self._lock:
            self._hints[key] = (position, length)
            if len(self._hints) > MAX_HINTS:
                del self._hints[next(iter(self._hints))]

    # -- for the store -------------------------------------------------------------------------

    def inserted(self, key: bytes, slot_bytes: int) -> None:
        """Rank a stored key."""
        self.inserted_many([key], [slot_bytes])

    def used(self, key: bytes) -> None:
        """Rank a key that was read, here or in memory."""
        self.used_many([key])

    def removed(self, key: bytes) -> None:
        """Forget a key; of one that was evicted the rule remembers what it was worth."""
        self.removed_many([key])

    def inserted_many(self, keys: Sequence[bytes], slot_sizes: Sequence[int]) -> None:
        """Rank stored keys."""
        with self._lock:
            for key, slot_bytes in zip(keys, slot_sizes, strict=True):
                position, length = self._hints.pop(key, (0, slot_bytes))
                entry = _Entry(hash(key), position, length / slot_bytes)
                entry.key, entry.slot_bytes = key, slot_bytes
                self._rule.stored(entry)
                self._entries[key] = entry
                queue = self._queues.get(slot_bytes)
                if queue is None:
                    queue = self._queues[slot_bytes] = EvictionQueue(self._rule.resolution)
                queue.add(entry)

    def used_many(self, keys: Sequence[bytes]) -> None:
        """Rank keys that were read, here or in memory."""
        with self._lock:
            found = map(self._entries.get, keys)
            self._rule.touch_many([entry for entry in found if entry is not None])

    def removed_many(self, keys: Sequence[bytes]) -> None:
        """Forget keys; of those that were evicted the rule remembers what they were worth."""
        with self._lock:
            for key in keys:
                entry = self._entries.pop(key, None)
                if entry is None:
                    continue
                if entry.queue is not None:
                    entry.queue.discard(entry)
                if key in self._named:
                    self._named.discard(key)
                    self._rule.left(entry)
                    self.evictions += 1
                    self.reclaimed_bytes += entry.slot_bytes

    def victims(self, slot_bytes: int, wanted: int) -> Sequence[bytes]:
        """Name the keys of the lowest ranks."""
        with self._lock:
            queue = self._queues.get(slot_bytes)
            if queue is None:
                return []
            names = [entry.key for entry in queue.lowest(wanted + SPARE_NAMES)]
            self._named = set(names)
            return names
