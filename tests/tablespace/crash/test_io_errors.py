"""The n-th operation fails, for n = 1, 2, ... until no fault is met (SQLite's way).

Each error comes once or stays, hits the operations of a run or the opening of a region; then the
run goes on, the process dies, the power fails.
"""

from __future__ import annotations

import errno
import itertools

import pytest
from tablespace.errors import FailedError, TablespaceError
from tablespace.layout import Geometry
from tablespace.testing import Disk, Fault, FaultPlan, Hunt, Workload
from tablespace.testing.crash import open_simulated
from tablespace.testing.model import Moment, Recorder, audit, read_all
from tablespace.testing.workload import fresh_region

GEOMETRY = Geometry(4096, 8192, 2)
KEYS = [b"key-%d" % number for number in range(6)]
ERRORS = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC, "EINTR": errno.EINTR, "short": 0}
KINDS = (
    "read",
    "write",
    "sync",
    "length",
    "open",
    "rename",
    "link",
    "unlink",
    "names-sync",
    "submit",
    "reap",
)
# EINTR and short counts are what transfers and syncs answer; the queue's own calls handle EINTR.
FAULTS = [
    *itertools.product(("read", "write"), ERRORS),
    *itertools.product(("sync",), ("EIO", "ENOSPC", "EINTR")),
    *itertools.product(KINDS[3:], ("EIO", "ENOSPC")),
]


def some_operations(workload: Workload) -> None:
    """Fill, overwrite, read, delete, compact, evict; every operation may fail."""
    recorder = workload.recorder
    workload.put(KEYS[0], KEYS[1], KEYS[2])
    workload.put(KEYS[0])
    workload.snapshot()
    recorder.get_many(KEYS[:3])
    workload.put(KEYS[3], KEYS[4])
    workload.delete(KEYS[1])
    workload.put(KEYS[5])
    workload.snapshot()
    workload.put(KEYS[0], KEYS[2])
    recorder.get_many(KEYS)


def judge_what_is_left(workload: Workload, seed: int) -> int:
    """Judge the live store, a killed process's disk and some power losses; return images."""
    recorder, disk = workload.recorder, workload.disk
    disk.faults = None
    store = recorder.store
    assert store is not None
    audit(store)
    recorder.judge(read_all(store, recorder.keys), recorder.allowed)
    judge_survivor(recorder, disk, workload.evict)
    report = Hunt(recorder, GEOMETRY, limit=4, nested_limit=0, stride=25, seed=seed).run()
    return report.images


def judge_survivor(recorder: Recorder, disk: Disk, evict: bool) -> None:
    store = open_simulated(disk.survivor(), GEOMETRY, evict=evict)
    audit(store, recovered=True)
    recorder.judge(read_all(store, recorder.keys), recorder.allowed)
    store.close()


@pytest.fixture(scope="module")
def region() -> Disk:
    return fresh_region(GEOMETRY, evict=True)


@pytest.mark.parametrize("persistent", [False, True], ids=["once", "persistent"])
@pytest.mark.parametrize("kind, error", FAULTS)
def test_the_nth_error_of_a_run_breaks_no_promise(
    kind: str, error: str, persistent: bool, region: Disk
) -> None:
    images = 0
    for nth in itertools.count(1):
        workload = Workload(GEOMETRY, disk=region.survivor(nth), evict=True, seed=nth)
        plan = FaultPlan(
            Fault(kind, nth, ERRORS[error], short=error == "short", persistent=persistent)
        )
        workload.disk.faults = plan
        try:
            some_operations(workload)
            images += judge_what_is_left(workload, nth)
        except BaseException as problem:
            problem.args = (f"{kind} {nth} {error} persistent={persistent}: {problem}",)
            raise
        assert not [text for text in workload.disk.violations if "in flight" not in text]
        if plan.met == 0:
            break
        assert nth < 400
    print(f"{kind} {error}: {nth} runs, {images} images")


@pytest.mark.parametrize("persistent", [False, True], ids=["once", "persistent"])
@pytest.mark.parametrize("error", ["EIO", "ENOSPC", "EINTR"])
def test_the_nth_error_of_an_opening_leaves_a_region_that_opens(
    error: str, persistent: bool
) -> None:
    workload = Workload(GEOMETRY, evict=True)
    some_operations(workload)
    workload.put(KEYS[1])
    recorder, before = workload.recorder, workload.disk
    for nth in itertools.count(1):
        disk = before.survivor(nth)
        plan = disk.faults = FaultPlan(Fault("", nth, ERRORS[error], persistent=persistent))
        try:
            open_simulated(disk, GEOMETRY, evict=True)
        except (OSError, TablespaceError):
            pass
        disk.faults = None
        judge_survivor(recorder, disk, True)
        # A power loss right after the failure finds the same.
        after = Recorder(disk, evicts=True)
        after.ever, after.moments = recorder.ever, [Moment(0, recorder.allowed)]
        Hunt(after, GEOMETRY, limit=6, nested_limit=0, start=max(0, disk.clock - 1)).run()
        if plan.met == 0:
            break
        assert nth < 400
    assert nth > 5


@pytest.mark.parametrize("error", ["EIO", "ENOSPC"])
def test_the_nth_error_of_a_creation_leaves_a_directory_that_can_be_created(error: str) -> None:
    for nth in itertools.count(1):
        disk = Disk(seed=nth)
        plan = disk.faults = FaultPlan(Fault("", nth, ERRORS[error]))
        try:
            open_simulated(disk, GEOMETRY)
        except (OSError, TablespaceError):
            pass
        disk.faults = None
        store = open_simulated(disk.survivor(), GEOMETRY)
        store.put(b"key", b"value")
        audit(store)
        if plan.met == 0:
            break
    assert nth > 10


def test_a_failed_sync_makes_the_store_read_only_and_keeps_reads(region: Disk) -> None:
    workload = Workload(GEOMETRY, disk=region.survivor(), evict=True)
    workload.put(KEYS[0])
    workload.disk.faults = FaultPlan(Fault("sync", 1, errno.EIO))
    assert not workload.put(KEYS[1]) and not workload.put(KEYS[2])
    assert not workload.delete(KEYS[0])
    assert all(isinstance(error, FailedError) for error in workload.recorder.failures)
    cause = workload.recorder.failures[-1].__cause__
    assert isinstance(cause, OSError) and cause.errno == errno.EIO
    assert workload.recorder.get_many([KEYS[0]])[KEYS[0]] is not None


@pytest.mark.parametrize("nth", range(1, 6))
def test_a_step_of_the_queue_whose_sync_fails_may_have_evicted_what_reads_still_find(
    region: Disk, nth: int
) -> None:
    """The step drops what was queued and raises nothing; the oracle must know all the same."""
    workload = Workload(GEOMETRY, disk=region.survivor(), evict=True)
    workload.put(*KEYS[:4])
    workload.put(KEYS[4], KEYS[5], durability="interval")
    workload.disk.faults = FaultPlan(Fault("sync", nth, errno.EIO))
    workload.step()
    workload.disk.faults = None
    store = workload.recorder.store
    assert store is not None
    assert (store.stats().failed is not None) == (store.stats().queue_dropped > 0)
    workload.recorder.get_many(KEYS)
    workload.crash()
    workload.recorder.get_many(KEYS)
