"""Sequenced slots within one process: readers copy, without the GIL, what a writer rewrites."""

from __future__ import annotations

import threading

from tablespace.shared import SequencedSlots, copy_in

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
