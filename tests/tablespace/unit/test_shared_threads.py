"""Shared slots within one process: readers copy, without the GIL, what a writer rewrites."""

from __future__ import annotations

import threading

from tablespace.shared import (
    KEYED_RECORD_BYTES,
    ArenaReader,
    Lane,
    SequencedSlots,
    SlotIndex,
    copy_in,
)

SLOTS = 4
SIZE = 65536


def test_threads_never_take_a_torn_copy_for_a_whole_one() -> None:
    records = bytearray(SequencedSlots.bytes_for(SLOTS))
    memory = bytearray(SLOTS * SIZE)
    writing = SequencedSlots(records, SLOTS, writable=True)
    writing.initialise()
    stop = threading.Event()
    problems: list[str] = []
    whole = [0, 0]

    def read(which: int) -> None:
        reading = SequencedSlots(records, SLOTS)
        target = bytearray(SIZE)
        at = 0
        while not stop.is_set():
            at += 1
            slot = at % SLOTS
            version = reading.version(slot)
            if reading.copy_out(slot, version, memory, slot * SIZE, target) != SIZE:
                continue
            whole[which] += 1
            if bytes(target) != bytes(target[:8]) * (SIZE // 8):
                problems.append(f"slot {slot}, version {version}")
        reading.close()

    readers = [threading.Thread(target=read, args=(which,)) for which in range(2)]
    for thread in readers:
        thread.start()
    number = 0
    while min(whole) < 200 and number < 100_000:
        number += 1
        slot = number % SLOTS
        writing.reserve(slot)
        copy_in(memory, slot * SIZE, number.to_bytes(8, "little") * (SIZE // 8))
        writing.publish(slot, SIZE, number, 0)
    stop.set()
    for thread in readers:
        thread.join()
    assert problems == []
    assert min(whole) >= 200


def test_threads_read_by_key_and_lease_while_one_evicts_and_rewrites() -> None:
    table = SLOTS * KEYED_RECORD_BYTES
    entries = SlotIndex.entries_for(SLOTS)
    shared = bytearray(table + 8 * entries)
    memory = bytearray(SLOTS * SIZE)
    records = SequencedSlots(shared, SLOTS, writable=True, record_bytes=KEYED_RECORD_BYTES)
    records.initialise()
    index = SlotIndex(records, shared, offset=table, entries=entries)
    lane_memory = [bytearray(Lane.bytes_for(2, 8)) for _ in range(2)]
    lanes = [Lane(each, leases=2, touches=8) for each in lane_memory]
    stop = threading.Event()
    problems: list[str] = []
    whole = [0, 0]
    keys = [b"%d" % number for number in range(SLOTS)]

    def read(which: int) -> None:
        slots = SequencedSlots(shared, SLOTS, record_bytes=KEYED_RECORD_BYTES)
        reader = ArenaReader(
            SlotIndex(slots, shared, offset=table, entries=entries),
            memory,
            lane=Lane(lane_memory[which], leases=2, touches=8),
            heartbeat=bytearray(8),
            stale_ns=1,
            unchecked_ns=1,
        )
        targets = [bytearray(SIZE) for _ in keys]
        while not stop.is_set():
            for target, length in zip(
                targets, reader.get_many_into(0, keys, targets), strict=True
            ):
                if length == SIZE:
                    whole[which] += 1
                    if bytes(target) != bytes(target[:8]) * (SIZE // 8):
                        problems.append("torn")
            places: list[int] = []
            (view,) = reader.lease_many(0, keys[:1], places)
            if view is not None:
                if view[:8] != view[-8:]:
                    problems.append("changed under a lease")
                reader.release(places)

    readers = [threading.Thread(target=read, args=(which,)) for which in range(2)]
    for thread in readers:
        thread.start()
    number = 0
    published = [False] * SLOTS
    while min(whole) < 200 and number < 100_000:
        number += 1
        slot = number % SLOTS
        if published[slot] and not index.evict([slot], lanes, 1):
            continue
        records.reserve(slot)
        copy_in(memory, slot * SIZE, number.to_bytes(8, "little") * (SIZE // 8))
        index.publish(slot, 0, keys[slot], slot * SIZE, SIZE, number)
        published[slot] = True
        for lane in lanes:
            assert len(lane.drain(SLOTS)) <= 8
    stop.set()
    for thread in readers:
        thread.join()
    assert problems == []
    assert min(whole) >= 200
