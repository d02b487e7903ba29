"""tablespace.shared: the index from key to slot, and eviction against leases, step by step."""

from __future__ import annotations

import random
import time

import pytest
from tablespace.shared import (
    KEYED_RECORD_BYTES,
    MAX_PROBES,
    MISS,
    ArenaReader,
    Lane,
    SequencedSlots,
    SlotIndex,
    contains_packed,
    store_u64,
)

SLOT_BYTES = 64
SLOTS = 16


class Shared:
    """An arena in one process: the daemon's writer, and readers with a lane each."""

    def __init__(self, slot_count: int = SLOTS) -> None:
        self.slot_count = slot_count
        self.entries = SlotIndex.entries_for(slot_count)
        self.table = slot_count * KEYED_RECORD_BYTES
        self.memory = bytearray(self.table + 8 * self.entries)
        self.data = bytearray(slot_count * SLOT_BYTES)
        self.heartbeat = bytearray(8)
        self.slots = SequencedSlots(
            self.memory, slot_count, writable=True, record_bytes=KEYED_RECORD_BYTES
        )
        self.slots.initialise()
        self.index = SlotIndex(self.slots, self.memory, offset=self.table, entries=self.entries)
        self.lanes: list[Lane] = []

    def store(self, slot: int, key: bytes, value: bytes, space: int = 1, expires: int = 0) -> int:
        self.slots.reserve(slot)
        self.data[slot * SLOT_BYTES : slot * SLOT_BYTES + len(value)] = value
        offset = slot * SLOT_BYTES
        return self.index.publish(slot, space, key, offset, len(value), 0, expires)

    def reader(self, leases: int = 4, touches: int = 8) -> ArenaReader:
        memory = bytearray(Lane.bytes_for(leases, touches))
        self.lanes.append(Lane(memory, leases=leases, touches=touches))
        slots = SequencedSlots(
            memoryview(self.memory).toreadonly(),
            self.slot_count,
            record_bytes=KEYED_RECORD_BYTES,
        )
        index = SlotIndex(
            slots,
            memoryview(self.memory).toreadonly(),
            offset=self.table,
            entries=self.entries,
        )
        return ArenaReader(
            index,
            self.data,
            lane=Lane(memory, leases=leases, touches=touches),
            heartbeat=self.heartbeat,
            stale_ns=2 * 10**9,
            unchecked_ns=10**10,
        )


@pytest.fixture
def shared() -> Shared:
    return Shared()


class TestLookups:
    def test_a_key_is_found_with_its_namespace_and_whole_length_only(self, shared: Shared) -> None:
        version = shared.store(3, b"key", b"value")
        reader = shared.reader()
        assert reader.index.find(1, b"key") == (3, version, 5, 0)
        assert reader.get_bytes(1, b"key") == b"value"
        for space, key in ((2, b"key"), (1, b"ke"), (1, b"key\0"), (1, b"kez"), (0, b"key")):
            assert reader.index.find(space, key) is None
            assert reader.get_bytes(space, key) is None

    def test_keys_of_every_length_are_kept_whole(self) -> None:
        shared = Shared(256)
        keys = [bytes(range(1, length + 1)) for length in range(1, 224)]
        for slot, key in enumerate(keys):
            shared.store(slot, key, key[:SLOT_BYTES])
        reader = shared.reader()
        for slot, key in enumerate(keys):
            assert reader.index.find(1, key) == (slot, 4, min(len(key), SLOT_BYTES), 0)
            assert reader.index.key_of(slot) == (1, key)
            assert reader.index.find(1, key[:-1] + b"\xff") is None
        with pytest.raises(ValueError, match="1 to 223"):
            reader.get_bytes(1, bytes(224))
        with pytest.raises(ValueError, match="1 to 223"):
            reader.get_bytes(1, b"")
        with pytest.raises(TypeError, match="str"):
            reader.contains_many(1, ["a"])  # type: ignore[list-item]

    def test_many_are_answered_in_order(self, shared: Shared) -> None:
        for slot in range(10):
            shared.store(slot, b"%d" % slot, b"v%d" % slot)
        reader = shared.reader(touches=64)
        keys = [b"0", b"x", b"9", b"5", b"5"] * 20
        assert reader.contains_many(1, keys) == [True, False, True, True, True] * 20
        assert reader.contains_many(1, []) == []
        leading = [b"%d" % (number % 10) for number in range(77)]
        assert reader.match_prefix(1, [*leading, b"x", b"1"]) == 77
        assert reader.match_prefix(1, leading) == 77
        assert reader.match_prefix(1, [b"x"]) == 0
        buffers = [bytearray(SLOT_BYTES) for _ in range(3)]
        assert reader.get_many_into(1, [b"9", b"x", b"0"], buffers) == [2, MISS, 2]
        assert (buffers[0][:2], buffers[2][:2]) == (b"v9", b"v0")
        assert reader.get_many_into(1, [], []) == []
        assert reader.lane.held == 0
        assert shared.lanes[0].take_counts() == (2, 4)
        assert shared.lanes[0].take_counts() == (0, 0)

    def test_a_short_buffer_is_an_error_that_names_both_sizes(self, shared: Shared) -> None:
        shared.store(0, b"k", b"12345678")
        reader = shared.reader()
        with pytest.raises(ValueError, match=r"8 bytes.*only 7"):
            reader.get_into(1, b"k", bytearray(7))
        with pytest.raises(ValueError, match=r"8 bytes.*only 3"):
            reader.get_many_into(1, [b"x", b"k"], [bytearray(1), bytearray(3)])
        with pytest.raises(ValueError, match="2 keys for 1"):
            reader.get_many_into(1, [b"x", b"k"], [bytearray(1)])
        with pytest.raises((BufferError, TypeError)):
            reader.get_into(1, b"k", bytes(8))
        assert shared.lanes[0].take_counts() == (0, 0)

    def test_an_expired_block_is_a_miss_for_every_reader(self, shared: Shared) -> None:
        now = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        shared.store(0, b"old", b"v", expires=now)
        shared.store(1, b"new", b"v", expires=now + 10**12)
        reader = shared.reader()
        assert reader.contains_many(1, [b"old", b"new"]) == [False, True]
        assert reader.get_bytes(1, b"old") is None
        assert reader.lease_many(1, [b"old"], []) == [None]
        shared.slots.set_expires(1, now)
        assert reader.get_bytes(1, b"new") is None
        shared.slots.set_expires(1, 0)
        assert reader.get_bytes(1, b"new") == b"v"

    def test_a_reader_is_current_only_with_a_fresh_heartbeat_and_a_check(
        self, shared: Shared
    ) -> None:
        reader = shared.reader()
        store_u64(shared.heartbeat, 0, time.monotonic_ns())
        shared.store(0, b"k", b"12345678")
        assert not reader.is_current()
        assert reader.get_into_if_current(1, b"k", bytearray(8)) == -1
        reader.checked()
        assert reader.is_current()
        assert reader.get_into_if_current(1, b"k", bytearray(8)) == 8
        store_u64(shared.heartbeat, 0, time.monotonic_ns() - 21 * 10**8)
        assert not reader.is_current()
        store_u64(shared.heartbeat, 0, time.monotonic_ns())
        assert reader.is_current()
        reader.stop()
        assert not reader.is_current()
        assert reader.lease_many(1, [b"k"], []) == [None]


class TestTable:
    def test_it_agrees_with_a_dict_over_many_changes(self) -> None:
        shared = Shared(64)
        reader = shared.reader()
        source = random.Random(5)
        model: dict[tuple[int, bytes], int] = {}
        free = list(range(64))
        for step in range(20_000):
            name = (source.randrange(3), b"%d" % source.randrange(60))
            if name in model:
                slot = model.pop(name)
                assert shared.index.remove([slot], []) == [False]
                free.append(slot)
            elif free:
                slot = free.pop(source.randrange(len(free)))
                shared.store(slot, name[1], b"%d" % step, space=name[0])
                model[name] = slot
            if step % 50 == 0:
                for space in range(3):
                    for number in range(60):
                        found = reader.index.find(space, b"%d" % number)
                        there = model.get((space, b"%d" % number))
                        assert (found and found[0]) == there
        assert shared.index.listed == len(model)
        assert shared.index.unlisted == 0

    def test_removing_one_of_a_cluster_leaves_the_others_within_reach(self) -> None:
        """Without closing the gap a probe would stop at the empty entry and miss the rest."""
        for removed in range(6):
            shared = Shared(16)
            keys = _colliding(shared, 6)
            for slot, key in enumerate(keys):
                shared.store(slot, key, key)
            shared.index.remove([removed], [])
            reader = shared.reader()
            for slot, key in enumerate(keys):
                found = reader.index.find(1, key)
                assert (found is None) == (slot == removed)

    def test_a_slot_that_finds_no_near_place_is_not_listed(self) -> None:
        shared = Shared(512)
        keys = _colliding(shared, MAX_PROBES + 2)
        for slot, key in enumerate(keys):
            shared.store(slot, key, b"v")
        reader = shared.reader()
        assert shared.index.unlisted == 2
        assert sum(reader.contains_many(1, keys)) == MAX_PROBES
        shared.index.remove(list(range(len(keys))), [])
        assert shared.index.listed == 0
        assert not any(reader.contains_many(1, keys))

    def test_misuse_is_an_error(self, shared: Shared) -> None:
        shared.store(0, b"k", b"v")
        with pytest.raises(ValueError, match="published already"):
            shared.index.publish(0, 1, b"k", 0, 1, 0)
        shared.slots.reserve(0)
        with pytest.raises(ValueError, match="listed already"):
            shared.index.publish(0, 1, b"k", 0, 1, 0)
        with pytest.raises(ValueError, match="not published"):
            shared.index.withdraw([0])
        with pytest.raises(ValueError, match="1 to 223"):
            shared.slots.reserve(1)
            shared.index.publish(1, 1, bytes(224), 0, 1, 0)
        with pytest.raises(IndexError):
            shared.index.remove([SLOTS], [])
        with pytest.raises(IndexError):
            shared.index.leased([-1], [])
        reader = shared.reader()
        with pytest.raises(ValueError, match="reading only"):
            reader.index.remove([0], [])
        plain = SequencedSlots(bytearray(64), 1, writable=True)
        with pytest.raises(ValueError, match="hold no key"):
            SlotIndex(plain, bytearray(64), offset=0, entries=2)
        for entries in (0, 3, 16):
            with pytest.raises(ValueError, match="entries"):
                SlotIndex(shared.slots, shared.memory, offset=0, entries=entries)
        with pytest.raises(ValueError, match="do not lie"):
            SlotIndex(shared.slots, shared.memory, offset=shared.table + 8, entries=32)
        shared.index.close()
        shared.index.close()
        with pytest.raises(ValueError, match="closed"):
            shared.index.find(1, b"k")


class TestReadersMeetTheWriter:
    """Each step of a reader, with a whole change by the writer between it and the next."""

    def test_rewritten_between_finding_and_copying(self, shared: Shared) -> None:
        shared.store(0, b"k", b"old")
        reader = shared.reader()
        slot, version, _, _ = reader.index.find(1, b"k") or (0, 0, 0, 0)
        shared.index.remove([0], [])
        shared.store(0, b"k", b"new")
        assert reader.index.slots.copy_bytes(slot, version, shared.data, 0) is None
        assert not reader.lease_slot(slot, version, [])
        assert reader.lane.held == 0
        assert reader.get_bytes(1, b"k") == b"new"

    def test_the_same_slot_under_another_key_is_not_taken_for_the_first(
        self, shared: Shared
    ) -> None:
        shared.store(0, b"first", b"1")
        reader = shared.reader()
        shared.index.remove([0], [])
        shared.store(0, b"second", b"2")
        assert reader.get_bytes(1, b"first") is None
        assert reader.get_bytes(1, b"second") == b"2"

    def test_a_hint_left_behind_proves_nothing(self, shared: Shared) -> None:
        """The entry still names the slot, which is being rewritten, or is another key's."""
        shared.store(0, b"k", b"v")
        reader = shared.reader()
        shared.slots.reserve(0)
        assert reader.get_bytes(1, b"k") is None
        shared.slots.publish(0, 1, 0, 2)
        assert reader.get_bytes(1, b"k") is None

    def test_while_reserved_it_is_a_miss(self, shared: Shared) -> None:
        shared.store(0, b"k", b"v")
        reader = shared.reader()
        versions = shared.index.withdraw([0])
        assert reader.get_bytes(1, b"k") is None
        assert reader.lease_many(1, [b"k"], []) == [None]
        assert reader.contains_many(1, [b"k"]) == [False]
        shared.index.restore(0, versions[0])
        assert reader.get_bytes(1, b"k") == b"v"


class TestLeasesMeetEviction:
    """lease: write the lane (L1), read the sequence again (L2). evict: sequence odd (E1), scan
    the lanes (E2), restore or let go (E3). Every order of these must keep a held slot."""

    def lease_begun(self, shared: Shared) -> tuple[ArenaReader, int, int]:
        shared.store(0, b"k", b"v")
        reader = shared.reader()
        _, version, _, _ = reader.index.find(1, b"k") or (0, 0, 0, 0)
        return reader, version, reader.lane.take(0)  # type: ignore[union-attr]

    def test_l1_l2_e1_e2_e3_the_held_slot_stays(self, shared: Shared) -> None:
        shared.store(0, b"k", b"v")
        reader = shared.reader()
        places: list[int] = []
        (view,) = reader.lease_many(1, [b"k"], places)
        assert view is not None and view.readonly and bytes(view) == b"v"
        version = shared.slots.version(0)
        assert shared.index.evict([0], shared.lanes, 1) == []
        assert shared.slots.version(0) == version
        assert reader.get_bytes(1, b"k") == b"v"
        reader.release(places)
        assert places == []
        assert shared.index.evict([0], shared.lanes, 1) == [0]
        assert reader.get_bytes(1, b"k") is None

    def test_e1_before_l1_the_lease_fails(self, shared: Shared) -> None:
        shared.store(0, b"k", b"v")
        reader = shared.reader()
        _, version, _, _ = reader.index.find(1, b"k") or (0, 0, 0, 0)
        shared.index.withdraw([0])
        assert not reader.lease_slot(0, version, [])
        assert shared.index.leased([0], shared.lanes) == [False]

    def test_l1_e1_l2_e2_the_lease_fails_and_the_slot_may_go(self, shared: Shared) -> None:
        reader, version, place = self.lease_begun(shared)
        shared.index.withdraw([0])
        assert shared.slots.version(0) != version  # L2 finds it changed: clear, miss.
        reader.release([place])
        assert shared.index.leased([0], shared.lanes) == [False]

    def test_l1_e1_e2_l2_both_give_way(self, shared: Shared) -> None:
        reader, version, place = self.lease_begun(shared)
        versions = shared.index.withdraw([0])
        assert shared.index.leased([0], shared.lanes) == [True]
        assert shared.slots.version(0) != version
        shared.index.restore(0, versions[0])
        reader.release([place])
        assert reader.get_bytes(1, b"k") == b"v"

    def test_l1_e1_e2_e3_l2_the_lease_holds(self, shared: Shared) -> None:
        """Restored under the same sequence, over the same bytes: nothing happened."""
        _, version, _ = self.lease_begun(shared)
        assert shared.index.evict([0], shared.lanes, 1) == []
        assert shared.slots.version(0) == version

    def test_e1_e2_l1_e3_l2_the_lease_fails(self, shared: Shared) -> None:
        shared.store(0, b"k", b"v")
        reader = shared.reader()
        _, version, _, _ = reader.index.find(1, b"k") or (0, 0, 0, 0)
        shared.index.withdraw([0])
        assert shared.index.leased([0], shared.lanes) == [False]
        assert not reader.lease_slot(0, version, [])
        shared.index.unlist(0)
        shared.store(0, b"other", b"w")
        assert not reader.lease_slot(0, version, [])

    def test_a_removed_slot_is_held_until_the_lease_ends(self, shared: Shared) -> None:
        shared.store(0, b"k", b"v")
        reader = shared.reader()
        places: list[int] = []
        assert reader.lease_many(1, [b"k"], places) == [b"v"]
        assert shared.index.remove([0], shared.lanes) == [True]
        assert reader.get_bytes(1, b"k") is None
        assert reader.lease_many(1, [b"k"], []) == [None]
        assert shared.index.leased([0, 1], shared.lanes) == [True, False]
        reader.release(places)
        assert shared.index.leased([0, 1], shared.lanes) == [False, False]

    def test_a_batch_lets_go_of_as_many_as_wanted_and_restores_the_rest(
        self, shared: Shared
    ) -> None:
        for slot in range(6):
            shared.store(slot, b"%d" % slot, b"v")
        reader, other = shared.reader(), shared.reader()
        assert reader.lease_many(1, [b"0"], []) == [b"v"]
        assert other.lease_many(1, [b"x", b"2"], []) == [None, b"v"]
        assert shared.index.evict([0, 1, 2, 3, 4], shared.lanes, 2) == [1, 3]
        keys = [b"%d" % slot for slot in range(6)]
        assert reader.contains_many(1, keys) == [True, False, True, False, True, True]

    def test_a_slot_leased_twice_stays_until_both_end(self, shared: Shared) -> None:
        shared.store(0, b"k", b"v")
        reader = shared.reader()
        places: list[int] = []
        assert reader.lease_many(1, [b"k", b"k"], places) == [b"v", b"v"]
        reader.release([places.pop()])
        assert shared.index.evict([0], shared.lanes, 1) == []
        reader.release(places)
        assert shared.index.evict([0], shared.lanes, 1) == [0]


def _colliding(shared: Shared, count: int) -> list[bytes]:
    """Return keys that all belong to one place of the table, found by looking where they go."""
    wanted: dict[int, list[bytes]] = {}
    number = 0
    while True:
        key = b"c%d" % number
        number += 1
        shared.store(0, key, b"v")
        table = bytes(shared.memory[shared.table :])
        place = (len(table) - len(table.lstrip(b"\0"))) // 8
        shared.index.remove([0], [])
        same = wanted.setdefault(place, [])
        same.append(key)
        if len(same) == count:
            return same


def packed(*keys: bytes, header: bytes | None = None) -> bytes:
    """Return keys as any MessagePack encoder writes them."""
    count = len(keys)
    if header is None:
        header = bytes([0x90 | count]) if count < 16 else b"\xdc" + count.to_bytes(2, "big")
    return header + b"".join(b"\xc4" + bytes([len(key)]) + key for key in keys)


def test_packed_keys_are_found_as_those_in_a_list_are() -> None:
    shared = Shared(slot_count=256)
    reader = shared.reader()
    source = random.Random(3)
    keys = [source.randbytes(source.randint(1, 223)) for _ in range(600)]
    for slot, key in enumerate(keys[:256]):
        shared.store(slot, key, b"v", space=7, expires=1 if slot % 5 == 0 else 0)
    source.shuffle(keys)
    for count in (0, 1, 15, 16, 31, 32, 33, 600):
        for space in (7, 8):
            found = contains_packed(shared.index, space, packed(*keys[:count]), 600)
            assert found == reader.contains_many(space, keys[:count])
    assert sum(contains_packed(shared.index, 7, packed(*keys), 600) or []) == 204


@pytest.mark.parametrize(
    "what",
    [
        b"",
        b"\xc0",
        b"\xdc\x00",
        packed(b"k") + b"\x00",  # Something behind it.
        packed(b"k")[:-1],
        packed(b"k", header=b"\x92"),  # One more announced than there are.
        packed(b"k", b"l", header=b"\x91"),
        packed(b""),
        packed(bytes(224)),
        b"\x91\xc5\x00\x01k",  # A longer form of a length that fits the shorter one.
        b"\x91\xa1k",  # Text.
        b"\x91\x93\xc4\x01k",
        b"\xdc\xff\xff" + bytes(65536),
        b"\xdd\x00\x00\x00\x01\xc4\x01k",
        packed(*[b"k"] * 5),  # More than may be asked for.
    ],
)
def test_what_is_no_packed_keys_is_left_to_a_decoder(what: bytes) -> None:
    shared = Shared()
    assert contains_packed(shared.index, 1, what, 4) is None
    assert contains_packed(shared.index, 1, packed(*[b"k"] * 4), 4) == [False] * 4
