"""Slabs that change hands: what a size class may take from another, and what it waits for."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from kvd.size_class import SizeClass, Slab
from kvd.slab_pool import SlabPool

# Blocks of a class that are looked at to find its slab that is worth least, and the slabs that
# are then compared: a millisecond in all.
COLDEST_LOOK = 64
SLAB_LOOK = 8
PROMISE_S = 5.0  # A slab is kept for a class that does not ask for it any more.

Worth = tuple[float, float]


class SlabTaking:
    """Finds slabs for a class that has no room. Event loop only.

    Parameters
    ----------
    pool : SlabPool
        The slabs.
    evict : callable
        Evicts what may leave of a slab, and returns whether the slab changed hands; of one that
        is not promised all or nothing.
    dirty_too : callable
        Whether unwritten blocks may leave now.
    """

    def __init__(
        self, pool: SlabPool, evict: Callable[[Slab], bool], dirty_too: Callable[[], bool]
    ) -> None:
        self._pool = pool
        self._evict = evict
        self._dirty_too = dirty_too
        self._look_from = 0
        # The slab each class without one gets, and until when it is kept for it.
        self._promises: dict[SizeClass, tuple[Slab, float]] = {}

    def take_colder(self, size_class: SizeClass) -> bool:
        """Take a slab of another class that is worth less than what this one would evict.

        Looks only after each slabful of evictions.
        """
        if len(self._pool.classes) == 1 or not size_class.looks_about():
            return False
        own = size_class.worth_of_next(COLDEST_LOOK, dirty_too=self._dirty_too())
        return self._take([each for each in self._cold(size_class) if each[0] < own])

    def take_any(self, size_class: SizeClass) -> bool:
        """Take the slab of another class that is worth least: this one has nothing to evict.

        For a class without any the slab is promised if it can't leave now.
        """
        if len(self._pool.classes) == 1:
            return False
        found = self._cold(size_class)
        if self._take(found):
            return True
        if size_class in self._promises and not size_class.slabs:
            return self._promise(size_class)
        # Some in turn: the cold blocks may lie where a lease or a write holds the slab.
        tried = {slab for _, slab in found}
        count = len(self._pool)
        some: list[Slab] = []
        for step in range(count):
            slab = self._pool[(self._look_from + step) % count]
            if len(some) < SLAB_LOOK and slab not in tried and self._suits(slab, size_class):
                some.append(slab)
        if some:
            self._look_from = (some[-1].number + 1) % count
        if self._take(self._worth(some)):
            return True
        return not size_class.slabs and self._promise(size_class)

    def keep_promises(self) -> None:
        """Go on emptying promised slabs; end promises that nobody asked for any more."""
        now = time.monotonic()
        for size_class, (slab, until) in list(self._promises.items()):
            waits = slab.promised_to is size_class
            if waits and now <= until:
                self._evict(slab)
            if now <= until:
                continue
            del self._promises[size_class]
            if waits and slab.size_class is not None:
                slab.size_class.take_back(slab)
            elif slab.size_class is size_class and len(slab.free) == slab.slot_count:
                self._pool.let_go(slab)

    def _promise(self, size_class: SizeClass) -> bool:
        """Have a slab promised to a class; return whether the class has it now.

        Where blocks are written all the time, some are in flight in every slab: what becomes
        free in this one is given to nobody until all of it is.
        """
        slab = self._promises.get(size_class, (None, 0.0))[0]
        if slab is None or slab.promised_to is not size_class:
            slab = next(
                (each for each in self._coldest(size_class) if each.promised_to is None), None
            )
            if slab is None or slab.size_class is None:
                return False
            slab.size_class.promise(slab, size_class)
        self._promises[size_class] = (slab, time.monotonic() + PROMISE_S)
        self._evict(slab)
        return slab.size_class is size_class

    # -- which ---------------------------------------------------------------------------------

    def _suits(self, slab: Slab, size_class: SizeClass) -> bool:
        """Say whether a class might take a slab: leases aside."""
        if slab.size_class is None or slab.size_class is size_class:
            return False
        return slab.may_leave and self._pool.slots_in(slab, size_class) > 0

    def _coldest(self, size_class: SizeClass) -> list[Slab]:
        """Return slabs of other classes by how many of the coldest blocks they hold."""
        dirty_too = self._dirty_too()
        found: list[Slab] = []
        for other in self._pool.classes:
            if other is not size_class and other.slabs:
                cold = Counter(
                    self._pool.slab_of(block.slot)
                    for _, block in other.coldest(COLDEST_LOOK, dirty_too=dirty_too)
                )
                found += [slab for slab, _ in cold.most_common(SLAB_LOOK)]
        return [slab for slab in found if self._pool.slots_in(slab, size_class)]

    def _cold(self, size_class: SizeClass) -> list[tuple[Worth, Slab]]:
        """Return slabs of other classes that may leave, found by their coldest blocks."""
        found = self._coldest(size_class)
        return self._worth([slab for slab in found if self._suits(slab, size_class)])

    def _worth(self, slabs: Sequence[Slab]) -> list[tuple[Worth, Slab]]:
        """Return slabs with what they are worth, without those that may not leave now."""
        dirty_too = self._dirty_too()
        found: list[tuple[Worth, Slab]] = []
        for slab in slabs:
            assert slab.size_class is not None
            worth = slab.size_class.worth_of(slab, dirty_too=dirty_too)
            if worth is not None:
                found.append((worth, slab))
        return found

    def _take(self, slabs: list[tuple[Worth, Slab]]) -> bool:
        """Empty the first slab, by worth, in which no lane holds anything; False if none is."""
        slabs.sort(key=lambda each: each[0])
        return any(self._evict(slab) for _, slab in slabs[:SLAB_LOOK])
