"""The rules of `tablespace.policy` once more, as plainly as they can be said.

Slow, and after the native ones the second opinion: ranks must agree to the last bit, and what
leaves must leave in the same order.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice

WORD = (1 << 64) - 1


class Entry:
    """What a rule ranks."""

    def __init__(self, identity: int, position: int = 0, fill: float = 1.0) -> None:
        self.identity = identity
        self.position = position
        self.fill = fill
        self.rank = 0.0
        self.reuses = 0
        self.used_at = 0


class Queue:
    """Entries by rank, in buckets of nearly equal ones."""

    def __init__(self, resolution: float) -> None:
        self.resolution = resolution
        self.keys: dict[Entry, float] = {}
        self.buckets: dict[int, OrderedDict[Entry, None]] = {}

    def add(self, item: Entry) -> None:
        if item in self.keys:
            self.moved(item)
            return
        self.keys[item] = self._key(item)
        self._bucket(self.keys[item])[item] = None

    def discard(self, item: Entry) -> None:
        if item in self.keys:
            self._take_out(self.keys.pop(item), item)

    def moved(self, item: Entry) -> None:
        if item not in self.keys:
            return
        old, key = self.keys[item], self._key(item)
        if key != old:
            self._take_out(old, item)
            self._bucket(key)[item] = None
            self.keys[item] = key
        elif self.resolution:
            self._bucket(key).move_to_end(item)

    def ordered(self) -> list[Entry]:
        found: list[Entry] = []
        for number in sorted(self.buckets):
            found += self._in_order(number)
        return found

    def first(self) -> Entry | None:
        return self._in_order(min(self.buckets))[0] if self.buckets else None

    def first_many(self, count: int) -> list[Entry]:
        return self._in_order(min(self.buckets))[:count] if self.buckets else []

    def _in_order(self, number: int) -> list[Entry]:
        bucket = self.buckets[number]
        return list(islice(reversed(bucket) if self.resolution else bucket, len(bucket)))

    def _key(self, item: Entry) -> float:
        return item.rank * self.resolution // 1 if self.resolution else item.rank

    def _number(self, key: float) -> int:
        return int(key) if self.resolution else 0

    def _bucket(self, key: float) -> OrderedDict[Entry, None]:
        return self.buckets.setdefault(self._number(key), OrderedDict())

    def _take_out(self, key: float, item: Entry) -> None:
        bucket = self.buckets[self._number(key)]
        del bucket[item]
        if not bucket:
            del self.buckets[self._number(key)]


class Ghosts:
    """Last use and reuses of entries that left: a word each of tag 20, reuses 2, time 42 bits."""

    def __init__(self, capacity: int) -> None:
        places = 1 << max(6, (8 * capacity - 1).bit_length())
        self.words = [0] * places
        self.mask = places - 4

    def put(self, identity: int, used_at: int, reuses: int) -> None:
        mixed = identity * 0x9E3779B97F4A7C15 & WORD
        first = mixed >> 20 & self.mask
        ways = range(first, first + 4)
        chosen = min(ways, key=lambda place: self.words[place] & (1 << 42) - 1)
        tag = (mixed & (1 << 20) - 1) << 44
        self.words[chosen] = tag | min(reuses, 2) << 42 | used_at

    def take(self, identity: int) -> tuple[int, int] | None:
        mixed = identity * 0x9E3779B97F4A7C15 & WORD
        first = mixed >> 20 & self.mask
        for place in range(first, first + 4):
            word = self.words[place]
            if word and word >> 44 == mixed & (1 << 20) - 1:
                self.words[place] = 0
                return word & (1 << 42) - 1, word >> 42 & 3
        return None


class Sample:
    """One key in 2^n."""

    def __init__(self, capacity: int, entries: int) -> None:
        shift = max(0, (capacity - 1) // entries).bit_length()
        self.scale = 1 << shift
        self.entries = max(1, capacity >> shift)

    def __contains__(self, identity: int) -> bool:
        return not (identity * 0xD6E8FEB86659FD93 & WORD) >> 32 & self.scale - 1


class Lru:
    """Least recently used first."""

    resolution = 0.0

    def __init__(self) -> None:
        self.references = 0

    def stored(self, item: Entry) -> None:
        self.references += 1
        item.used_at = self.references
        item.rank = float(self.references)

    def used(self, item: Entry) -> None:
        self.stored(item)

    def left(self, item: Entry) -> None:
        """Remember nothing."""


class Fifo(Lru):
    """First stored first."""

    def used(self, item: Entry) -> None:
        """Change nothing."""


class Value(Lru):
    """Recency in half-lives that are measured, plus bounded credits."""

    resolution = 64.0

    def __init__(
        self,
        capacity: int,
        *,
        trial: bool = True,
        half_life_s: float | None = None,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        super().__init__()
        self.ghosts = Ghosts(capacity)
        self.trial = Trial(capacity) if trial else None
        self.now = 0.0
        self.half_life = float(max(1, capacity))
        self.shortest = max(1.0, self.half_life / 16.0)
        self.longest = self.half_life * 16.0
        self.half_life_s = half_life_s
        self.clock = clock
        self.seconds = clock()

    def stored(self, item: Entry) -> None:
        self._tick(item)
        remembered = self.ghosts.take(item.identity)
        if remembered is None:
            item.used_at, item.reuses = self.references, 0
        else:
            item.used_at, item.reuses = remembered
            self._reuse(item)
        self._place(item)

    def used(self, item: Entry) -> None:
        self._tick(item)
        self._reuse(item)
        self._place(item)

    def left(self, item: Entry) -> None:
        self.ghosts.put(item.identity, item.used_at, item.reuses)

    def _tick(self, item: Entry) -> None:
        if self.trial is not None:
            self.trial.refer(item)
        self.references += 1
        self.now += 1.0 / self.half_life
        if self.half_life_s is not None:
            seconds = self.clock()
            self.now += max(0.0, seconds - self.seconds) / self.half_life_s
            self.seconds = seconds

    def _reuse(self, item: Entry) -> None:
        distance = self.references - item.used_at
        if distance * 64 < self.half_life:
            return
        item.used_at = self.references
        item.reuses = min(2, item.reuses + 1)
        if distance > self.half_life:
            self.half_life = min(self.longest, self.half_life * (1 + 1 / 64))
        else:
            self.half_life = max(self.shortest, self.half_life / (1 + 1 / 64))

    def _place(self, item: Entry) -> None:
        loss = min(1.0, 2.0 * item.position / self.half_life)
        if item.fill < 1.0:
            loss += min(1.0, -math.log2(max(item.fill, 0.5)))
        share = 1.0 if self.trial is None else self.trial.share
        item.rank = self.now + item.reuses * share - loss


class Cache:
    """Keys under one rule."""

    def __init__(self, capacity: int, rule: Lru) -> None:
        self.capacity = capacity
        self.rule = rule
        self.entries: dict[int, Entry] = {}
        self.queue = Queue(rule.resolution)

    def refer(self, identity: int, position: int = 0) -> bool:
        entry = self.entries.get(identity)
        if entry is not None:
            self.rule.used(entry)
            self.queue.moved(entry)
            return True
        if len(self.entries) >= self.capacity:
            victim = self.queue.first()
            assert victim is not None
            self.queue.discard(victim)
            del self.entries[victim.identity]
            self.rule.left(victim)
        entry = self.entries[identity] = Entry(identity, position)
        self.rule.stored(entry)
        self.queue.add(entry)
        return False

    def play(self, identities: Sequence[int]) -> tuple[int, int]:
        found = [self.refer(identity, place) for place, identity in enumerate(identities)]
        return sum(found), [*found, False].index(False)


class Trial:
    """Does credit for reuse pay?"""

    def __init__(self, capacity: int) -> None:
        self.sample = Sample(capacity, 2048)
        entries = self.sample.entries
        self.with_credit = Cache(entries, Value(entries, trial=False))
        self.without = Cache(entries, Lru())
        self.bound = max(1.0, entries * 0.5)
        self.score = self.bound

    @property
    def share(self) -> float:
        return 0.5 + 0.5 * self.score / self.bound

    def refer(self, item: Entry) -> None:
        if item.identity in self.sample:
            gain = self.with_credit.refer(item.identity) - self.without.refer(item.identity)
            self.score = max(-self.bound, min(self.bound, self.score + gain))
