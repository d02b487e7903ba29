"""The memory tier: which block lies in which slot, and which one leaves next."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from kvd.arena import Arena
from kvd.block import Block, Retention
from kvd.expiry import boot_clock_ns
from kvd.namespaces import Namespace

MIN_STALE_LOOKS = 1024
MAX_DIRTY_LOOKS = 64  # Of several paths one stands still: about that many are its own.


@dataclass
class MemoryCounters:
    """What happened in the memory tier."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    expired: int = 0
    no_room: int = 0
    corrupt: int = 0
    dropped: int = 0
    bytes_in: int = 0
    bytes_out: int = 0


class MemoryTier:
    """Blocks in the arena, by namespace and key, in the order they would be evicted.

    Parameters
    ----------
    arena : Arena
        Gives slots and holds their records.
    writes_back : bool
        Whether there is a long tier; without one every block counts as clean.

    Attributes
    ----------
    may_drop_dirty : callable
        Asked before an unwritten block is evicted. While the disk makes progress the newcomer
        is refused instead: what was accepted is kept, and room comes within milliseconds.
    gives_way : callable
        Asked of an unwritten block then: of several paths only some may stand still.
    on_reserve : callable
        Called after every reservation, so that room is made before it is needed.

    Notes
    -----
    Event loop only. A slot is in exactly one state: not populated yet, free, reserved (given to
    a client or to a promotion), holding a block, or quarantined (its reservation's owner may
    still write into it). Eviction order: expired, ephemeral, short, long; within a class clean
    before dirty; least recently used first. Dirty ones are passed over while the disk makes
    progress. Blocks queued for the long tier are in no list: they are safe.
    """

    def __init__(self, arena: Arena, *, writes_back: bool) -> None:
        self.arena = arena
        self._writes_back = writes_back
        self.may_drop_dirty: Callable[[], bool] = lambda: True
        self.gives_way: Callable[[Block], bool] = lambda block: True
        self.on_reserve: Callable[[], None] = lambda: None
        self.counters = MemoryCounters()
        self.value_bytes = 0
        self.entries = 0
        self.reserved_slots = 0
        self.quarantined_slots = 0
        self._free: list[int] = []
        self._tables: dict[int, dict[bytes, Block]] = {}
        self._expiry: list[tuple[int, int, Block]] = []
        self._expiry_order = 0
        self._ephemeral: OrderedDict[Block, None] = OrderedDict()
        self._short_clean: OrderedDict[Block, None] = OrderedDict()
        self._short_dirty: OrderedDict[Block, None] = OrderedDict()
        self._long_clean: OrderedDict[Block, None] = OrderedDict()
        self._long_dirty: OrderedDict[Block, None] = OrderedDict()
        self._order = (
            self._ephemeral,
            self._short_clean,
            self._short_dirty,
            self._long_clean,
            self._long_dirty,
        )

    # -- slots ---------------------------------------------------------------------------------

    @property
    def free_slots(self) -> int:
        """Return how many populated slots hold nothing."""
        return len(self._free)

    def add_slots(self, first: int, count: int) -> None:
        """Take populated slots into use; the lowest are handed out first."""
        self._free.extend(range(first + count - 1, first - 1, -1))

    def reserve(self) -> tuple[int, int] | None:
        """Return (slot, reservation) of a slot to write into, evicting if need be, or None."""
        if not self._free and not self._evict_one():
            self.counters.no_room += 1
            self.on_reserve()
            return None
        slot = self._free.pop()
        self.reserved_slots += 1
        self.on_reserve()
        return slot, self.arena.records.reserve(slot)

    def unreserve(self, slot: int) -> None:
        """Take a reserved slot back that nobody writes into any more."""
        self.arena.records.retire(slot)
        self.reserved_slots -= 1
        self._free.append(slot)

    def quarantine(self, slot: int) -> None:
        """Keep a reserved slot out of use: its owner may still write into it."""
        self.reserved_slots -= 1
        self.quarantined_slots += 1

    def end_quarantine(self, slot: int) -> None:
        """Take a quarantined slot into use: its owner is gone or said so."""
        self.arena.records.reserve(slot)
        self.quarantined_slots -= 1
        self._free.append(slot)

    # -- lookup --------------------------------------------------------------------------------

    def find(self, namespace: Namespace, key: bytes) -> Block | None:
        """Return the block of a key, unless it expired."""
        table = self._tables.get(namespace.id)
        if table is None:
            return None
        block = table.get(key)
        if block is not None and block.expires_ns and block.expires_ns <= boot_clock_ns():
            self._expire(block)
            return None
        return block

    def present(self, namespace: Namespace, keys: list[bytes]) -> list[bool]:
        """Return which keys have a block that did not expire."""
        if self._expiry:
            return [self.find(namespace, key) is not None for key in keys]
        table = self._tables.get(namespace.id, {})
        return [key in table for key in keys]

    def touch(self, block: Block) -> None:
        """Make a block the most recently used one."""
        if block.place is not None:
            block.place.move_to_end(block)

    def blocks_of(self, namespace: Namespace) -> list[Block]:
        """Return every block of a namespace."""
        return list(self._tables.get(namespace.id, {}).values())

    def dirty_blocks(self, retention: Retention) -> list[Block]:
        """Return the unwritten, unqueued blocks of a class, least recently used first."""
        return list(self._long_dirty if retention is Retention.LONG else self._short_dirty)

    def oldest_dirty_long(self) -> Block | None:
        """Return the long block that has waited longest for room in the write queue."""
        return next(iter(self._long_dirty), None)

    # -- change --------------------------------------------------------------------------------

    def publish(self, block: Block) -> None:
        """Make a written, reserved slot readable as this block, which must be new here."""
        table = self._tables.setdefault(block.namespace.id, {})
        assert block.key not in table
        block.namespace.stored = True
        block.version = self.arena.records.publish(
            block.slot, block.length, block.checksum, block.namespace.id, block.expires_ns
        )
        self.reserved_slots -= 1
        table[block.key] = block
        self.entries += 1
        self.value_bytes += block.length
        self.place(block)
        self._watch_expiry(block)

    def set_expiry(self, block: Block, expires_ns: int) -> None:
        """Give a published block another expiry; 0 means never."""
        block.expires_ns = expires_ns
        self.arena.records.set_expires(block.slot, expires_ns)
        self._watch_expiry(block)

    def _watch_expiry(self, block: Block) -> None:
        """Have the sweep look at a block when it expires: one look is queued, the earliest."""
        expires_ns = block.expires_ns
        if not expires_ns or 0 < block.watched_ns <= expires_ns:
            return
        block.watched_ns = expires_ns
        self._expiry_order += 1
        heapq.heappush(self._expiry, (expires_ns, self._expiry_order, block))
        if len(self._expiry) > 2 * self.entries + MIN_STALE_LOOKS:
            # Looks at blocks that are gone, or to be looked at earlier, are worth nothing.
            self._expiry = [
                look for look in self._expiry if not look[2].gone and look[0] == look[2].watched_ns
            ]
            heapq.heapify(self._expiry)

    def place(self, block: Block) -> None:
        """Put a block at the recent end of the eviction list it belongs to now."""
        if block.place is not None:
            del block.place[block]
        clean = block.durable or not block.admitted or not self._writes_back
        if block.retention is Retention.LONG:
            block.place = self._long_clean if clean else self._long_dirty
        elif block.retention is Retention.SHORT:
            block.place = self._short_clean if clean else self._short_dirty
        else:
            block.place = self._ephemeral
        block.place[block] = None

    def protect(self, block: Block) -> None:
        """Take a block off its eviction list: it is queued for the long tier."""
        if block.place is not None:
            del block.place[block]
            block.place = None

    def remove(self, block: Block) -> None:
        """Take a block out: readers stop at once, the slot is free unless it is in flight."""
        block.gone = True
        table = self._tables[block.namespace.id]
        del table[block.key]
        if not table:
            del self._tables[block.namespace.id]
        self.entries -= 1
        self.value_bytes -= block.length
        if block.place is not None:
            del block.place[block]
            block.place = None
        self.arena.records.retire(block.slot)
        if not block.writing:
            self._free.append(block.slot)

    def landed(self, block: Block) -> None:
        """Note that a block's write ended: a removed one's slot is free only now."""
        block.writing = False
        if block.gone:
            self._free.append(block.slot)

    # -- eviction ------------------------------------------------------------------------------

    def short_to_write(self, target_slots: int) -> list[Block]:
        """Return short blocks that must be written for `target_slots` to be within reach."""
        reach = len(self._free) + len(self._ephemeral) + len(self._short_clean)
        if reach >= target_slots or not self._short_dirty:
            return []
        wanted = target_slots - reach
        return [block for block, _ in zip(self._short_dirty, range(wanted), strict=False)]

    def sweep(self, limit: int) -> int:
        """Remove up to `limit` expired blocks and return how many."""
        now = boot_clock_ns()
        swept = 0
        while self._expiry and self._expiry[0][0] <= now and swept < limit:
            looked_ns, _, block = heapq.heappop(self._expiry)
            if block.gone or looked_ns != block.watched_ns:
                continue
            block.watched_ns = 0
            if block.expires_ns and block.expires_ns <= now:
                self._expire(block)
                swept += 1
            else:
                self._watch_expiry(block)  # A refresh moved it.
        return swept

    def _expire(self, block: Block) -> None:
        self.counters.expired += 1
        self.remove(block)
        block.resolve(None)

    def _first_to_go(self, candidates: OrderedDict[Block, None], dirty: bool) -> Block | None:
        """Return the first that may go; among dirty ones a path that stands still has some."""
        if not dirty:
            return next(iter(candidates), None)
        if not candidates or not self.may_drop_dirty():
            return None
        for block, _ in zip(candidates, range(MAX_DIRTY_LOOKS), strict=False):
            if self.gives_way(block):
                return block
        return None

    def _evict_one(self) -> bool:
        if self._expiry and self.sweep(1) and self._free:
            return True
        for candidates in self._order:
            dirty = candidates is self._short_dirty or candidates is self._long_dirty
            block = self._first_to_go(candidates, dirty)
            if block is None:
                continue
            self.remove(block)
            self.counters.evictions += 1
            if dirty:
                self.counters.dropped += 1
            block.resolve(False if dirty else None)
            return True
        return False
