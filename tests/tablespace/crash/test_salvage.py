"""recover="salvage": what may come back after a damaged journal, and what may not."""

from __future__ import annotations

import pytest
from tablespace.journal import JOURNAL_NAME
from tablespace.layout import Geometry
from tablespace.testing import Disk, Workload
from tablespace.testing.crash import open_simulated
from tablespace.testing.model import audit

GEOMETRY = Geometry(4096, 16384, 2)


def deleted_then_damaged(op: bytes) -> tuple[Disk, int, int]:
    """Return a killed process's disk and where, in its journal, the line of `op` stands."""
    workload = Workload(GEOMETRY)
    store = workload.recorder.store
    assert store is not None
    store.put(b"deleted", b"D" * 500)
    store.put(b"changed", b"old" * 100)
    store.put(b"kept", b"K" * 500)
    store.snapshot()
    store.delete(b"deleted")
    store.put(b"changed", b"new" * 100)
    store.put(b"later", b"L" * 500)
    text = workload.disk.read_file(JOURNAL_NAME)
    start = text.index(b'{"seq":', text.index(op) - 40)
    return workload.disk, start, text.index(b"\n", start)


@pytest.mark.parametrize(
    "op, key, gone",
    [(b'"op":"delete"', b"deleted", b"D" * 500), (b'"op":"put"', b"changed", b"old" * 100)],
)
def test_one_changed_byte_brings_nothing_back(op: bytes, key: bytes, gone: bytes) -> None:
    """A key whose delete record was damaged was there again after a salvage. What is left of the
    line names the key and its place, and either is enough to let go of it."""
    disk, start, end = deleted_then_damaged(op)
    back = []
    for at in range(start, end + 1):
        damaged = disk.survivor()
        text = bytearray(damaged.read_file(JOURNAL_NAME))
        text[at] ^= 1
        damaged.write_file(JOURNAL_NAME, bytes(text))
        store = open_simulated(damaged, GEOMETRY, recover_mode="salvage")
        audit(store, recovered=True)
        if store.get(key) == gone:
            back.append(at)
        assert store.get(b"later") == b"L" * 500 and store.get(b"deleted") is None
    # Of a put only the key tells which older value to let go: its member is 23 bytes long.
    assert len(back) <= (0 if op == b'"op":"delete"' else 23), [at - start for at in back]


@pytest.mark.parametrize("verify", [True, False])
def test_a_slot_used_again_by_a_lost_record_gives_no_wrong_bytes(verify: bool) -> None:
    """With verify=False nothing looked at the entries that a salvage kept: where the delete of a
    key and the put into its slot were both lost, the key had the other's bytes."""
    workload = Workload(GEOMETRY)
    store = workload.recorder.store
    assert store is not None
    store.put(b"first", b"1" * 4096)
    store.put(b"other", b"2" * 4096)
    where = store.stat(b"first")
    store.delete(b"first")
    store.put(b"second", b"3" * 4096)
    store.put(b"third", b"4" * 4096)
    used = {key: store.stat(key) for key in (b"second", b"third")}
    assert where is not None
    again = [
        key
        for key, entry in used.items()
        if entry is not None and (entry.container, entry.slot) == (where.container, where.slot)
    ]
    assert again
    store.put(b"last", b"5")
    disk = workload.disk.survivor()
    text = disk.read_file(JOURNAL_NAME)
    start = text.index(b'{"seq":', text.index(b'"op":"delete"') - 40)
    end = text.index(b'{"seq":', text.index(b"third".hex().encode()))
    disk.write_file(JOURNAL_NAME, text[:start] + b"\0" * (end - start) + text[end:])
    store = open_simulated(disk, GEOMETRY, recover_mode="salvage", verify=verify)
    audit(store, recovered=True)
    assert store.get(b"first") is None
    assert store.get(b"other") == b"2" * 4096 and store.get(b"last") == b"5"
    assert store.stats().recovery.unverified == (0 if verify else 1)
    assert store.stats().recovery.damage
    # The next opening finds no damage, and needs none to answer right.
    store = open_simulated(disk.survivor(), GEOMETRY, verify=verify)
    assert store.get(b"first") is None and store.get(b"other") == b"2" * 4096
