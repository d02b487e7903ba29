"""The entries of one class, lowest rank first."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

MIN_STALE = 1024


class HasRank(Protocol):
    """An entry whose rank may rise while it waits, without a word to the queue, never fall."""

    @property
    def rank(self) -> float: ...


Item = TypeVar("Item", bound=HasRank)


class EvictionQueue(Generic[Item]):
    """A heap whose entries are put right when they come to the top.

    Notes
    -----
    A use costs nothing here. `add` is O(log n), `discard` constant, `first` O(log n) amortised:
    an entry is moved at most once for each time its rank rose.
    """

    def __init__(self) -> None:
        self._members: dict[Item, None] = {}
        self._heap: list[tuple[float, int, Item]] = []
        self._order = 0

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, item: object) -> bool:
        return item in self._members

    def __iter__(self) -> Iterator[Item]:
        """Go through all, lowest rank first; sorts, so it is for reports and for the stop."""
        return iter(sorted(self._members, key=lambda item: item.rank))

    def add(self, item: Item) -> None:
        """Let an entry stand here; one that does already stays as it is."""
        if item in self._members:
            return
        self._members[item] = None
        self._push(item)
        if len(self._heap) > 2 * len(self._members) + MIN_STALE:
            # Places of entries that left are worth nothing.
            self._heap.clear()
            for member in self._members:
                self._push(member)

    def discard(self, item: Item) -> None:
        """Take an entry off."""
        self._members.pop(item, None)

    def first(self) -> Item | None:
        """Return the entry of the lowest rank, which stays; None when there is none."""
        heap = self._heap
        while heap:
            rank, order, item = heap[0]
            if item not in self._members:
                heapq.heappop(heap)
            elif item.rank > rank:
                heapq.heapreplace(heap, (item.rank, order, item))
            else:
                return item
        return None

    def lowest(self, count: int) -> list[Item]:
        """Return up to `count` entries of the lowest ranks, which stay."""
        found: list[Item] = []
        while len(found) < count:
            item = self.first()
            if item is None:
                break
            found.append(item)
            heapq.heappop(self._heap)
            del self._members[item]
        for item in found:
            self.add(item)
        return found

    def _push(self, item: Item) -> None:
        self._order += 1
        heapq.heappush(self._heap, (item.rank, self._order, item))
