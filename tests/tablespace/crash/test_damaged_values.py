"""Values damaged on the disk while the store works on them: a miss, exact accounting, no crash."""

from __future__ import annotations

import errno

import pytest
from tablespace._core.aligned_buffer import AlignedBuffer
from tablespace.layout import Geometry
from tablespace.store import Store
from tablespace.testing import Fault, FaultPlan, Workload
from tablespace.testing.crash import open_simulated
from tablespace.testing.model import audit

GEOMETRY = Geometry(4096, 16384, 1)


def scramble(workload: Workload, key: bytes) -> None:
    """Damage a value behind the store's back."""
    store = workload.recorder.store
    assert store is not None
    entry = store.stat(key)
    assert entry is not None
    node = workload.disk.find(f"containers/{entry.container:04d}.bin")
    assert node is not None
    workload.disk.files[node][entry.slot * 4096] ^= 1


def test_a_victim_found_damaged_while_its_eviction_is_under_way_is_dropped_once() -> None:
    """A reader dropped a victim between its choice and its record; encoding the record then read
    a name that had been given back."""
    for step in range(12):
        workload = Workload(GEOMETRY, evict=True)
        store = workload.recorder.store
        assert store is not None
        store.put_many([(b"key-%d" % number, b"v" * 100) for number in range(4)])
        scramble(workload, b"key-0")
        steps = 0

        def read(kind: str, label: str, at: int = step, store: Store = store) -> None:
            nonlocal steps
            if steps == at:
                assert store.get(b"key-0") is None
            steps += 1

        workload.disk.observer = read
        store.put_many([(b"new-0", b"n" * 50), (b"new-1", b"m")])
        workload.disk.observer = None
        audit(store)
        assert store.get(b"key-0") is None and store.get(b"new-0") == b"n" * 50
        again = open_simulated(workload.disk.survivor(), GEOMETRY, evict=True)
        audit(again, recovered=True)
        assert again.get(b"new-0") == b"n" * 50 and again.get(b"key-0") is None


def test_a_value_deleted_while_a_reader_finds_it_damaged_stays_deleted() -> None:
    for step in range(6):
        workload = Workload(GEOMETRY)
        store = workload.recorder.store
        assert store is not None
        store.put(b"key", b"v" * 100)
        scramble(workload, b"key")
        steps = 0

        def read(kind: str, label: str, at: int = step, store: Store = store) -> None:
            nonlocal steps
            if steps == at:
                assert store.get(b"key") is None
            steps += 1

        workload.disk.observer = read
        store.delete(b"key")
        workload.disk.observer = None
        store.put(b"key", b"new")
        store.flush()
        audit(store)
        again = open_simulated(workload.disk.survivor(), GEOMETRY)
        audit(again, recovered=True)
        assert again.get(b"key") == b"new"


def test_a_drop_whose_record_met_a_full_disk_does_not_come_back_after_a_delete() -> None:
    """A value that could not be read was dropped; its record was lost when the journal met
    ENOSPC; `delete` then found nothing to delete; after a crash the value was there again."""
    workload = Workload(GEOMETRY)
    store = workload.recorder.store
    assert store is not None
    store.put(b"dropped", b"x" * 100)
    workload.disk.faults = FaultPlan(Fault("read", 1, errno.EIO, persistent=True))
    assert store.get(b"dropped") is None
    workload.disk.faults = FaultPlan(
        Fault("write", 1, errno.ENOSPC, persistent=True, label="index.log")
    )
    assert not workload.put(b"other")
    workload.disk.faults = None
    assert store.delete(b"dropped") is False
    again = open_simulated(workload.disk.survivor(), GEOMETRY)
    assert again.get(b"dropped") is None


def test_two_values_whose_slots_were_swapped_are_misses() -> None:
    workload = Workload(GEOMETRY)
    store = workload.recorder.store
    assert store is not None
    store.put_many([(b"a", b"A" * 4096), (b"b", b"B" * 4096), (b"c", b"C" * 4096)])
    store.close()
    data = workload.disk.read_file("containers/0000.bin")
    first, second = data.find(b"A" * 4096), data.find(b"B" * 4096)
    swapped = bytearray(data)
    swapped[first : first + 4096], swapped[second : second + 4096] = b"B" * 4096, b"A" * 4096
    workload.disk.write_file("containers/0000.bin", bytes(swapped))
    again = open_simulated(workload.disk.survivor(), GEOMETRY)
    assert again.get_many([b"a", b"b", b"c"]) == [None, None, b"C" * 4096]
    audit(again)
    assert again.stats().corrupt == 2


def scribbled_read(mode: str, when: str) -> tuple[Store, int]:
    """Read many values into aligned buffers that somebody else writes to meanwhile.

    Returns
    -------
    tuple
        (store, reads that went to the device again).
    """
    geometry = Geometry(4096, 1 << 18, 1)
    workload = Workload(geometry, io_mode=mode)
    store = workload.recorder.store
    assert store is not None
    keys = [b"%d" % number for number in range(60)]
    store.put_many([(key, key * 1000) for key in keys])
    memory = memoryview(AlignedBuffer(4096 * len(keys)))
    seen: list[str] = []

    def scribble(kind: str, label: str) -> None:
        seen.append(kind)
        # A first byte in every buffer: also of those that a transfer has just filled.
        if kind == when:
            memory[::4096] = bytes([len(seen) % 251]) * len(keys)

    workload.disk.observer = scribble
    buffers = [memory[at : at + 4096] for at in range(0, len(memory), 4096)]
    lengths = store.get_many_into(keys, buffers)
    workload.disk.observer = None
    assert lengths == [len(key) * 1000 for key in keys]
    assert store.get_many(keys) == [key * 1000 for key in keys]
    return store, seen.count("read") - len(keys)


@pytest.mark.parametrize("mode", ["direct", "buffered"])
@pytest.mark.parametrize("when", ["submit", "reap", "read"])
def test_scribbling_into_the_callers_buffers_never_costs_an_entry(mode: str, when: str) -> None:
    """A value read straight into the caller's buffer was verified there. A buffer shared with a
    process that wrote to it failed the checksum, was read again into the same place, failed again,
    and the entry was dropped from the disk: 63 of 100 sound values were gone for good. Now the
    second read goes into private memory."""
    store, again = scribbled_read(mode, when)
    found = store.stats()
    assert (found.corrupt, found.quarantined, len(store)) == (0, 0, 60)
    audit(store)
    if when == "submit":
        # Between a transfer's end and its check the next ones are submitted: there it hits.
        assert again > 0
