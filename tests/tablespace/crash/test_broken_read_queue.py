"""A read queue that breaks with transfers in flight: their memory is never let go."""

from __future__ import annotations

import errno

import pytest
from tablespace.io.read_batch import ReadBatch
from tablespace.layout import Geometry
from tablespace.store import Store
from tablespace.testing import Disk, Fault, FaultPlan
from tablespace.testing.crash import open_simulated
from tablespace.testing.model import audit

from tablespace import reading

GEOMETRY = Geometry(4096, 16384, 2)
KEYS = [b"key-%d" % number for number in range(4)]
VALUE = b"v" * 4096


def filled(seed: int) -> tuple[Disk, Store]:
    disk = Disk(seed=seed)
    store = open_simulated(disk, GEOMETRY)
    store.put_many([(key, VALUE) for key in KEYS])
    return disk, store


def break_the_queue(disk: Disk, store: Store, kind: str) -> list[bytearray]:
    """Read all keys through a queue that breaks; return the buffers the reads were to fill."""
    buffers = [bytearray(4096) for _ in KEYS]
    disk.faults = FaultPlan(Fault(kind, 1, errno.EIO))
    with pytest.raises(OSError):
        store.get_many_into(KEYS, buffers)
    disk.faults = None
    return buffers


@pytest.mark.parametrize("kind", ["reap", "submit"])
def test_the_callers_buffers_stay_held_while_transfers_are_in_flight(kind: str) -> None:
    """The batch was finished like any other: the caller's buffers were released and the pins
    dropped with four reads in flight. The kernel then wrote into memory that was somebody
    else's by then, and into it came whatever the slots held by then."""
    disk, store = filled(1)
    buffers = break_the_queue(disk, store, kind)
    assert store._readers.lending.buried[0][0].queue.in_flight == len(KEYS)
    for buffer in buffers:
        with pytest.raises(BufferError):
            buffer.extend(bytes(100_000))
    # Their slots stay pinned: deleted, they are in limbo, not free.
    assert store.delete_many(KEYS) == len(KEYS)
    found = store.stats()
    assert (found.limbo, found.live) == (len(KEYS), 0)
    audit(store)
    # The store goes on with another queue, and its close does not wait for the dead one.
    store.put_many([(b"new-%d" % number, VALUE) for number in range(4)])
    assert store.get_many([b"new-%d" % number for number in range(4)]) == [VALUE] * 4
    store.close()
    assert disk.violations == []
    again = open_simulated(disk.survivor(), GEOMETRY)
    audit(again, recovered=True)
    assert len(again) == 4


def test_reads_broken_more_often_than_there_are_queues_leave_one_for_the_next() -> None:
    disk, store = filled(2)
    for _ in range(12):
        break_the_queue(disk, store, "reap")
    assert store.get_many(KEYS) == [VALUE] * 4


class FinishedAtOnce(ReadBatch):
    """The fault: a broken batch is finished like any other."""

    def abandon(self) -> None:
        self.finish()


def test_buffers_let_go_in_flight_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "ReadBatch", FinishedAtOnce)
    disk, store = filled(3)
    buffers = break_the_queue(disk, store, "reap")
    buffers[0].extend(bytes(100_000))
    assert store.delete_many(KEYS) == 4 and store.stats().limbo == 0
