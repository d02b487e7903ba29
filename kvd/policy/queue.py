"""The entries of one class, lowest rank first, in buckets of nearly equal ranks."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice
from typing import Generic, Protocol, TypeVar

MIN_STALE = 64  # Numbers of buckets that went are cleared out of the heap not before so many.


class HasRank(Protocol):
    """An entry that has a rank."""

    @property
    def rank(self) -> float: ...


Item = TypeVar("Item", bound=HasRank)


class EvictionQueue(Generic[Item]):
    """Entries by rank.

    Parameters
    ----------
    resolution : float
        Buckets per unit of rank. In a bucket the last to come is the first to go: blocks of a
        prompt come leading ones first. At 0 there is one bucket, and the first to come goes.

    Notes
    -----
    `add`, `discard` and `moved` cost a constant on average, whatever came before. A bucket goes
    with its last entry: ranks rise for ever, and where nothing is evicted nobody would come by
    to clear up. So there are at most as many as entries.
    """

    def __init__(self, resolution: float) -> None:
        self._resolution = resolution
        self._keys: dict[Item, float] = {}
        self._buckets: dict[int, OrderedDict[Item, None]] = {}
        self._heap: list[int] = []

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, item: object) -> bool:
        return item in self._keys

    def __iter__(self) -> Iterator[Item]:
        """Go through all in order; not while entries come and go."""
        for number in sorted(self._buckets):
            bucket = self._buckets[number]
            yield from reversed(bucket) if self._resolution else bucket

    def add(self, item: Item) -> None:
        """Let an entry stand here, by its rank now; one that does already is moved."""
        if item in self._keys:
            self.moved(item)
            return
        key = self._key(item)
        self._keys[item] = key
        self._bucket(key)[item] = None

    def discard(self, item: Item) -> None:
        """Take an entry off."""
        key = self._keys.pop(item, None)
        if key is not None:
            self._take_out(key, item)

    def moved(self, item: Item) -> None:
        """Note that an entry's rank changed; nothing where it does not stand here."""
        old = self._keys.get(item)
        if old is None:
            return
        key = self._key(item)
        if key != old:
            self._take_out(old, item)
            self._bucket(key)[item] = None
            self._keys[item] = key
        elif self._resolution:
            self._bucket(key).move_to_end(item)

    def first(self) -> Item | None:
        """Return the entry to go first, which stays; None when there is none."""
        while self._heap:
            bucket = self._buckets.get(self._heap[0])
            if bucket:
                return next(reversed(bucket) if self._resolution else iter(bucket))
            heapq.heappop(self._heap)
        return None

    def lowest(self, count: int) -> list[Item]:
        """Return up to `count` entries in order, which stay."""
        if self.first() is None:
            return []
        bucket = self._buckets[self._heap[0]]
        if self._resolution and len(bucket) >= count:
            return list(islice(reversed(bucket), count))
        return list(islice(self, count))

    def first_many(self, count: int) -> list[Item]:
        """Return up to `count` entries of the lowest bucket, which stay; one at least, if any."""
        if self.first() is None:
            return []
        bucket = self._buckets[self._heap[0]]
        return list(islice(reversed(bucket) if self._resolution else bucket, count))

    def _key(self, item: Item) -> float:
        return item.rank * self._resolution // 1 if self._resolution else item.rank

    def _take_out(self, key: float, item: Item) -> None:
        number = self._number(key)
        bucket = self._buckets[number]
        del bucket[item]
        if bucket:
            return
        del self._buckets[number]
        if len(self._heap) > 2 * len(self._buckets) + MIN_STALE:
            self._heap = sorted(self._buckets)

    def _number(self, key: float) -> int:
        return int(key) if self._resolution else 0

    def _bucket(self, key: float) -> OrderedDict[Item, None]:
        number = self._number(key)
        bucket = self._buckets.get(number)
        if bucket is None:
            bucket = self._buckets[number] = OrderedDict()
            heapq.heappush(self._heap, number)
        return bucket
