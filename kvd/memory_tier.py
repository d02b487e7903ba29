"""The memory tier: which block lies in which slot, and which one leaves next."""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tablespace.policy import EvictionQueue, Rule

from kvd.arena import Arena
from kvd.block import Block, Retention
from kvd.expiry import boot_clock_ns
from kvd.namespaces import Namespace
from kvd.policy.rules import DEFAULT_POLICY, make_rule

MIN_STALE_LOOKS = 1024
# How long a promoted block stays whatever its rank: whoever asked for it is about to copy it.
HANDOVER_S = 0.2
HANDOVER_SHARE = 4  # Of the slots at most one in so many; the oldest give way.
LEASED_LOOK = 64  # Candidates for eviction asked of the lanes at a time, once one was leased.


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
    rule : Rule, optional
        Ranks the blocks of a class; by default a fresh one of `value`.

    Attributes
    ----------
    may_drop_dirty : callable
        Asked before an unwritten block is evicted. While the disk makes progress the newcomer
        is refused instead: what was accepted is kept, and room comes within milliseconds.
    on_stored, on_removed : callable or None
        Told of every block that becomes readable or stops being so.
    on_reserve : callable
        Called after every reservation, so that room is made before it is needed.
    before_evict : callable
        Called before a block is chosen: what clients used since counts for the order.

    Notes
    -----
    Event loop only. A slot is in exactly one state: not populated yet, free, reserved (given to
    a client or to a promotion), holding a block, quarantined (its reservation's owner may still
    write into it), or held (its block left while a client had leased it, or the long tier read
    it). A leased block is not evicted. Eviction order: expired, ephemeral, short, long; within
    a class clean before dirty; then by the rule's rank, lowest first. Dirty ones are passed over
    while the disk makes progress. Blocks queued for the long tier are in no list: they are safe.
    """

    def __init__(self, arena: Arena, *, writes_back: bool, rule: Rule | None = None) -> None:
        self.arena = arena
        self._writes_back = writes_back
        self.rule = rule or make_rule(DEFAULT_POLICY, arena.slot_count)
        self.may_drop_dirty: Callable[[], bool] = lambda: True
        self.on_reserve: Callable[[], None] = lambda: None
        self.on_stored: Callable[[Block], None] | None = None
        self.on_removed: Callable[[Block], None] | None = None
        self.before_evict: Callable[[], None] = lambda: None
        self.counters = MemoryCounters()
        self.value_bytes = 0
        self.entries = 0
        self.reserved_slots = 0
        self.quarantined_slots = 0
        self._free: list[int] = []
        self._held: set[int] = set()
        self._landing = 0  # Slots of blocks that left while the long tier read them.
        # Blocks on no eviction list yet, with until when.
        self._handed_over: deque[tuple[float, Block]] = deque()
        self._by_slot: list[Block | None] = [None] * arena.slot_count
        self._tables: dict[int, dict[bytes, Block]] = {}
        self._expiry: list[tuple[int, int, Block]] = []
        self._expiry_order = 0
        self._ephemeral: EvictionQueue[Block] = EvictionQueue(self.rule.resolution)
        self._short_clean: EvictionQueue[Block] = EvictionQueue(self.rule.resolution)
        self._short_dirty: EvictionQueue[Block] = EvictionQueue(self.rule.resolution)
        self._long_clean: EvictionQueue[Block] = EvictionQueue(self.rule.resolution)
        self._long_dirty: EvictionQueue[Block] = EvictionQueue(self.rule.resolution)
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

    def is_free(self, slot: int) -> bool:
        """Return whether a slot was the last to become free: nobody has it."""
        return bool(self._free) and self._free[-1] == slot

    @property
    def held_slots(self) -> int:
        """Return how many slots wait for a lease, or the write, of a block that left to end."""
        return len(self._held) + self._landing

    @property
    def leased_slots(self) -> int:
        """Return how many slots are under some client's lease now."""
        count = self.arena.slot_count
        return len(set[int]().union(*(lane.leases(count) for lane in self.arena.lanes)))

    def add_slots(self, first: int, count: int) -> None:
        """Take populated slots into use; the lowest are handed out first."""
        self._free.extend(range(first + count - 1, first - 1, -1))

    def reserve(self) -> tuple[int, int] | None:
        """Return (slot, reservation) of a slot to write into, evicting if need be, or None."""
        if not self._free and not self._evict_some(1):
            self.counters.no_room += 1
            self.on_reserve()
            return None
        slot = self._free.pop()
        self.reserved_slots += 1
        self.on_reserve()
        return slot, self.arena.records.reserve(slot)

    def reserve_many(self, wanted: int) -> list[int]:
        """Return up to `wanted` slots to write into, evicting if need be, in one look."""
        while len(self._free) < wanted and self._evict_some(wanted - len(self._free)):
            pass
        slots = [self._free.pop() for _ in range(min(wanted, len(self._free)))]
        self.counters.no_room += wanted - len(slots)
        self.reserved_slots += len(slots)
        self.on_reserve()
        for slot in slots:
            self.arena.records.reserve(slot)
        return slots

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

    def reclaim(self) -> bool:
        """Take held slots whose leases ended into use; return whether there were any."""
        if not self._held:
            return False
        slots = list(self._held)
        leased = self.arena.index.leased(slots, self.arena.lanes)
        ended = [slot for slot, held in zip(slots, leased, strict=True) if not held]
        self._held.difference_update(ended)
        self._free += ended
        return bool(ended)

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
        return list(map(table.__contains__, keys))

    def touch(self, block: Block) -> None:
        """Note that a block was read: its rank rises, wherever it stands."""
        self.rule.touch(block)

    def block_at(self, slot: int) -> Block | None:
        """Return the block in a slot, or None."""
        return self._by_slot[slot]

    def blocks_of(self, namespace: Namespace) -> list[Block]:
        """Return every block of a namespace."""
        return list(self._tables.get(namespace.id, {}).values())

    def dirty_blocks(self, retention: Retention) -> list[Block]:
        """Return the unwritten, unqueued blocks of a class, lowest rank first."""
        return list(self._long_dirty if retention is Retention.LONG else self._short_dirty)

    # -- change --------------------------------------------------------------------------------

    def publish(self, block: Block, *, promoted: bool = False) -> None:
        """Make a written, reserved slot readable as this block, which must be new here.

        One just promoted is kept for a moment: a low rank must not cost the asker its hit.
        """
        table = self._tables.setdefault(block.namespace.id, {})
        assert block.key not in table
        block.namespace.in_memory = True
        block.version = self.arena.index.publish(
            block.slot,
            block.namespace.id,
            block.key,
            block.length,
            block.checksum,
            block.expires_ns,
        )
        self._by_slot[block.slot] = block
        self.reserved_slots -= 1
        table[block.key] = block
        self.entries += 1
        self.value_bytes += block.length
        block.fill = block.length / self.arena.slot_bytes
        self.rule.stored(block)
        if promoted:
            self._hand_over(block)
        else:
            self.place(block)
        self._watch_expiry(block)
        if self.on_stored is not None:
            self.on_stored(block)

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
        """Put a block on the eviction list it belongs to now. Its rank stays."""
        clean = block.durable or not block.admitted or not self._writes_back
        if block.retention is Retention.LONG:
            place = self._long_clean if clean else self._long_dirty
        elif block.retention is Retention.SHORT:
            place = self._short_clean if clean else self._short_dirty
        else:
            place = self._ephemeral
        if block.queue is not place:
            place.add(block)

    def protect(self, block: Block) -> None:
        """Take a block off its eviction list: it is queued for the long tier."""
        if block.queue is not None:
            block.queue.discard(block)

    def _hand_over(self, block: Block) -> None:
        if len(self._handed_over) >= max(1, self.arena.slot_count // HANDOVER_SHARE):
            self._end_handover()
        self._handed_over.append((time.monotonic() + HANDOVER_S, block))

    def _end_handover(self) -> None:
        _, block = self._handed_over.popleft()
        if not block.gone and not block.writing:
            self.place(block)

    def _end_handovers(self) -> None:
        now = time.monotonic()
        while self._handed_over and self._handed_over[0][0] <= now:
            self._end_handover()

    def remove(self, block: Block) -> None:
        """Take a block out; see `remove_many`."""
        self.remove_many([block])

    def remove_many(self, blocks: list[Block]) -> None:
        """Take blocks out: readers stop at once, those that hold leases keep the bytes.

        A slot is free unless it is leased, or in flight to the long tier.
        """
        for block in blocks:
            self._take_out(block)
        slots = [block.slot for block in blocks]
        leased = self.arena.index.remove(slots, self.arena.lanes)
        for block, held in zip(blocks, leased, strict=True):
            if block.writing:
                self._landing += 1
            else:
                self._let_go(block.slot, held)

    def landed(self, block: Block) -> None:
        """Note that a block's write ended: a removed one's slot is free only now."""
        block.writing = False
        if block.gone:
            self._landing -= 1
            (held,) = self.arena.index.leased([block.slot], self.arena.lanes)
            self._let_go(block.slot, held)

    def _take_out(self, block: Block) -> None:
        """Forget a block; its slot's record is for the caller to change."""
        block.gone = True
        table = self._tables[block.namespace.id]
        del table[block.key]
        if not table:
            del self._tables[block.namespace.id]
            block.namespace.in_memory = False
        self._by_slot[block.slot] = None
        self.entries -= 1
        self.value_bytes -= block.length
        if block.queue is not None:
            block.queue.discard(block)
        if self.on_removed is not None:
            self.on_removed(block)

    def _let_go(self, slot: int, held: bool) -> None:
        if held:
            self._held.add(slot)
        else:
            self._free.append(slot)

    # -- eviction ------------------------------------------------------------------------------

    def short_to_write(self, target_slots: int) -> list[Block]:
        """Return short blocks that must be written for `target_slots` to be within reach."""
        reach = len(self._free) + len(self._ephemeral) + len(self._short_clean)
        if reach >= target_slots or not self._short_dirty:
            return []
        wanted = target_slots - reach
        return self._short_dirty.lowest(wanted)

    def sweep(self, limit: int) -> int:
        """Remove up to `limit` expired blocks and return how many."""
        now = boot_clock_ns()
        expired: list[Block] = []
        while self._expiry and self._expiry[0][0] <= now and len(expired) < limit:
            looked_ns, _, block = heapq.heappop(self._expiry)
            if block.gone or looked_ns != block.watched_ns:
                continue
            block.watched_ns = 0
            if block.expires_ns and block.expires_ns <= now:
                expired.append(block)
            else:
                self._watch_expiry(block)  # A refresh moved it.
        if expired:
            self._expire(*expired)
        return len(expired)

    def _expire(self, *blocks: Block) -> None:
        self.counters.expired += len(blocks)
        self.remove_many(list(blocks))
        for block in blocks:
            block.resolve(None)

    def _evict_some(self, wanted: int) -> int:
        """Make up to `wanted` slots free, of one class; return how many, 0 when none can be."""
        if self._expiry and self.sweep(wanted) and self._free:
            return len(self._free)
        if self.reclaim():
            return len(self._free)
        self.before_evict()
        self._end_handovers()
        for candidates in self._order:
            dirty = candidates is self._short_dirty or candidates is self._long_dirty
            if not candidates or (dirty and not self.may_drop_dirty()):
                continue
            blocks = self._evict_lowest(candidates, wanted)
            if not blocks:
                continue
            self.counters.evictions += len(blocks)
            if dirty:
                self.counters.dropped += len(blocks)
            for block in blocks:
                block.resolve(False if dirty else None)
            return len(blocks)
        return 0

    def _evict_lowest(self, candidates: EvictionQueue[Block], wanted: int) -> list[Block]:
        """Evict those of the lowest rank that no lane holds, at least one if there is one."""
        blocks = candidates.first_many(wanted)
        slots = [block.slot for block in blocks]
        evicted = self.arena.index.evict(slots, self.arena.lanes, len(slots))
        if not evicted:
            return self._evict_past_leases(candidates)
        if len(evicted) < len(blocks):
            gone = set(evicted)
            for block in blocks:
                if block.slot not in gone:
                    self.touch(block)  # A lease is a use.
            blocks = [block for block in blocks if block.slot in gone]
        self._leave(blocks)
        return blocks

    def _leave(self, blocks: list[Block]) -> None:
        for block in blocks:
            self._take_out(block)
            self.rule.left(block)
            self._free.append(block.slot)

    def _evict_past_leases(self, candidates: EvictionQueue[Block]) -> list[Block]:
        """Evict the first block that no lane holds; a lease is a use of those that are held."""
        leased: list[Block] = []
        chosen = None
        look = 1
        while chosen is None and len(leased) < len(candidates):
            blocks = candidates.lowest(len(leased) + look)[len(leased) :]
            slots = [block.slot for block in blocks]
            evicted = self.arena.index.evict(slots, self.arena.lanes, 1)
            chosen = next((block for block in blocks if block.slot in evicted), None)
            leased += blocks if chosen is None else blocks[: blocks.index(chosen)]
            look = max(LEASED_LOOK, len(leased))
        for block in leased:
            self.touch(block)
        found = [] if chosen is None else [chosen]
        self._leave(found)
        return found
