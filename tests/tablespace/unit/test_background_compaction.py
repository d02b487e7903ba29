"""A journal that has reached its bound is compacted in the background, while puts go on."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable

import pytest
from tablespace.layout import Geometry
from tablespace.store import Store
from tablespace.testing import Disk, Fault, FaultPlan
from tablespace.testing.crash import open_simulated
from tablespace.testing.model import audit

from tablespace import compaction

GEOMETRY = Geometry(4096, 16384, 2)


@pytest.fixture
def small_bound(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(compaction, "MIN_JOURNAL_BYTES", 2000)
    return 2000


def put_until(store: Store, condition: Callable[[], object]) -> None:
    for number in range(1000):
        store.put(b"key-%d" % (number % 4), b"%d" % number)
        store._compactor.wait()
        if condition():
            return
    raise AssertionError("nothing was compacted")


def test_the_journal_stays_within_its_bound(small_bound: int) -> None:
    disk = Disk()
    store = open_simulated(disk, GEOMETRY)
    put_until(store, lambda: store.stats().compactions == 3)
    stats = store.stats()
    assert stats.journal_bytes < small_bound + 400
    assert stats.journal_bytes == store._committer.journal.size_bytes
    values = {key: store.get(key) for key in store}
    audit(store)
    again = open_simulated(disk.survivor(), GEOMETRY)
    assert {key: again.get(key) for key in again} == values and len(values) == 4


def test_one_that_fails_is_said_and_tried_again_later(
    small_bound: int, caplog: pytest.LogCaptureFixture
) -> None:
    disk = Disk()
    store = open_simulated(disk, GEOMETRY)
    disk.faults = FaultPlan(Fault("write", 1, errno.ENOSPC, label="index.snapshot"))
    with caplog.at_level(logging.WARNING, "tablespace"):
        put_until(store, lambda: store._compactor.problem)
    assert "compaction failed" in caplog.text
    failed_at = store.stats().journal_bytes
    assert (store.stats().compactions, store.stats().failed) == (0, None)
    put_until(store, lambda: store.stats().compactions)
    # Not at once: a disk that is full now is full at the next put as well.
    assert store._compactor._not_before >= failed_at * 5 // 4
    store.close()


def test_a_region_replaced_under_its_writer_fails_the_store(small_bound: int) -> None:
    disk = Disk()
    store = open_simulated(disk, GEOMETRY)
    other = disk.make_file("region.json.other")
    root = disk.directories[0]
    root["region.json"] = other
    put_until(store, lambda: store.stats().failed)
    assert "removed or replaced" in str(store.stats().failed)
