"""tablespace.shared.Lane: what a session's process may write into it, and what that does."""

from __future__ import annotations

import random
import struct

import pytest
from tablespace.shared import (
    KEYED_RECORD_BYTES,
    MAX_LEASES,
    MAX_TOUCHES,
    Lane,
    SequencedSlots,
    SlotIndex,
    drain_lanes,
)

LEASES = 4
TOUCHES = 8
SLOTS = 16
FULL = (1 << 64) - 1


@pytest.fixture
def memory() -> bytearray:
    return bytearray(Lane.bytes_for(LEASES, TOUCHES))


@pytest.fixture
def client(memory: bytearray) -> Lane:
    return Lane(memory, leases=LEASES, touches=TOUCHES)


@pytest.fixture
def daemon(memory: bytearray) -> Lane:
    return Lane(memory, leases=LEASES, touches=TOUCHES)


@pytest.fixture
def index() -> SlotIndex:
    table = SLOTS * KEYED_RECORD_BYTES
    entries = SlotIndex.entries_for(SLOTS)
    shared = bytearray(table + 8 * entries)
    slots = SequencedSlots(shared, SLOTS, writable=True, record_bytes=KEYED_RECORD_BYTES)
    slots.initialise()
    return SlotIndex(slots, shared, offset=table, entries=entries)


def test_leases_are_bounded_and_their_places_reused(client: Lane, daemon: Lane) -> None:
    places = [client.take(slot) for slot in range(6)]
    assert places == [0, 1, 2, 3, -1, -1]
    assert daemon.leases(SLOTS) == {0, 1, 2, 3}
    client.give_back(2)
    assert daemon.leases(SLOTS) == {0, 1, 3}
    assert client.held == 3
    assert client.take(9) == 2
    for place in (-1, LEASES):
        with pytest.raises(IndexError):
            client.give_back(place)
    client.give_back(0)
    with pytest.raises(IndexError):
        client.give_back(0)


def test_one_that_is_shut_gives_no_more_leases(client: Lane) -> None:
    place = client.take(1)
    assert not client.shut_if_idle()
    client.give_back(place)
    assert client.shut_if_idle()
    assert client.take(1) == -1


def test_touches_come_in_order_and_once(client: Lane, daemon: Lane) -> None:
    for slot in (3, 1, 2):
        client.touch(slot)
    assert [word & 0xFFFFFFFF for word in daemon.drain(SLOTS)] == [3, 1, 2]
    assert daemon.drain(SLOTS) == []
    client.touch(5)
    assert [word & 0xFFFFFFFF for word in daemon.drain(SLOTS)] == [5]


def test_a_full_ring_keeps_the_newest(client: Lane, daemon: Lane) -> None:
    for slot in range(13):
        client.touch(slot)
    assert [word & 0xFFFFFFFF for word in daemon.drain(SLOTS)] == list(range(5, 13))


def test_touches_of_all_lanes_come_each_once_by_their_newest_time() -> None:
    lanes = []
    for words in ((5, 1), (3, 9), (7, 1)), ((4, 2), (6, 3), (8, SLOTS)):
        memory = bytearray(Lane.bytes_for(LEASES, TOUCHES))
        lane = Lane(memory, leases=LEASES, touches=TOUCHES)
        for place, (clock, slot) in enumerate(words):
            struct.pack_into("<Q", memory, 64 + 8 * LEASES + 8 * place, clock << 32 | slot)
        struct.pack_into("<Q", memory, 8, len(words))
        lanes.append(lane)
    assert drain_lanes(lanes, SLOTS) == [9, 2, 3, 1]
    assert drain_lanes(lanes, SLOTS) == []


@pytest.mark.parametrize("seed", range(20))
def test_whatever_lies_in_it_costs_the_daemon_nothing_but_a_bounded_scan(
    memory: bytearray, daemon: Lane, index: SlotIndex, seed: int
) -> None:
    """Slots that do not exist, a high-water mark and a ring head beyond all bounds."""
    source = random.Random(seed)
    words = len(memory) // 8
    for _ in range(200):
        for _ in range(source.randrange(1, words)):
            word = source.choice((0, 1, SLOTS, SLOTS + 1, FULL, FULL - 1, source.getrandbits(64)))
            struct.pack_into("<Q", memory, 8 * source.randrange(words), word)
        assert len(daemon.drain(SLOTS)) <= TOUCHES
        assert daemon.leases(SLOTS) <= set(range(SLOTS))
        hits, size_bytes = daemon.take_counts()
        assert 0 <= hits <= 1 << 50 and 0 <= size_bytes <= 1 << 50
        held = index.leased(list(range(SLOTS)), [daemon])
        assert sum(held) <= LEASES
        assert {slot for slot in range(SLOTS) if held[slot]} == daemon.leases(SLOTS)


def test_a_closed_lane_holds_nothing(daemon: Lane, client: Lane, index: SlotIndex) -> None:
    client.take(3)
    assert index.leased([3], [daemon]) == [True]
    daemon.close()
    daemon.close()
    assert index.leased([3], [daemon]) == [False]
    with pytest.raises(ValueError, match="closed"):
        daemon.drain(SLOTS)


def test_its_geometry_is_checked() -> None:
    for leases in (0, MAX_LEASES + 1):
        with pytest.raises(ValueError, match="leases"):
            Lane(bytearray(1 << 20), leases=leases, touches=8)
    for touches in (0, 3, 2 * MAX_TOUCHES):
        with pytest.raises(ValueError, match="touches"):
            Lane(bytearray(1 << 20), leases=8, touches=touches)
    with pytest.raises(ValueError, match="the buffer has"):
        Lane(bytearray(Lane.bytes_for(8, 8) - 1), leases=8, touches=8)
    with pytest.raises((BufferError, TypeError)):
        Lane(bytes(Lane.bytes_for(8, 8)), leases=8, touches=8)
