"""A size class: slots of one size, in slabs that come and go, and which block leaves next."""

from __future__ import annotations

from collections import deque
from itertools import islice

from tablespace.policy import EvictionQueue

from kvd.block import Block, Retention


class Slab:
    """A part of the arena. Its slots have the size of the class it belongs to.

    Attributes
    ----------
    number : int
        Which part.
    first_slot : int
        The number of its first slot.
    size_class : SizeClass or None
        Whose it is; None while it holds nothing.
    free : list of int
        Its free slots, the next to be given last.
    blocks : list of (Block or None)
        What lies in its slots.
    evictable : int
        How many of the blocks stand on an eviction list.
    promised_to : SizeClass or None
        Who gets it once it is empty: until then its free slots are given to nobody.
    """

    __slots__ = (
        "blocks",
        "evictable",
        "first_slot",
        "free",
        "number",
        "promised_to",
        "size_class",
        "slot_count",
    )

    def __init__(self, number: int, first_slot: int) -> None:
        self.number = number
        self.first_slot = first_slot
        self.slot_count = 0
        self.size_class: SizeClass | None = None
        self.free: list[int] = []
        self.blocks: list[Block | None] = []
        self.evictable = 0
        self.promised_to: SizeClass | None = None

    @property
    def may_leave(self) -> bool:
        """Return whether everything in it is free or may be evicted, leases aside."""
        if self.promised_to is not None or not self.slot_count:
            return False
        return self.evictable + len(self.free) == self.slot_count


class SizeClass:
    """Slots of one size. Event loop only.

    Parameters
    ----------
    slot_bytes : int
        Of each.
    resolution : float
        As of `EvictionQueue`.
    permanent : bool
        Stays when it has no slab: it was configured, not announced by a client.

    Attributes
    ----------
    free_slots, promised_slots : int
        Free ones that it gives, and those in slabs that are promised to another class.
    order : tuple of EvictionQueue
        Ephemeral, short clean, short dirty, long clean, long dirty: the order of eviction.
    handed_over : deque
        Blocks on no eviction list yet, with until when.
    since_look : int
        Evictions since it was last asked whether another class's slab is worth less.
    """

    def __init__(self, slot_bytes: int, resolution: float, *, permanent: bool) -> None:
        self.slot_bytes = slot_bytes
        self.permanent = permanent
        self.slabs: dict[Slab, None] = {}
        self._roomy: dict[Slab, None] = {}
        self.slot_count = 0
        self.free_slots = 0
        self.promised_slots = 0
        self.entries = 0
        self.value_bytes = 0
        self.evictions = 0
        self.since_look = 0
        self.handed_over: deque[tuple[float, Block]] = deque()
        self.ephemeral: EvictionQueue[Block] = EvictionQueue(resolution)
        self.short_clean: EvictionQueue[Block] = EvictionQueue(resolution)
        self.short_dirty: EvictionQueue[Block] = EvictionQueue(resolution)
        self.long_clean: EvictionQueue[Block] = EvictionQueue(resolution)
        self.long_dirty: EvictionQueue[Block] = EvictionQueue(resolution)
        self.order = (
            self.ephemeral,
            self.short_clean,
            self.short_dirty,
            self.long_clean,
            self.long_dirty,
        )

    def is_dirty(self, queue: EvictionQueue[Block]) -> bool:
        """Say whether the blocks of a queue would be lost if they were evicted."""
        return queue is self.short_dirty or queue is self.long_dirty

    def queue_for(self, block: Block, clean: bool) -> EvictionQueue[Block]:
        """Return the eviction list that a block belongs to."""
        if block.retention is Retention.LONG:
            return self.long_clean if clean else self.long_dirty
        if block.retention is Retention.SHORT:
            return self.short_clean if clean else self.short_dirty
        return self.ephemeral

    # -- slots ---------------------------------------------------------------------------------

    def take_in(self, slab: Slab, slot_count: int) -> None:
        """Make an unused slab this class's own; its lowest slots are handed out first."""
        slab.size_class = self
        slab.slot_count = slot_count
        slab.blocks = [None] * slot_count
        slab.free = list(range(slab.first_slot + slot_count - 1, slab.first_slot - 1, -1))
        self.slabs[slab] = None
        self._roomy[slab] = None
        self.slot_count += slot_count
        self.free_slots += slot_count

    def let_go(self, slab: Slab) -> None:
        """Give up a slab in which every slot is free."""
        assert len(slab.free) == slab.slot_count and not slab.evictable
        self.take_back(slab)
        del self.slabs[slab], self._roomy[slab]
        self.slot_count -= slab.slot_count
        self.free_slots -= slab.slot_count
        slab.size_class = None
        slab.slot_count = 0
        slab.free, slab.blocks = [], []

    def take_slot(self) -> int:
        """Take a free slot out; there must be one."""
        slab = next(reversed(self._roomy))
        slot = slab.free.pop()
        if not slab.free:
            del self._roomy[slab]
        self.free_slots -= 1
        return slot

    def give_slot(self, slab: Slab, slot: int) -> None:
        """Take a slot back that holds nothing."""
        slab.free.append(slot)
        if slab.promised_to is not None:
            self.promised_slots += 1
            return
        self._roomy[slab] = None
        self.free_slots += 1

    def promise(self, slab: Slab, other: SizeClass) -> None:
        """Give no more slots of a slab, which another class gets once it is empty."""
        slab.promised_to = other
        self._roomy.pop(slab, None)
        self.free_slots -= len(slab.free)
        self.promised_slots += len(slab.free)

    def take_back(self, slab: Slab) -> None:
        """Undo a promise, if there is one."""
        if slab.promised_to is None:
            return
        slab.promised_to = None
        self.promised_slots -= len(slab.free)
        self.free_slots += len(slab.free)
        if slab.free:
            self._roomy[slab] = None

    # -- eviction ------------------------------------------------------------------------------

    def coldest(self, count: int, *, dirty_too: bool) -> list[tuple[int, Block]]:
        """Return up to `count` blocks that leave next, each with the number of its list."""
        found: list[tuple[int, Block]] = []
        for number, queue in enumerate(self.order):
            if queue and (dirty_too or not self.is_dirty(queue)):
                found += [(number, each) for each in queue.lowest(count - len(found))]
            if len(found) >= count:
                break
        return list(islice(found, count))

    def looks_about(self) -> bool:
        """Return whether it evicted a slabful since it last looked at other classes' slabs."""
        if not self.slabs or self.since_look * len(self.slabs) < self.slot_count:
            return False
        self.since_look = 0
        return True

    def worth_of_next(self, most: int, *, dirty_too: bool) -> tuple[float, float]:
        """Return what the next slabful of blocks to leave is worth, by `most` of them."""
        slabful = self.slot_count // max(1, len(self.slabs))
        return mean_worth(self.coldest(max(1, min(most, slabful)), dirty_too=dirty_too))

    def worth_of(self, slab: Slab, *, dirty_too: bool) -> tuple[float, float] | None:
        """Return what a slab's blocks are worth on average; None when they may not all leave.

        A pair: the number of the eviction list, then the rank.
        """
        numbers = {id(queue): number for number, queue in enumerate(self.order)}
        worth: list[tuple[int, Block]] = []
        for block in slab.blocks:
            if block is None:
                continue
            if block.queue is None or (not dirty_too and self.is_dirty(block.queue)):
                return None
            worth.append((numbers[id(block.queue)], block))
        return mean_worth(worth)


def mean_worth(blocks: list[tuple[int, Block]]) -> tuple[float, float]:
    """Return the means of the blocks' list numbers and of their ranks; of none, the least."""
    if not blocks:
        return -1.0, 0.0
    count = len(blocks)
    lists = sum(number for number, _ in blocks) / count
    return lists, sum(block.rank for _, block in blocks) / count
