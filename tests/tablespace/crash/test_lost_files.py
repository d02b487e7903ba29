"""Files of a region that are lost whole, and a failed append that cannot be taken back."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest
from tablespace.errors import CorruptionError, FailedError, TablespaceError
from tablespace.layout import Geometry
from tablespace.testing import Disk, Fault, FaultPlan
from tablespace.testing.crash import open_simulated
from tablespace.testing.model import audit

GEOMETRY = Geometry(4096, 16384, 2)
VALUES = {b"key-%d" % number: b"%d" % number * 100 for number in range(5)}


def filled() -> Disk:
    disk = Disk()
    store = open_simulated(disk, GEOMETRY)
    for key, value in VALUES.items():
        store.put(key, value)
    return disk.survivor()


def lose(disk: Disk, *names: str) -> None:
    for name in names:
        assert disk.directories[0].pop(name, None) is not None, name


def damage(disk: Disk, name: str) -> None:
    content = disk.read_file(name)
    disk.write_file(name, content[:20] + b"#" + content[21:])


@pytest.mark.parametrize("how", [lose, damage])
def test_a_lost_region_file_is_told_by_the_journal_under_salvage(
    how: Callable[[Disk, str], None],
) -> None:
    disk = filled()
    how(disk, "region.json")
    with pytest.raises(TablespaceError):
        open_simulated(disk.survivor(), GEOMETRY)
    store = open_simulated(disk, GEOMETRY, recover_mode="salvage")
    assert {key: store.get(key) for key in store} == VALUES
    audit(store, recovered=True)
    store.close()
    assert len(open_simulated(disk, GEOMETRY)) == len(VALUES)


def test_without_any_snapshot_the_journal_alone_is_salvaged() -> None:
    disk = filled()
    lose(disk, "index.snapshot.json")
    disk.directories[0].pop("index.snapshot.json.bak", None)
    with pytest.raises(CorruptionError, match=r"index\.snapshot\.json"):
        open_simulated(disk.survivor(), GEOMETRY)
    store = open_simulated(disk, GEOMETRY, recover_mode="salvage")
    assert {key: store.get(key) for key in store} == VALUES
    report = store.stats().recovery
    assert report is not None and (report.source, report.damaged_lines) == ("none", 1)


def test_an_append_that_fails_and_cannot_be_cut_fails_the_store() -> None:
    """Its lines may reach the disk later, over slots that others have by then."""
    disk = filled()
    store = open_simulated(disk, GEOMETRY)
    disk.faults = FaultPlan(
        Fault("write", 1, errno.ENOSPC, label="index.log", persistent=True),
        Fault("length", 1, errno.EIO, label="index.log"),
    )
    with pytest.raises(FailedError):
        store.put(b"new", b"value")
    disk.faults = None
    assert store.get(b"new") is None
    with pytest.raises(FailedError):
        store.delete(b"key-0")
    store.close()
    again = open_simulated(disk.survivor(), GEOMETRY)
    audit(again, recovered=True)
    assert set(VALUES) <= set(again) <= {*VALUES, b"new"}
