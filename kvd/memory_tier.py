"""The memory tier: which block lies in which slot, and which one leaves next.

Long because every change of a slot's state is in here, where the states are counted.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tablespace.policy import EvictionQueue, Rule
from tablespace.shared import contains_packed

from kvd.arena import Arena
from kvd.block import Block, Retention
from kvd.expiry import boot_clock_ns
from kvd.namespaces import Namespace
from kvd.policy.rules import DEFAULT_POLICY, make_rule
from kvd.size_class import SizeClass, Slab
from kvd.slab_pool import SlabPool
from kvd.slab_taking import SlabTaking

if TYPE_CHECKING:
    from typing_extensions import Buffer

MIN_STALE_LOOKS = 1024
# How long a promoted block stays whatever its rank: whoever asked for it is about to copy it.
HANDOVER_S = 0.2
HANDOVER_SHARE = 4  # Of the slots at most one in so many; the oldest give way.
LEASED_LOOK = 64  # Candidates for eviction asked of the lanes at a time, once one was leased.
NO_SLOT = -1


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
        Ranks the blocks, those of all size classes alike; by default a fresh one of `value`.
    sizes : sequence of int
        Size classes there are besides the arena's default one, as far as they can be.

    Attributes
    ----------
    slabs, classes, taking
        The arena's slabs, the sizes that slots have, and which slabs may change hands.
    may_drop_dirty : callable
        Asked before an unwritten block is evicted. While the disk makes progress the newcomer
        is refused instead: what was accepted is kept, and room comes within milliseconds.
    on_stored, on_removed : callable or None
        Told of every block that becomes readable or stops being so.
    on_reserve : callable
        Called after every reservation, so that room is made before it is needed.
    before_evict : callable
        Called before a block is chosen: what clients used since counts for the order.
    populate_now : callable
        Asked for slabs, (first, count), before anything is evicted or refused: clients may store
        faster than a large arena is populated. Returns None where there are no more.

    Notes
    -----
    Event loop only. A slot is in exactly one state: not populated yet, free, reserved (given to
    a client or to a promotion), holding a block, quarantined (its reservation's owner may still
    write into it), or held (its block left while a client had leased it, or the long tier read
    it). A leased block is not evicted. Eviction order: expired, ephemeral, short, long; within
    a class clean before dirty; then by the rule's rank, lowest first. Dirty ones are passed over
    while the disk makes progress. Blocks queued for the long tier are in no list: they are safe.

    A value goes into the smallest class that holds it. A class without a free slot takes a slab
    that holds nothing, of whichever class that was; else it evicts its own; and it takes another
    class's slab when it has none, when it may evict nothing of its own, or when what lies in the
    slab is worth less than what it would evict itself.
    """

    def __init__(
        self,
        arena: Arena,
        *,
        writes_back: bool,
        rule: Rule | None = None,
        sizes: Sequence[int] = (),
    ) -> None:
        self.arena = arena
        self._writes_back = writes_back
        self.rule = rule or make_rule(DEFAULT_POLICY, arena.slot_count)
        self.slabs = SlabPool(arena, sizes, self.rule.resolution)
        self.classes = self.slabs.classes
        self.taking = SlabTaking(self.slabs, self._empty, self._may_drop_dirty)
        self.may_drop_dirty: Callable[[], bool] = lambda: True
        self.on_reserve: Callable[[], None] = lambda: None
        self.on_stored: Callable[[Block], None] | None = None
        self.on_removed: Callable[[Block], None] | None = None
        self.before_evict: Callable[[], None] = lambda: None
        self.populate_now: Callable[[], tuple[int, int] | None] = lambda: None
        self.counters = MemoryCounters()
        self.value_bytes = 0
        self.entries = 0
        self.reserved_slots = 0
        self.quarantined_slots = 0
        self.slabs_taken = 0
        self._held: set[int] = set()
        self._landing = 0  # Slots of blocks that left while the long tier read them.
        self._tables: dict[int, dict[bytes, Block]] = {}
        self._expiry: list[tuple[int, int, Block]] = []
        self._expiry_order = 0

    # -- slots ---------------------------------------------------------------------------------

    @property
    def free_slots(self) -> int:
        """Return how many populated slots hold nothing."""
        return self.slabs.free_slots

    def is_free(self, slot: int) -> bool:
        """Return whether a slot was the last to become free: nobody has it."""
        return self.slabs.is_free(slot)

    @property
    def held_slots(self) -> int:
        """Return how many slots wait for a lease, or the write, of a block that left to end."""
        return len(self._held) + self._landing

    @property
    def leased_slots(self) -> int:
        """Return how many slots are under some client's lease now."""
        count = self.arena.geometry.slot_numbers
        return len(set[int]().union(*(lane.leases(count) for lane in self.arena.lanes)))

    def add_slabs(self, first: int, count: int) -> None:
        """Take populated slabs into use; the lowest are used first."""
        self.slabs.add(first, count)

    def reserve(self, size: int) -> tuple[int, int] | None:
        """Return (slot, reservation) of a slot that holds so many bytes, or None.

        Evicts if need be.
        """
        slot = NO_SLOT
        for size_class in self.classes.holding(size):
            if self._make_room(size_class, 1):
                slot = self.slabs.take(size_class)
                break
            if size_class.slabs:
                # One that has none yet, and gets none now, is served by the next larger one.
                break
        if slot == NO_SLOT:
            self.counters.no_room += 1
            self.on_reserve()
            return None
        self.reserved_slots += 1
        self.on_reserve()
        return slot, self.arena.records.reserve(slot)

    def reserve_many(self, sizes: Sequence[int]) -> list[int]:
        """Return a slot for each size, NO_SLOT where there is none, evicting in one look."""
        return [slot for slot, _ in self.reserve_each(sizes)]

    def reserve_each(self, sizes: Sequence[int]) -> list[tuple[int, int]]:
        """Return (slot, reservation) for each size, (NO_SLOT, 0) where there is none.

        Evicts in one look, which costs a fraction of a look for each.
        """
        slots = [NO_SLOT] * len(sizes)
        by_class: dict[SizeClass, list[int]] = {}
        for position, size in enumerate(sizes):
            for size_class in self.classes.holding(size)[:1]:
                by_class.setdefault(size_class, []).append(position)
        left: list[int] = []
        for size_class in self.classes:
            wanted = left + by_class.get(size_class, [])
            if not wanted:
                continue
            room = self._make_room(size_class, len(wanted))
            for position in wanted[:room]:
                slots[position] = self.slabs.take(size_class)
            # What a class that gets no slab cannot take is served by the next larger one.
            left = [] if size_class.slabs else wanted[room:]
        reserved = len(slots) - slots.count(NO_SLOT)
        self.counters.no_room += len(slots) - reserved
        self.reserved_slots += reserved
        self.on_reserve()
        reserve = self.arena.records.reserve
        return [(slot, reserve(slot) if slot != NO_SLOT else 0) for slot in slots]

    def slot_bytes_for(self, size: int) -> int:
        """Return the size of the slot that a value goes into, as far as it is to be foreseen."""
        return next((each.slot_bytes for each in self.classes.holding(size)), size)

    def unreserve(self, slot: int) -> None:
        """Take a reserved slot back that nobody writes into any more."""
        self.arena.records.retire(slot)
        self.reserved_slots -= 1
        self.slabs.free(slot)

    def quarantine(self, slot: int) -> None:
        """Keep a reserved slot out of use: its owner may still write into it."""
        self.reserved_slots -= 1
        self.quarantined_slots += 1

    def end_quarantine(self, slot: int) -> None:
        """Take a quarantined slot into use: its owner is gone or said so."""
        self.arena.records.reserve(slot)
        self.quarantined_slots -= 1
        self.slabs.free(slot)

    def reclaim(self) -> bool:
        """Take held slots whose leases ended into use; return whether there were any."""
        if not self._held:
            return False
        slots = list(self._held)
        leased = self.arena.index.leased(slots, self.arena.lanes)
        ended = [slot for slot, held in zip(slots, leased, strict=True) if not held]
        self._held.difference_update(ended)
        for slot in ended:
            self.slabs.free(slot)
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

    def present_packed(self, namespace: Namespace, packed: Buffer, most: int) -> list[bool] | None:
        """Return the same of packed keys, by the shared index; None where that cannot tell.

        It lists every readable block, unless one once found no place there.
        """
        if self.arena.index.unlisted:
            return None
        return contains_packed(self.arena.index, namespace.id, packed, most)

    def touch(self, block: Block) -> None:
        """Note that a block was read: its rank rises, wherever it stands."""
        self.rule.touch(block)

    def block_at(self, slot: int) -> Block | None:
        """Return the block in a slot, or None."""
        return self.slabs.block_at(slot)

    def blocks_of(self, namespace: Namespace) -> list[Block]:
        """Return every block of a namespace."""
        return list(self._tables.get(namespace.id, {}).values())

    def dirty_blocks(self, retention: Retention) -> list[Block]:
        """Return the unwritten, unqueued blocks of a class, lowest rank first."""
        long = retention is Retention.LONG
        queues = [each.long_dirty if long else each.short_dirty for each in self.classes]
        found = [block for queue in queues for block in queue]
        if sum(map(bool, queues)) > 1:
            found.sort(key=lambda block: block.rank)
        return found

    # -- change --------------------------------------------------------------------------------

    def publish(self, block: Block, *, promoted: bool = False) -> None:
        """Make a written, reserved slot readable as this block, which must be new here.

        One just promoted is kept for a moment: a low rank must not cost the asker its hit.
        """
        table = self._tables.setdefault(block.namespace.id, {})
        assert block.key not in table
        block.namespace.in_memory = True
        slab, size_class = self.slabs.class_of(block.slot)
        assert block.length <= size_class.slot_bytes
        block.slab = slab
        block.slot_bytes = size_class.slot_bytes
        block.offset = self.arena.offset(block.slot)
        block.version = self.arena.index.publish(
            block.slot,
            block.namespace.id,
            block.key,
            block.offset,
            block.length,
            block.checksum,
            block.expires_ns,
        )
        slab.blocks[block.slot - slab.first_slot] = block
        self.reserved_slots -= 1
        size_class.entries += 1
        size_class.value_bytes += block.length
        table[block.key] = block
        self.entries += 1
        self.value_bytes += block.length
        block.fill = block.length / block.slot_bytes
        self.rule.stored(block)
        if size_class.handed_over:
            # So that those stand before this one, where order of coming counts.
            self._end_due(size_class, time.monotonic())
        if promoted:
            self._hand_over(block, size_class)
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
        slab = block.slab
        assert slab is not None and slab.size_class is not None
        place = slab.size_class.queue_for(block, clean)
        if block.queue is place:
            return
        if block.queue is None:
            slab.evictable += 1
        place.add(block)

    def protect(self, block: Block) -> None:
        """Take a block off its eviction list: it is queued for the long tier."""
        if block.queue is not None:
            assert block.slab is not None
            block.queue.discard(block)
            block.slab.evictable -= 1

    def _hand_over(self, block: Block, size_class: SizeClass) -> None:
        if len(size_class.handed_over) >= max(1, size_class.slot_count // HANDOVER_SHARE):
            self._end_handover(size_class)
        size_class.handed_over.append((time.monotonic() + HANDOVER_S, block))

    def _end_handover(self, size_class: SizeClass) -> None:
        _, block = size_class.handed_over.popleft()
        if not block.gone and not block.writing:
            self.place(block)

    def _end_handovers(self) -> None:
        now = time.monotonic()
        for size_class in self.classes:
            self._end_due(size_class, now)

    def _end_due(self, size_class: SizeClass, now: float) -> None:
        while size_class.handed_over and size_class.handed_over[0][0] <= now:
            self._end_handover(size_class)

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
        slab = block.slab
        assert slab is not None and slab.size_class is not None
        size_class = slab.size_class
        slab.blocks[block.slot - slab.first_slot] = None
        self.entries -= 1
        self.value_bytes -= block.length
        size_class.entries -= 1
        size_class.value_bytes -= block.length
        self.protect(block)
        block.slab = None
        if self.on_removed is not None:
            self.on_removed(block)

    def _let_go(self, slot: int, held: bool) -> None:
        if held:
            self._held.add(slot)
        else:
            self.slabs.free(slot)

    # -- eviction ------------------------------------------------------------------------------

    def short_to_write(self, target_slots: int) -> list[Block]:
        """Return short blocks that must be written for `target_slots` to be within reach.

        Of the default class; of another as many as have the same bytes.
        """
        found: list[Block] = []
        for each in self.classes:
            if not each.short_dirty:
                continue
            target = max(1, target_slots * self.arena.slot_bytes // each.slot_bytes)
            reach = self.slabs.room(each, target) + len(each.ephemeral) + len(each.short_clean)
            if reach < target:
                found += each.short_dirty.lowest(target - reach)
        return found

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

    def _make_room(self, size_class: SizeClass, wanted: int) -> int:
        """Make up to `wanted` slots of a class free; return how many of them there are."""
        while (room := self.slabs.room(size_class, wanted)) < wanted:
            if not self._make_some(size_class, room, wanted):
                break
        return min(wanted, room)

    def _make_some(self, size_class: SizeClass, room: int, wanted: int) -> bool:
        """Make at least one slot more free than there are; False when none can be."""
        if (
            self._expiry
            and self.sweep(wanted - room)
            and self.slabs.room(size_class, wanted) > room
        ):
            return True
        if self.reclaim() and self.slabs.room(size_class, wanted) > room:
            return True
        if (slabs := self.populate_now()) is not None:
            self.add_slabs(*slabs)
            if self.slabs.room(size_class, wanted) > room:
                return True
        self.before_evict()
        self._end_handovers()
        if self.taking.take_colder(size_class):
            return True
        return self._evict_own(size_class, wanted - room) or self.taking.take_any(size_class)

    def _may_drop_dirty(self) -> bool:
        return self.may_drop_dirty()

    def _evict_own(self, size_class: SizeClass, wanted: int) -> bool:
        """Evict up to `wanted` blocks of a class, all of one list; False when none may leave."""
        for candidates in size_class.order:
            dirty = size_class.is_dirty(candidates)
            if not candidates or (dirty and not self.may_drop_dirty()):
                continue
            blocks = self._evict_lowest(candidates, wanted)
            if not blocks:
                continue
            size_class.since_look += len(blocks)
            self._count_evicted(size_class, blocks, dirty)
            return True
        return False

    def _count_evicted(self, size_class: SizeClass, blocks: list[Block], dirty: bool) -> None:
        self.counters.evictions += len(blocks)
        size_class.evictions += len(blocks)
        if dirty:
            self.counters.dropped += len(blocks)
        for block in blocks:
            block.resolve(False if dirty else None)

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
            self.slabs.free(block.slot)

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

    def _empty(self, slab: Slab) -> bool:
        """Evict all of a slab, so that it is anybody's; return whether that is so.

        Of one that is promised whatever may leave, of another all or nothing. Every sequence is
        odd before the slab is cut anew, and what is published in it then says where it lies: a
        reader of before finds that its slot changed.
        """
        owner = slab.size_class
        assert owner is not None
        dirty_too = self.may_drop_dirty()
        blocks = [
            block
            for block in slab.blocks
            if block is not None
            and block.queue is not None
            and (dirty_too or not owner.is_dirty(block.queue))
        ]
        leased = self.arena.index.leased([block.slot for block in blocks], self.arena.lanes)
        held = [block for block, is_held in zip(blocks, leased, strict=True) if is_held]
        for block in held:
            self.touch(block)  # A lease is a use.
        if held and slab.promised_to is None:
            return False
        slots = [block.slot for block, is_held in zip(blocks, leased, strict=True) if not is_held]
        gone = set(self.arena.index.evict(slots, self.arena.lanes, len(slots)))
        left = [block for block in blocks if block.slot in gone]
        dirty = [block for block in left if block.queue and owner.is_dirty(block.queue)]
        lost = set(map(id, dirty))
        self._leave(left)
        self._count_evicted(owner, dirty, True)
        self._count_evicted(owner, [block for block in left if id(block) not in lost], False)
        self.slabs_taken += slab.size_class is not owner
        return slab.size_class is not owner
