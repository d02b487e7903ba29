"""Size classes of the arena: which slot a value gets, slabs that change hands, and accounting."""

import fcntl
import itertools
import mmap
import random

import pytest
from tablespace.shared import Lane

from kvd import protocol, slab_taking
from kvd.arena import Arena, memfd
from kvd.arena_layout import DATA_SEALS, lane_bytes, lane_leases
from kvd.block import Block, Retention
from kvd.expiry import boot_clock_ns
from kvd.mapping import ArenaMapping
from kvd.memory_tier import NO_SLOT, MemoryTier
from kvd.namespaces import Namespace
from kvd.size_classes import MAX_CLASSES
from kvd.slab_geometry import SMALLEST_SLOT_BYTES, SlabGeometry

K = 1 << 10
M = 1 << 20
G = 1 << 30


class TestGeometry:
    @pytest.mark.parametrize("slot_bytes", [4 * K, 16 * K, 64 * K, 80 * K, M, 1100 * K, 5 * M])
    @pytest.mark.parametrize("max_bytes", [8 * M, 320 * M, 8 * G])
    def test_slabs_hold_whole_slots_and_nothing_is_wasted_on_the_default_class(
        self, slot_bytes, max_bytes
    ):
        found = SlabGeometry.choose(max_bytes, slot_bytes)
        assert found.data_bytes == max_bytes // slot_bytes * slot_bytes
        assert found.slab_bytes % slot_bytes == 0
        assert found.slots_in_all(slot_bytes) == max_bytes // slot_bytes
        assert sum(found.bytes_of(slab) for slab in range(found.slab_count)) == found.data_bytes
        assert found.slots_per_slab * found.smallest_bytes <= found.slab_bytes
        assert found.slab_count >= min(7, max_bytes // slot_bytes)

    def test_slabs_of_a_large_arena_are_whole_huge_pages(self):
        for size in (4 * K, 64 * K, M, 2 * M):
            assert SlabGeometry.choose(8 * G, size).slab_bytes % (2 * M) == 0

    def test_a_slab_holds_the_largest_slot(self):
        assert SlabGeometry.choose(8 * M, 64 * K, [3 * M]).slab_bytes >= 3 * M
        assert SlabGeometry.choose(8 * G, 64 * K).slab_bytes == 32 * M


class Tier:
    """A memory tier, a client's mapping with a lane, and what ought to be in it."""

    def __init__(self, max_bytes=M, slot_bytes=16 * K, sizes=()):
        self.arena = Arena(max_bytes, slot_bytes)
        self.memory = MemoryTier(self.arena, writes_back=True, sizes=sizes)
        self.memory.add_slabs(0, self.arena.geometry.slab_count)
        self.space = Namespace("m", 1)
        leases = lane_leases(self.arena.geometry.slot_numbers)
        fd = memfd("lane", lane_bytes(leases, 64))
        self.arena.lanes.append(Lane(mmap.mmap(fd, 0), leases=leases, touches=64))
        info = self.arena.info(protocol.LaneInfo(1, lane_bytes(leases, 64), leases, 64))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, DATA_SEALS)
        self.mapping = ArenaMapping(info, self.arena.index_fd, self.arena.data_fd, fd)
        self.reader = self.mapping.reader
        self.reader.checked()
        self.arena.beat()

    def store(self, key, value, *, durable=True, retention=Retention.LONG, expires_ns=0):
        """Write as a client does, through the mapping; None without room."""
        reserved = self.memory.reserve(len(value))
        if reserved is None:
            return None
        grant = protocol.Grant(
            protocol.RESERVED, reserved[0], self.arena.offset(reserved[0]), reserved[1]
        )
        self.mapping.write(grant, memoryview(value))
        block = Block(self.space, key, reserved[0], len(value), 0, retention, expires_ns)
        block.durable = durable
        self.memory.publish(block)
        return block

    def hit(self, block):
        return protocol.Hit("memory", block.length, 0, block.slot, block.offset, block.version)

    def check(self):
        """Every slot is in one state, whatever its class, and the sums are those of the parts."""
        memory, geometry = self.memory, self.arena.geometry
        busy = memory.reserved_slots + memory.quarantined_slots + memory.held_slots
        assert memory.free_slots + memory.entries + busy == memory.slabs.populated_slots
        owned = [slab for each in memory.classes for slab in each.slabs]
        assert len(owned) == len(set(owned))
        assert len(owned) + memory.slabs.spare_slabs == geometry.slab_count
        ranges = []
        for each in memory.classes:
            blocks = [block for slab in each.slabs for block in slab.blocks if block is not None]
            assert each.entries == len(blocks)
            assert each.value_bytes == sum(block.length for block in blocks)
            kept = [slab for slab in each.slabs if slab.promised_to is not None]
            assert each.promised_slots == sum(len(slab.free) for slab in kept)
            free = each.free_slots + each.promised_slots
            assert free == sum(len(slab.free) for slab in each.slabs)
            assert each.slot_count == sum(slab.slot_count for slab in each.slabs)
            for slab in each.slabs:
                inside = [block for block in slab.blocks if block is not None]
                assert slab.evictable == sum(block.queue is not None for block in inside)
            for block in blocks:
                assert block.length <= block.slot_bytes == each.slot_bytes
                assert block.offset == self.arena.offset(block.slot)
                ranges.append((block.offset, block.offset + block.slot_bytes))
        ranges.sort()
        assert all(one[1] <= two[0] for one, two in itertools.pairwise(ranges))
        assert not ranges or ranges[-1][1] <= geometry.data_bytes
        assert memory.slabs.used_bytes == sum(end - start for start, end in ranges)

    def close(self):
        self.arena.close()


@pytest.fixture
def make_tier():
    made = []

    def make(*args, **options):
        made.append(Tier(*args, **options))
        return made[-1]

    yield make
    for tier in made:
        tier.close()


class TestClasses:
    def test_a_value_goes_into_the_smallest_class_that_holds_it(self, make_tier):
        tier = make_tier(sizes=(64 * K, 128 * K))
        for size, slot_bytes in ((1, 16), (16 * K, 16), (16 * K + 1, 64), (64 * K + 1, 128)):
            assert tier.store(b"%d" % size, bytes(size)).slot_bytes == slot_bytes * K
        assert tier.memory.reserve(128 * K + 1) is None
        assert tier.memory.slabs.used_bytes == (16 + 16 + 64 + 128) * K
        tier.check()

    def test_an_announced_size_gets_a_class_in_whole_pages(self, make_tier):
        classes = make_tier(sizes=()).memory.classes
        assert classes.add(20_000).slot_bytes == 20 * K
        assert classes.add(20 * K).slot_bytes == 20 * K
        assert classes.add(1).slot_bytes == SMALLEST_SLOT_BYTES
        assert classes.add(128 * K).slot_bytes == 128 * K
        assert classes.add(128 * K + 1) is None
        assert classes.sizes == [16 * K, 20 * K, 128 * K]

    def test_there_are_so_many_and_then_the_next_larger_one_serves(self, make_tier):
        tier = make_tier()
        classes = tier.memory.classes
        for number in range(1, MAX_CLASSES):
            assert classes.add((16 + 4 * number) * K).slot_bytes == (16 + 4 * number) * K
            tier.store(b"%d" % number, bytes((16 + 4 * number) * K))
        assert classes.add(17 * K).slot_bytes == 20 * K
        assert classes.add(128 * K) is None
        # One that holds nothing makes way; the configured one never does.
        tier.memory.remove(tier.memory.find(tier.space, b"3"))
        assert classes.add(128 * K).slot_bytes == 128 * K
        assert 28 * K not in classes.sizes and 16 * K in classes.sizes
        tier.check()


class TestSlabs:
    def test_an_empty_slab_is_anybodys(self, make_tier):
        tier = make_tier(sizes=(128 * K,))
        blocks = [tier.store(b"%d" % number, bytes(16 * K)) for number in range(64)]
        assert tier.memory.slabs.spare_slabs == 0
        for block in blocks[:8]:
            tier.memory.remove(block)
        assert tier.memory.slabs.spare_slabs == 1
        assert tier.store(b"large", b"x" * (128 * K)).slot_bytes == 128 * K
        assert tier.memory.counters.evictions == 0
        tier.check()

    def test_a_class_without_a_slab_takes_the_one_that_is_worth_least(self, make_tier):
        tier = make_tier(sizes=(128 * K,))
        blocks = [tier.store(b"%d" % number, bytes(16 * K)) for number in range(64)]
        for block in blocks:
            if tier.arena.slab_of(block.slot) != 5:
                tier.memory.touch(block)
        assert tier.store(b"large", b"x" * (128 * K)) is not None
        assert {tier.arena.slab_of(block.slot) for block in blocks if block.gone} == {5}
        assert sum(block.gone for block in blocks) == tier.memory.counters.evictions == 8
        assert tier.memory.slabs_taken == 1
        tier.check()

    def test_a_class_evicts_its_own_first(self, make_tier):
        tier = make_tier(sizes=(128 * K,))
        first = tier.store(b"first", b"x" * (128 * K))
        small = [tier.store(b"%d" % number, bytes(16 * K)) for number in range(56)]
        for block in small:
            tier.memory.touch(block)
        assert tier.store(b"second", b"x" * (128 * K)) is not None
        assert first.gone and not any(block.gone for block in small)
        tier.check()

    def test_a_class_that_is_used_more_comes_to_have_more(self, make_tier):
        """One that filled memory kept it, and the class in use churned in what was left."""
        tier = make_tier(sizes=(32 * K,))
        for number in range(64):
            tier.store(b"old%d" % number, bytes(16 * K))
        for number in range(400):
            assert tier.store(b"%d" % number, bytes(32 * K)) is not None
            tier.check()
        assert len(tier.memory.classes[32 * K].slabs) >= 6

    def test_leased_and_unwritten_blocks_keep_their_slab(self, make_tier):
        tier = make_tier(sizes=(128 * K,))
        blocks = [tier.store(b"%d" % number, b"x" * 16 * K) for number in range(64)]
        places = []
        by_slab = {}
        for block in blocks:
            by_slab.setdefault(tier.arena.slab_of(block.slot), []).append(block)
        views = tier.reader.lease_many(1, [by_slab[slab][0].key for slab in range(6)], places)
        assert None not in views
        in_flight, dirty = by_slab[6][0], by_slab[7][0]
        tier.memory.protect(in_flight)
        in_flight.writing = True
        dirty.durable = False
        tier.memory.place(dirty)
        tier.memory.may_drop_dirty = lambda: False
        assert tier.store(b"large", b"x" * (128 * K)) is None
        kept = [by_slab[slab][0] for slab in range(6)] + [in_flight, dirty]
        assert not any(block.gone for block in kept)
        tier.check()
        assert all(bytes(view) == b"x" * 16 * K for view in views)
        tier.reader.release([places.pop(0)])
        assert tier.store(b"large", b"y" * (128 * K)) is not None
        assert all(bytes(view) == b"x" * 16 * K for view in views[1:])
        tier.check()
        tier.reader.release(places)

    def test_a_class_gets_a_slab_though_some_block_is_always_in_flight_in_each(self, make_tier):
        """Under a load of writes no slab is ever free of blocks on their way to the disk, and a
        class that came later would never get one."""
        tier = make_tier(sizes=(128 * K,))
        memory = tier.memory

        def in_flight(block):
            block.writing = True
            memory.protect(block)

        def land(block):
            memory.landed(block)
            if not block.gone:
                memory.place(block)

        blocks = [tier.store(b"%d" % number, bytes(16 * K)) for number in range(64)]
        for block in blocks[::8]:
            in_flight(block)
        flying = blocks[::8]
        for number in range(200):
            if tier.store(b"large", b"x" * (128 * K)) is not None:
                break
            tier.check()
            fresh = tier.store(b"new%d" % number, bytes(16 * K))
            in_flight(fresh)
            land(flying.pop(0))
            flying.append(fresh)
        else:
            pytest.fail("the larger class never got a slab")
        assert sum(block.gone for block in blocks) < 64
        tier.check()

    def test_a_promise_that_nobody_asks_for_ends(self, make_tier, monkeypatch):
        now = 100.0
        monkeypatch.setattr(slab_taking.time, "monotonic", lambda: now)
        tier = make_tier(sizes=(128 * K,))
        memory = tier.memory
        blocks = [tier.store(b"%d" % number, bytes(16 * K)) for number in range(64)]
        for block in blocks[::8]:
            memory.protect(block)
        assert tier.store(b"large", b"x" * (128 * K)) is None
        kept = memory.classes[16 * K].promised_slots
        assert kept == 7 and memory.free_slots == 7
        slot, _ = memory.reserve(16 * K)
        assert memory.classes[16 * K].promised_slots == kept
        memory.unreserve(slot)
        now += slab_taking.PROMISE_S + 1
        memory.taking.keep_promises()
        assert memory.classes[16 * K].promised_slots == 0
        tier.check()
        # Nor does a class keep one that it got and did not use.
        assert tier.store(b"large", b"x" * (128 * K)) is None
        for block in blocks:
            if not block.gone and block.queue is None:
                memory.place(block)
        memory.taking.keep_promises()
        assert len(memory.classes[128 * K].slabs) == 1 and memory.slabs.spare_slabs == 0
        now += slab_taking.PROMISE_S + 1
        memory.taking.keep_promises()
        assert memory.slabs.spare_slabs == 1
        tier.check()

    def test_while_it_gets_no_slab_a_class_is_served_by_the_next_larger(self, make_tier):
        tier = make_tier(sizes=(20 * K, 32 * K))
        for number in range(8):
            tier.store(b"%d" % number, b"x" * 32 * K)
        kept = [tier.memory.reserve(16 * K) for _ in range(6 * 8)]
        assert None not in kept and tier.memory.slabs.spare_slabs == 0
        tier.memory.protect(tier.memory.find(tier.space, b"0"))
        tier.memory.protect(tier.memory.find(tier.space, b"7"))
        found = tier.store(b"k", bytes(20 * K))
        assert found is not None and found.slot_bytes == 32 * K
        many = tier.memory.reserve_many([20 * K] * 2 + [32 * K])
        assert {tier.memory.arena.slot_bytes_of(slot) for slot in many} == {32 * K}
        # No more than there is, whichever class is asked.
        more = [slot for slot in tier.memory.reserve_many([20 * K] * 8) if slot != NO_SLOT]
        assert len(more) < 8
        for slot in (*many, *more):
            tier.memory.unreserve(slot)
        tier.check()


class TestReadersMeetANewCut:
    """A reader's steps (find, copy, look again; write a lease, look again) against a slab's:
    sequences odd, lanes scanned, cut, written, published."""

    @pytest.fixture
    def tier(self, make_tier):
        tier = make_tier(256 * K, sizes=(32 * K,))
        tier.old = [
            tier.store(b"%d" % number, b"%d" % (number % 10) * 16 * K) for number in range(16)
        ]
        return tier

    def cut_anew(self, tier, block):
        """Evict a block's slab, and fill it as slots of 32 KiB with other bytes."""
        slab = tier.arena.slab_of(block.slot)
        for other in tier.old:
            if not other.gone and tier.arena.slab_of(other.slot) != slab:
                tier.memory.touch(other)
        new = tier.store(b"new", b"n" * 32 * K)
        assert tier.arena.slab_of(new.slot) == slab and block.gone
        return new

    def test_found_before_and_copied_after_it_is_a_miss(self, tier):
        block = tier.old[3]
        hit = tier.hit(block)
        assert tier.mapping.copy_bytes(hit) == b"3" * 16 * K
        new = self.cut_anew(tier, block)
        assert bytes(tier.mapping.view(hit.offset, 1)) == b"n"
        assert tier.mapping.copy_bytes(hit) is None
        assert tier.mapping.copy_out(hit, bytearray(16 * K)) == -1
        assert tier.mapping.lease_hit(hit, []) is None
        assert tier.reader.get_bytes(1, block.key) is None
        assert tier.reader.get_bytes(1, b"new") == b"n" * 32 * K
        assert tier.mapping.copy_bytes(tier.hit(new)) == b"n" * 32 * K

    def test_between_the_odd_sequence_and_the_cut_nothing_is_found(self, tier):
        block = tier.old[3]
        hit = tier.hit(block)
        slots = [each.slot for each in tier.old[:2]] + [block.slot]
        versions = tier.arena.index.withdraw(slots)
        assert tier.mapping.copy_bytes(hit) is None
        assert tier.mapping.lease_hit(hit, []) is None
        assert tier.reader.get_bytes(1, block.key) is None
        for slot, version in zip(slots, versions, strict=True):
            tier.arena.index.restore(slot, version)
        assert tier.mapping.copy_bytes(hit) == b"3" * 16 * K

    def test_a_lease_from_before_keeps_the_slab(self, tier):
        block = tier.old[3]
        places = []
        view = tier.mapping.lease_hit(tier.hit(block), places)
        slab = tier.arena.slab_of(block.slot)
        for other in tier.old:
            if tier.arena.slab_of(other.slot) != slab:
                tier.memory.touch(other)
        new = tier.store(b"new", b"n" * 32 * K)
        assert new is not None and tier.arena.slab_of(new.slot) != slab
        assert bytes(view) == b"3" * 16 * K and not block.gone
        tier.reader.release(places)
        tier.check()

    def test_a_block_deleted_under_a_lease_keeps_the_slab(self, tier):
        block = tier.old[3]
        places = []
        view = tier.mapping.lease_hit(tier.hit(block), places)
        slab = tier.arena.slab_of(block.slot)
        tier.memory.remove_many([each for each in tier.old if not each.gone])
        assert tier.memory.held_slots == 1
        while (found := tier.memory.reserve(32 * K)) is not None:
            assert tier.arena.slab_of(found[0]) != slab
        assert bytes(view) == b"3" * 16 * K
        tier.check()
        tier.reader.release(places)
        assert tier.memory.reserve(32 * K) is not None

    def test_the_same_number_in_another_cut_is_another_version(self, tier):
        """Slot 0 of a slab has the same number, and the same offset, whatever the size."""
        block = min(tier.old, key=lambda each: each.offset)
        hit = tier.hit(block)
        new = self.cut_anew(tier, block)
        assert (new.slot, new.offset) == (hit.slot, hit.offset)
        assert new.version > hit.version
        assert tier.mapping.copy_bytes(hit) is None


@pytest.mark.parametrize("seed", range(6))
def test_random_sizes_and_leases_lose_no_byte_and_no_slot(make_tier, monkeypatch, seed):
    source = random.Random(seed)
    tier = make_tier(2 * M, sizes=(24 * K, 64 * K, 256 * K))
    memory = tier.memory
    values, reserved, leases = {}, [], []
    for number in range(1200):
        action = source.random()
        key = b"%d" % source.randrange(200)
        present = memory.find(tier.space, key)
        if action < 0.6:
            if present is None:
                size = int(source.choice((1, 15, 16, 17, 24, 60, 64, 200, 256)) * K)
                value = source.randbytes(8) * (size // 8)
                block = tier.store(
                    key,
                    value,
                    durable=source.random() < 0.7,
                    retention=source.choice((Retention.LONG, Retention.SHORT)),
                    expires_ns=boot_clock_ns() + 10**7 if source.random() < 0.1 else 0,
                )
                if block is not None:
                    values[key] = value
        elif action < 0.7 and present is not None:
            memory.remove(present)
        elif action < 0.8:
            size = source.choice((1, 20 * K, 100 * K))
            found = memory.reserve(size)
            if found is not None:
                reserved.append(found[0])
        elif action < 0.85 and reserved:
            memory.unreserve(reserved.pop(source.randrange(len(reserved))))
        elif action < 0.95 and len(leases) < 20:
            places = []
            (view,) = tier.reader.lease_many(1, [key], places)
            if view is not None:
                leases.append((places, view, bytes(view)))
        elif leases:
            places, view, before = leases.pop(source.randrange(len(leases)))
            assert bytes(view) == before
            tier.reader.release(places)
        while len(reserved) > 10:
            memory.unreserve(reserved.pop(0))
        for key in source.choices(list(values), k=3) if values else []:
            found = tier.reader.get_bytes(1, key)
            assert found is None or found == values[key]
            block = memory.find(tier.space, key)
            if block is not None and not block.expires_ns:
                assert tier.reader.get_bytes(1, key) == values[key]
        if number % 10 == 0:
            memory.reclaim()
            memory.taking.keep_promises()
            tier.check()
    for places, view, before in leases:
        assert bytes(view) == before
        tier.reader.release(places)
    for slot in reserved:
        memory.unreserve(slot)
    assert memory.slabs_taken > 0
    memory.remove_many(memory.blocks_of(tier.space))
    memory.reclaim()
    later = slab_taking.time.monotonic() + slab_taking.PROMISE_S
    monkeypatch.setattr(slab_taking.time, "monotonic", lambda: later)
    memory.taking.keep_promises()
    tier.check()
    assert memory.slabs.free_bytes == tier.arena.data_bytes and memory.slabs.used_bytes == 0
    assert memory.slabs.spare_slabs == tier.arena.geometry.slab_count
