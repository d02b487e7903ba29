"""Both orders of each pair of operations that meet, forced by stopping one at a disk operation."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tablespace.layout import Geometry
from tablespace.store import Store
from tablespace.testing import Choice, Disk, DiskState
from tablespace.testing.crash import open_simulated
from tablespace.testing.model import audit
from tablespace.testing.workload import fresh_region

import tablespace

GEOMETRY = Geometry(4096, 16384, 2)
KEYS = [b"key-%d" % number for number in range(8)]
PATIENCE_S = 30


class Gate:
    """Stops the first thread that is about to do an operation of the disk, until it is opened."""

    def __init__(self, disk: Disk, kind: str, label: str) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()
        self.wanted = (kind, label)
        disk.observer = self.look

    def look(self, kind: str, label: str) -> None:
        if self.reached.is_set() or kind != self.wanted[0] or not label.startswith(self.wanted[1]):
            return
        self.reached.set()
        assert self.opened.wait(PATIENCE_S)

    def wait(self) -> None:
        assert self.reached.wait(PATIENCE_S), f"nothing came to {self.wanted}"

    def open(self) -> None:
        self.opened.set()


class Call(threading.Thread):
    """A call in a thread of its own, and what it returned or raised."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self.work = work
        self.outcome: Any = "unfinished"
        self.start()

    def run(self) -> None:
        try:
            self.outcome = self.work()
        except Exception as error:
            self.outcome = error

    def result(self) -> Any:
        self.join(PATIENCE_S)
        assert not self.is_alive(), "the call hangs"
        return self.outcome

    def has_queued(self) -> bool:
        """Say whether it stands in the commit queue: its last Python frame is the way there."""
        frame = sys._current_frames().get(self.ident or 0)
        return (
            frame is not None
            and frame.f_code.co_name == "run"
            and "commit" in (frame.f_code.co_filename)
        )


def until(condition: Callable[[], object]) -> None:
    """Wait for a state that another thread reaches for certain."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "the other thread did not get there"
        time.sleep(0.0005)


def fill(store: Store) -> dict[bytes, bytes]:
    values = {key: key * 100 for key in KEYS}
    for key, value in values.items():
        store.put(key, value)
    return values


def durable(disk: Disk, evict: bool = False) -> Store:
    """Open what is left when the power fails now and nothing unsynced reached the disk."""
    state = DiskState(disk)
    state.advance_to(disk.clock)
    return open_simulated(state.image(Choice(frozenset())), GEOMETRY, evict=evict)


@pytest.fixture
def disk() -> Iterator[Disk]:
    made = fresh_region(GEOMETRY, evict=True)
    yield made
    assert made.violations == []


# get and evict.


def test_a_get_under_way_keeps_its_slot_from_an_eviction(disk: Disk) -> None:
    store = open_simulated(disk, GEOMETRY, evict=True)
    values = fill(store)
    gate = Gate(disk, "read", "containers/")
    reading = Call(lambda: store.get(KEYS[0]))
    gate.wait()
    # Twice as many as there are slots: every other slot changes hands.
    for number in range(16):
        store.put(b"new-%d" % number, b"n" * 4096)
    gate.open()
    assert reading.result() == values[KEYS[0]]
    audit(store)
    store.close()


def test_a_get_of_a_victim_is_served_until_its_record_is_durable(disk: Disk) -> None:
    store = open_simulated(disk, GEOMETRY, evict=True)
    values = fill(store)
    gate = Gate(disk, "sync", "index.log")
    putting = Call(lambda: store.put(b"new", b"value"))
    gate.wait()
    assert store.get(KEYS[0]) == values[KEYS[0]]
    assert store.get(b"new") is None
    gate.open()
    assert putting.result() is None
    assert store.get(b"new") == b"value"
    assert len(store) == len(KEYS) and len([key for key in KEYS if key in store]) == 7
    audit(store)
    store.close()


# put and flush.


def test_a_flush_behind_a_put_returns_when_the_put_is_durable(disk: Disk) -> None:
    store = open_simulated(disk, GEOMETRY)
    gate = Gate(disk, "sync", "containers/")
    putting = Call(lambda: store.put(b"k", b"v"))
    gate.wait()
    flushing = Call(lambda: (store.flush(), b"k" in durable(disk)))
    until(flushing.has_queued)
    assert b"k" not in store and flushing.outcome == "unfinished"
    gate.open()
    assert putting.result() is None
    assert flushing.result() == (None, True)
    store.close()


def test_a_put_behind_a_flush_is_durable_when_it_returns(disk: Disk) -> None:
    store = open_simulated(disk, GEOMETRY)
    store.put(b"bad", b"value")
    node = disk.find("containers/0000.bin")
    assert node is not None
    disk.damage(node, 0, b"x")
    assert store.get(b"bad") is None
    # The record of the dropped value is what there is to flush.
    gate = Gate(disk, "sync", "index.log")
    flushing = Call(store.flush)
    gate.wait()
    putting = Call(lambda: (store.put(b"k", b"v"), durable(disk).get(b"k")))
    until(putting.has_queued)
    gate.open()
    assert flushing.result() is None
    assert putting.result() == (None, b"v")
    assert set(durable(disk)) == {b"k"}
    store.close()


# close and calls in flight.


@pytest.mark.parametrize("kind", ["put", "get"])
def test_a_close_waits_for_the_call_in_flight(disk: Disk, kind: str) -> None:
    store = open_simulated(disk, GEOMETRY)
    store.put(b"old", b"value")
    gate = Gate(disk, "sync" if kind == "put" else "read", "containers/")
    works: dict[str, Callable[[], object]] = {
        "put": lambda: store.put(b"k", b"v"),
        "get": lambda: store.get(b"old"),
    }
    call = Call(works[kind])
    gate.wait()
    closing = Call(store.close)
    until(lambda: store._closed)
    assert not any(device.closed for device in store._devices)
    gate.open()
    assert call.result() == (None if kind == "put" else b"value")
    assert closing.result() is None
    assert set(durable(disk)) == ({b"old", b"k"} if kind == "put" else {b"old"})


def test_a_call_behind_a_close_is_refused_at_once(disk: Disk) -> None:
    store = open_simulated(disk, GEOMETRY)
    store.put(b"old", b"value")
    gate = Gate(disk, "write", "index.snapshot")
    closing = Call(store.close)
    gate.wait()
    for work in (lambda: store.put(b"k", b"v"), lambda: store.get(b"old"), store.flush):
        with pytest.raises(tablespace.ClosedError):
            work()
    gate.open()
    assert closing.result() is None
    assert set(durable(disk)) == {b"old"}


# snapshot and append.


def test_an_append_during_a_snapshot_is_carried_into_the_new_journal(disk: Disk) -> None:
    store = open_simulated(disk, GEOMETRY)
    store.put(b"before", b"1")
    gate = Gate(disk, "write", "index.snapshot")
    snapping = Call(store.snapshot)
    gate.wait()
    store.put(b"during", b"2")
    assert store.delete(b"before")
    assert set(durable(disk)) == {b"during"}
    gate.open()
    assert snapping.result() is None
    assert set(durable(disk)) == {b"during"}
    store.close()


def test_a_snapshot_behind_an_append_holds_its_record(disk: Disk) -> None:
    store = open_simulated(disk, GEOMETRY)
    gate = Gate(disk, "sync", "index.log")
    putting = Call(lambda: store.put(b"k", b"v"))
    gate.wait()
    snapping = Call(store.snapshot)
    until(snapping.has_queued)
    assert b'"key"' not in disk.read_file("index.snapshot.json")
    gate.open()
    assert putting.result() is None and snapping.result() is None
    again = durable(disk)
    report = again.stats().recovery
    assert report is not None
    assert (report.snapshot_entries, report.journal_records) == (1, 0)
    assert again.get(b"k") == b"v"
    store.close()
