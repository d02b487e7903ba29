"""The entries of one class, lowest rank first, in buckets of nearly equal ranks."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice
from typing import Generic, Protocol, TypeVar


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
    `add`, `discard` and `moved` cost a constant, whatever came before; `first` passes over the
    buckets that became empty, each once. There are about as many as `resolution` times the
    ranks' spread, some hundreds, however many the entries.
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
        for number in sorted(self._heap):
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
            del self._bucket(key)[item]

    def moved(self, item: Item) -> None:
        """Note that an entry's rank changed; nothing where it does not stand here."""
        old = self._keys.get(item)
        if old is None:
            return
        key = self._key(item)
        if key != old:
            del self._bucket(old)[item]
            self._bucket(key)[item] = None
            self._keys[item] = key
        elif self._resolution:
            self._bucket(key).move_to_end(item)

    def first(self) -> Item | None:
        """Return the entry to go first, which stays; None when there is none."""
        while self._heap:
            bucket = self._buckets[self._heap[0]]
            if bucket:
                return next(reversed(bucket) if self._resolution else iter(bucket))
            del self._buckets[heapq.heappop(self._heap)]
        return None

    def lowest(self, count: int) -> list[Item]:
        """Return up to `count` entries in order, which stay."""
        if self.first() is None:
            return []
        bucket = self._buckets[self._heap[0]]
        if self._resolution and len(bucket) >= count:
            return list(islice(reversed(bucket), count))
        return list(islice(self, count))

    def _key(self, item: Item) -> float:
        return item.rank * self._resolution // 1 if self._resolution else item.rank

    def _bucket(self, key: float) -> OrderedDict[Item, None]:
        number = int(key) if self._resolution else 0
        bucket = self._buckets.get(number)
        if bucket is None:
            bucket = self._buckets[number] = OrderedDict()
            heapq.heappush(self._heap, number)
        return bucket
