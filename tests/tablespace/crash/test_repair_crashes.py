"""A repair is interrupted: by the power at every event, by the n-th error of the disk."""

from __future__ import annotations

import errno
import itertools

import pytest
from tablespace.check import check_directory
from tablespace.errors import TablespaceError
from tablespace.layout import Geometry
from tablespace.testing import Disk, Fault, FaultPlan, Hunt, SimulatedDirectory, Workload
from tablespace.testing.crash import open_simulated
from tablespace.testing.model import audit, read_all
from tablespace.testing.workload import fresh_region

GEOMETRY = Geometry(4096, 16384, 2)
KEYS = [b"key-%d" % number for number in range(6)]


def worn(seed: int = 0) -> Workload:
    """A region with a quarantined slot, damaged values nobody has read, and a live journal."""
    workload = Workload(GEOMETRY, disk=fresh_region(GEOMETRY), seed=seed)
    for key in KEYS:
        workload.put(key)
    for key in KEYS:
        if workload.spoil(key, kind="corrupt"):
            break
    workload.flush()
    workload.snapshot()
    workload.put(*KEYS[2:5])
    for key in KEYS:
        workload.damage(key, seen=False)
        if len([each for each in workload.disk.trace if each.kind == "damage"]) == 2:
            break
    return workload


@pytest.mark.parametrize("heal", [False, True], ids=["still bad", "good again"])
def test_power_loss_at_every_event_of_a_repair(heal: bool) -> None:
    images = 0
    for seed in range(2):
        workload = worn(seed)
        start = workload.disk.clock
        report = workload.repair(heal)
        # Before sectors get well, all values are read: what was damaged is dropped by then.
        assert len(report.damaged_values) == (0 if heal else 2)
        assert len(report.restored) == int(heal)
        workload.put(*KEYS)
        workload.put(*KEYS)
        images += Hunt(workload.recorder, GEOMETRY, start=start, limit=12, seed=seed).run().images
    assert images > 150


def repair(disk: Disk) -> None:
    check_directory(SimulatedDirectory(disk), repair=True, io_mode="buffered", io_engine="posix")


@pytest.mark.parametrize("persistent", [False, True], ids=["once", "persistent"])
@pytest.mark.parametrize("error", ["EIO", "ENOSPC"])
def test_the_nth_error_of_a_repair_leaves_a_region_that_opens(
    error: str, persistent: bool
) -> None:
    workload = worn()
    recorder, before = workload.recorder, workload.disk
    lost = {key: values | {None} for key, values in recorder.allowed.items()}
    for nth in itertools.count(1):
        disk = before.survivor(nth)
        plan = FaultPlan(Fault("", nth, getattr(errno, error), persistent=persistent))
        disk.faults = plan
        try:
            repair(disk)
        except (OSError, TablespaceError):
            pass
        disk.faults = None
        store = open_simulated(disk.survivor(), GEOMETRY)
        audit(store, recovered=True)
        recorder.judge(read_all(store, recorder.keys), lost)
        assert not disk.violations
        if plan.met == 0:
            break
        assert nth < 400
    assert nth > 20
    assert read_all(store, recorder.keys).keys() >= set(KEYS)
