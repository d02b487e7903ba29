"""A disk with no space left: nothing is lost, nothing is left lying, and the region opens."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest
from tablespace.errors import FullError
from tablespace.journal import JOURNAL_NEW_NAME, Journal
from tablespace.layout import Geometry
from tablespace.snapshot import SNAPSHOT_TEMPORARY_NAME
from tablespace.testing import Fault, FaultPlan, SimulatedDirectory, Workload
from tablespace.testing.crash import open_simulated
from tablespace.testing.model import audit, read_all

from tablespace import recovery, snapshot

GEOMETRY = Geometry(4096, 16384, 2)
KEYS = [b"key-%d" % number for number in range(6)]


def full(nth: int = 1, code: int = errno.ENOSPC) -> FaultPlan:
    """No journal and no snapshot can grow; containers have their space already."""
    return FaultPlan(Fault("write", nth, code, persistent=True, label="index."))


def names(workload: Workload) -> list[str]:
    return SimulatedDirectory(workload.disk).list()


def with_a_failed_snapshot(nth: int) -> Workload:
    workload = Workload(GEOMETRY)
    workload.put(*KEYS[:3])
    workload.disk.faults = full(nth)
    assert not workload.snapshot()
    assert isinstance(workload.recorder.failures.pop(), OSError)
    return workload


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_failed_snapshot_leaves_no_temporary_file(nth: int) -> None:
    """Half a snapshot stayed under its temporary name and held the very space that was missing:
    no journal could be written, so the region could not even be opened to delete from it."""
    workload = with_a_failed_snapshot(nth)
    assert SNAPSHOT_TEMPORARY_NAME not in names(workload)
    assert JOURNAL_NEW_NAME not in names(workload)
    workload.disk.faults = None
    assert workload.put(KEYS[3]) and workload.snapshot()
    store = workload.recorder.store
    assert store is not None
    audit(store)


def test_a_temporary_file_left_lying_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = SimulatedDirectory.unlink

    def unlink(self: SimulatedDirectory, name: str) -> None:
        if name != SNAPSHOT_TEMPORARY_NAME:
            real(self, name)

    monkeypatch.setattr(SimulatedDirectory, "unlink", unlink)
    monkeypatch.setattr(snapshot, "put_aside", lambda *_: None)
    assert SNAPSHOT_TEMPORARY_NAME in names(with_a_failed_snapshot(2))


def left_on_a_full_disk(clean: bool, code: int) -> Workload:
    workload = Workload(GEOMETRY)
    workload.put(*KEYS[:4])
    workload.snapshot()
    workload.put(KEYS[4], KEYS[0])
    if clean:
        workload.recorder.call("close")
    workload.disk.locks.clear()
    workload.disk.faults = full(code=code)
    return workload


@pytest.mark.parametrize("clean", [True, False], ids=["closed", "killed"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_region_on_a_full_disk_opens_and_goes_on_when_there_is_room(
    clean: bool, code: int
) -> None:
    """Recovery writes the journal anew; without space for that the region did not open, and
    nothing could be deleted from it to make space."""
    workload = left_on_a_full_disk(clean, code)
    workload.open()
    recorder, store = workload.recorder, workload.recorder.store
    assert store is not None
    audit(store, recovered=True)
    recorder.judge(read_all(store, KEYS), recorder.allowed)
    assert any("full" in note for note in store.stats().recovery.notes)
    assert not workload.put(KEYS[5])
    assert isinstance(recorder.failures.pop(), FullError)
    assert JOURNAL_NEW_NAME not in names(workload)
    workload.disk.faults = None
    assert workload.put(KEYS[5]) and workload.delete(KEYS[1])
    again = open_simulated(workload.disk.survivor(), GEOMETRY)
    recorder.judge(read_all(again, KEYS), recorder.allowed)


def refuse(*_: object) -> Journal:
    raise OSError(errno.ENOSPC, "no journal is kept in place")


def test_an_opening_that_needs_space_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "keep_journal", refuse)
    workload = left_on_a_full_disk(False, errno.ENOSPC)
    with pytest.raises(OSError):
        workload.open()


@pytest.mark.parametrize("lose", [False, True], ids=["killed", "power loss"])
def test_a_torn_tail_on_a_full_disk_is_cut_before_anything_follows_it(lose: bool) -> None:
    """The journal in place is cut at the last sound record and synced: what is appended later
    stands right behind it."""

    def cut_short(workload: Workload) -> None:
        data = workload.disk.read_file("index.log")
        workload.disk.write_file("index.log", data.rstrip(b"\n")[:-20])

    workload = opened_when_full(cut_short)
    assert workload.put(KEYS[5])
    recorder = workload.recorder
    if lose:
        workload.power_loss(1)
    else:
        again = open_simulated(workload.disk.survivor(), GEOMETRY)
        recorder.judge(read_all(again, [KEYS[5]]), recorder.allowed)
        assert again.get(KEYS[5]) is not None


def opened_when_full(change: Callable[[Workload], None]) -> Workload:
    workload = Workload(GEOMETRY)
    workload.put(*KEYS[:2])
    workload.put(KEYS[2])
    change(workload)
    # The last put is torn off: it may be there or not from now on.
    recorder = workload.recorder
    recorder._date({**recorder.allowed, KEYS[2]: frozenset({None})})
    workload.disk.locks.clear()
    workload.disk.faults = full()
    workload.open()
    workload.disk.faults = None
    store = recorder.store
    assert store is not None and store.stats().recovery.torn_bytes > 0
    return workload
