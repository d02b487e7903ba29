"""Groups larger than the queue is deep, and what becomes of them when the queue breaks midway."""

from __future__ import annotations

import errno

import pytest
from tablespace._core.aligned_buffer import AlignedBuffer
from tablespace.errors import TablespaceError
from tablespace.layout import Geometry
from tablespace.store import Store
from tablespace.testing import Disk, Fault, FaultPlan
from tablespace.testing.crash import open_simulated
from tablespace.testing.model import audit

BLOCKS = 200
GEOMETRY = Geometry(4096, 1 << 20, 2)


def items(aligned: bool) -> list[tuple[bytes, memoryview]]:
    """Values in memory that a transfer can use as it is, or one byte beside it."""
    buffer = memoryview(AlignedBuffer((BLOCKS + 1) * 4096))
    made = []
    for number in range(BLOCKS):
        start = number * 4096 + (not aligned)
        part = buffer[start : start + 4096]
        part[:] = b"%4d" % number * 1024
        made.append((b"key-%d" % number, part))
    return made


def opened(disk: Disk) -> Store:
    return open_simulated(disk, GEOMETRY, io_mode="direct")


@pytest.mark.parametrize("aligned", [True, False])
def test_a_group_larger_than_the_queue_is_stored_whole(aligned: bool) -> None:
    disk = Disk(seed=3)
    store = opened(disk)
    values = items(aligned)
    assert store.put_many(values) == [True] * BLOCKS
    assert store.stats().groups == 1
    assert store.get_many([key for key, _ in values]) == [bytes(value) for _, value in values]
    assert disk.violations == []


@pytest.mark.parametrize("kind", ["submit", "reap"])
@pytest.mark.parametrize("aligned", [True, False])
def test_a_queue_that_breaks_anywhere_in_a_group_fails_the_store_and_loses_nothing(
    kind: str, aligned: bool
) -> None:
    values = items(aligned)
    nth = 0
    while True:
        nth += 1
        disk = Disk(seed=nth)
        store = opened(disk)
        store.put(b"old", b"value")
        disk.faults = plan = FaultPlan(Fault(kind, nth, errno.EIO))
        try:
            stored = store.put_many(values)
        except (OSError, TablespaceError):
            assert store.stats().failed is not None
        else:
            assert stored == [True] * BLOCKS
        disk.faults = None
        if not plan.met:
            break
        store.close()
        again = opened(disk.survivor())
        audit(again, recovered=True)
        assert set(again) in ({b"old"}, {b"old", *(key for key, _ in values)})
        assert again.get(b"old") == b"value"
    assert nth > 5
