"""Power loss and errors where puts are acknowledged before they are durable."""

from __future__ import annotations

import errno
import itertools
import signal
from typing import Any

import pytest
from tablespace.errors import FailedError, FullError, TablespaceError
from tablespace.layout import Geometry
from tablespace.testing import Disk, Fault, FaultPlan, Hunt, HuntReport, Workload
from tablespace.testing.crash import open_simulated
from tablespace.testing.model import audit, read_all
from tablespace.testing.workload import fresh_region

from tablespace import commit, held

SMALL = Geometry(4096, 16384, 2)
WITH_SPARE = Geometry(4096, 32768, 4)
POOLS = Geometry((4096, 12288), 12288, 5)
KEYS = [b"key-%02d" % number for number in range(5)]
MODES = {"none": ("none",), "interval": ("interval",), "mixed": ("sync", "interval", "none")}
modes = pytest.mark.parametrize("mode", MODES)


def history(geometry: Geometry, mode: str, seed: int, *, evict: bool, count: int) -> Workload:
    workload = Workload(geometry, evict=evict, seed=seed)
    number = (40 if geometry is WITH_SPARE else 14) if evict else 5
    workload.random(count, [b"key-%02d" % at for at in range(number)], modes=MODES[mode])
    assert not workload.recorder.failures, workload.recorder.failures
    assert workload.disk.violations == []
    return workload


def hunt(workload: Workload, seed: int = 0, **options: Any) -> HuntReport:
    report = Hunt(workload.recorder, workload.geometry, seed=seed, **options).run()
    print(f"seed {seed}: {report}")
    return report


@modes
@pytest.mark.parametrize("evict", [False, True], ids=["reject", "evict"])
@pytest.mark.parametrize(
    "geometry", [SMALL, WITH_SPARE, POOLS], ids=["small", "with spare", "pools"]
)
def test_every_crash_leaves_what_was_flushed_and_nothing_else_than_old_or_new(
    mode: str, evict: bool, geometry: Geometry
) -> None:
    workload = history(geometry, mode, 3, evict=evict, count=30)
    report = hunt(workload, 3, limit=10, nested_limit=2, nested_every=16, stride=2)
    assert report.images > 300 and len(report.states) > 8


@modes
@pytest.mark.parametrize("evict", [False, True], ids=["reject", "evict"])
def test_every_promise_holds_over_pools_resizes_and_damage(mode: str, evict: bool) -> None:
    shapes = [Geometry((4096, 12288), 12288, count) for count in (3, 5, 6)]
    workload = Workload(shapes[1], evict=evict, seed=4)
    keys = [b"key-%d" % number for number in range(10)]
    workload.random(25, keys, modes=MODES[mode], shapes=shapes, damage=True)
    # More keys than slots: blocks without room are dropped, and a flush or close says so.
    assert all(isinstance(each, (FullError, FailedError)) for each in workload.recorder.failures)
    report = hunt(workload, 4, limit=8, nested_limit=2, nested_every=16, stride=3)
    assert report.images > 200


@pytest.mark.long
@pytest.mark.timeout(1200)
@modes
@pytest.mark.parametrize("seed", range(300, 309))
def test_hunt_over_many_histories(mode: str, seed: int) -> None:
    geometry = (SMALL, WITH_SPARE, POOLS)[seed % 3]
    workload = history(geometry, mode, seed, evict=seed % 2 > 0, count=45)
    hunt(workload, seed, limit=24, nested_limit=3, nested_every=8)


@modes
@pytest.mark.parametrize("seed", range(3))
def test_power_loss_after_power_loss_leaves_old_or_new(mode: str, seed: int) -> None:
    workload = Workload(SMALL, evict=seed == 2, seed=seed)
    for turn in range(15):
        workload.random(workload.chance.randint(1, 6), KEYS, modes=MODES[mode])
        workload.power_loss(seed * 1000 + turn)
    assert not workload.recorder.failures


@pytest.mark.parametrize("verify", [True, False])
def test_not_synced_puts_after_power_loss_never_serve_unverified_bytes(verify: bool) -> None:
    """A store in a no-sync mode came back from a lost host with torn pages and served them: its
    index was newer than the data it named. Here no line is in the journal before its data is
    synced, so that even a reader who checks nothing gets whole values or misses."""
    workload = Workload(SMALL, disk=fresh_region(SMALL), seed=5)
    for turn in range(10):
        workload.put(KEYS[turn % 5], KEYS[(turn + 2) % 5], durability="none")
        if turn % 4 == 3:
            workload.flush()
    report = hunt(workload, limit=48, nested_limit=0, verify=verify)
    assert report.images > 400 and len(report.states) > 3


def test_a_disk_that_lies_about_syncs_cannot_make_a_flush_serve_wrong_bytes() -> None:
    workload = history(SMALL, "mixed", 6, evict=False, count=30)
    report = hunt(
        workload, truth_only=True, ignore_sync=lambda label: True, limit=24, nested_limit=0
    )
    assert report.images > 300


def test_a_flush_promises_what_was_put_before_it() -> None:
    for mode in ("none", "interval"):
        workload = Workload(SMALL, disk=fresh_region(SMALL))
        workload.put(*KEYS[:3], durability=mode)
        workload.flush()
        start = workload.disk.clock
        allowed = workload.recorder.allowed
        assert all(len(allowed[key]) == 1 and None not in allowed[key] for key in KEYS[:3])
        workload.put(*KEYS[:4], durability=mode)
        workload.step()
        hunt(workload, start=start, limit=24)


@pytest.mark.parametrize("change", ["put", "delete"])
@pytest.mark.parametrize("mode", ["none", "interval"])
def test_a_durable_change_wins_over_an_unpromised_put_before_it(mode: str, change: str) -> None:
    workload = Workload(SMALL, disk=fresh_region(SMALL))
    workload.put(KEYS[0])
    for _ in range(3):
        workload.put(KEYS[0], KEYS[1], durability=mode)
        if change == "put":
            workload.put(KEYS[0])
        else:
            assert workload.delete(KEYS[0])
        workload.step()
        workload.flush()
        assert workload.recorder.get_many(KEYS[:1])
    assert hunt(workload, limit=24, nested_limit=0).images > 100


def test_held_records_are_settled_at_each_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "HELD_LINE_BYTES", 600)
    workload = Workload(SMALL, disk=fresh_region(SMALL), seed=2)
    store = workload.recorder.store
    assert store is not None
    most = 0
    for turn in range(12):
        workload.put(KEYS[turn % 5], durability="none")
        most = max(most, store.stats().held_blocks)
        assert len(store._committer.held.writer) < 600 + 4096
    assert most < 6 and store.stats().groups > 2
    monkeypatch.setattr(held, "HELD_CONTAINERS", 1)
    for turn in range(6):
        workload.put(KEYS[turn % 5], durability="none")
        assert store.stats().held_blocks <= 1
    assert hunt(workload, limit=12, nested_limit=0).images > 100


def test_the_slots_that_held_records_freed_come_back_when_the_region_is_short() -> None:
    """Five keys in eight slots: the fourth overwrite finds no free slot until it settles."""
    workload = Workload(SMALL, disk=fresh_region(SMALL))
    store = workload.recorder.store
    assert store is not None
    workload.put(*KEYS)
    limbo = []
    for turn in range(12):
        assert workload.put(KEYS[turn % 5], durability="none")
        audit(store)
        limbo.append(store.stats().limbo)
    assert max(limbo) == 3 and limbo.count(1) > 2
    workload.flush()
    assert store.stats().limbo == 0 and store.stats().free == 3
    assert hunt(workload, limit=12, nested_limit=0).images > 100


def test_evictions_held_with_a_group_do_not_evict_again_for_the_same_room() -> None:
    """32 slots, two kept spare: each group's riders free what the next one needs, no more."""
    workload = Workload(WITH_SPARE, evict=True, disk=fresh_region(WITH_SPARE, evict=True))
    store = workload.recorder.store
    assert store is not None
    keys = [b"key-%02d" % number for number in range(60)]
    for key in keys:
        workload.put(key, durability="none")
        audit(store)
        assert store.stats().live >= min(28, keys.index(key) + 1)
    workload.flush()
    assert store.stats().evictions >= 28
    assert hunt(workload, limit=6, nested_limit=0, stride=5).images > 50


# Errors.


@pytest.fixture(scope="module")
def region() -> Disk:
    return fresh_region(SMALL, evict=True)


def some_operations(workload: Workload, mode: str) -> None:
    recorder = workload.recorder
    workload.put(KEYS[0], KEYS[1], durability=mode)
    workload.put(KEYS[2], KEYS[0], durability=mode)
    workload.flush()
    recorder.get_many(KEYS)
    workload.put(*KEYS[1:], durability=mode)
    workload.delete(KEYS[1])
    workload.put(KEYS[0], durability=mode)
    workload.snapshot()
    workload.put(KEYS[1], KEYS[0], durability=mode)
    workload.step()
    workload.put(KEYS[0], KEYS[3])
    workload.put(KEYS[4], durability=mode)
    workload.flush()


@pytest.mark.parametrize("mode", ["none", "interval"])
@pytest.mark.parametrize("persistent", [False, True], ids=["once", "persistent"])
@pytest.mark.parametrize(
    "kind, code",
    [
        ("write", errno.EIO),
        ("write", errno.ENOSPC),
        ("write", 0),
        ("sync", errno.EIO),
        ("length", errno.EIO),
        ("submit", errno.EIO),
        ("reap", errno.EIO),
    ],
    ids=lambda value: errno.errorcode.get(value, "short") if isinstance(value, int) else value,
)
def test_the_nth_error_breaks_no_promise(
    mode: str, kind: str, code: int, persistent: bool, region: Disk
) -> None:
    for nth in itertools.count(1):
        workload = Workload(SMALL, disk=region.survivor(nth), evict=True, seed=nth)
        recorder = workload.recorder
        plan = FaultPlan(Fault(kind, nth, code, short=code == 0, persistent=persistent))
        workload.disk.faults = plan
        some_operations(workload, mode)
        workload.disk.faults = None
        store = recorder.store
        assert store is not None
        audit(store)
        recorder.judge(read_all(store, recorder.keys), recorder.visible)
        left = open_simulated(workload.disk.survivor(), SMALL, evict=True)
        audit(left, recovered=True)
        recorder.judge(read_all(left, recorder.keys), recorder.allowed)
        Hunt(recorder, SMALL, limit=4, nested_limit=0, stride=20, seed=nth).run()
        if plan.met == 0:
            break
    assert nth > 1


def test_a_flush_that_finds_the_disk_full_keeps_everything_held_for_the_next() -> None:
    workload = Workload(SMALL, disk=fresh_region(SMALL))
    workload.put(*KEYS[:3], durability="none")
    store = workload.recorder.store
    assert store is not None
    workload.disk.faults = FaultPlan(
        Fault("write", 1, errno.ENOSPC, label="index.log", persistent=True)
    )
    for call in (store.flush, lambda: store.put(b"k", b"v"), lambda: store.delete(b"k")):
        with pytest.raises(FullError, match="3 blocks acknowledged before"):
            call()
    assert store.stats().held_blocks == 3 and store.stats().failed is None
    store.put(b"more", b"v", durability="none")
    workload.disk.faults = None
    store.flush()
    audit(store)
    assert store.stats().held_blocks == 0
    again = open_simulated(workload.disk.survivor(), SMALL)
    assert again.get_many(KEYS[:3]) == store.get_many(KEYS[:3])
    assert None not in again.get_many([*KEYS[:3], b"more"])


@pytest.mark.parametrize("label", ["containers/", "index.log"])
def test_a_sync_that_fails_in_a_flush_turns_the_store_read_only(label: str) -> None:
    workload = Workload(SMALL, disk=fresh_region(SMALL))
    store = workload.recorder.store
    assert store is not None
    store.put(KEYS[0], b"old")
    store.put(KEYS[0], b"new", durability="none")
    workload.disk.faults = FaultPlan(Fault("sync", 1, errno.EIO, label=label))
    with pytest.raises(FailedError):
        store.flush()
    workload.disk.faults = None
    for mode in ("sync", "interval", "none"):
        with pytest.raises(FailedError):
            store.put(KEYS[1], b"v", durability=mode)
    with pytest.raises(FailedError):
        store.flush()
    # What was acknowledged is still read here, and the close says that it was never promised.
    assert store.get(KEYS[0]) == b"new"
    audit(store)
    with pytest.raises(FailedError, match="1 of durability none"):
        store.close()
    assert open_simulated(workload.disk.survivor(), SMALL).get(KEYS[0]) in (b"old", b"new")


def test_queued_blocks_that_the_failed_store_cannot_take_are_dropped_and_told() -> None:
    workload = Workload(SMALL, disk=fresh_region(SMALL))
    store = workload.recorder.store
    assert store is not None
    store.put(KEYS[0], b"old")
    store.put(KEYS[0], b"new", durability="interval")
    workload.disk.faults = FaultPlan(Fault("sync", 1, errno.EIO))
    store._queue.step()
    workload.disk.faults = None
    assert store.stats().queue_dropped == 1 and store.stats().queue_blocks == 0
    assert store.get(KEYS[0]) == b"old"
    for _ in range(2):
        with pytest.raises(FailedError):
            store.flush()
    with pytest.raises(FailedError, match="acknowledged puts that are not durable"):
        store.close()


@pytest.mark.parametrize("persistent", [False, True], ids=["once", "persistent"])
def test_a_queued_block_whose_own_write_fails_is_the_only_one_dropped(persistent: bool) -> None:
    workload = Workload(SMALL, disk=fresh_region(SMALL))
    store = workload.recorder.store
    assert store is not None
    for key in KEYS[:3]:
        store.put(key, b"new" * 100, durability="interval")
    workload.disk.faults = FaultPlan(
        Fault("write", 1, errno.EIO, label="containers/", persistent=persistent)
    )
    with pytest.raises(OSError, match=f"{3 if persistent else 1} blocks acknowledged"):
        store.flush()
    workload.disk.faults = None
    assert store.stats().queue_dropped == (3 if persistent else 1)
    assert len(store) == (0 if persistent else 2)
    store.flush()
    store.close()


# Interrupts.


def throw(error: type[BaseException]) -> None:
    raise error(4, "interrupted by a signal")


@pytest.mark.parametrize("mode", ["none", "interval"])
@pytest.mark.parametrize("error", [TimeoutError, KeyboardInterrupt])
def test_an_interrupt_at_every_step_breaks_no_promise(
    mode: str, error: type[BaseException]
) -> None:
    base = fresh_region(SMALL)
    before = signal.signal(signal.SIGINT, lambda number, frame: throw(error))
    try:
        for nth in itertools.count(1):
            workload = Workload(SMALL, disk=base.survivor())
            recorder = workload.recorder
            workload.put(*KEYS[:3], durability=mode)
            plan = workload.disk.faults = FaultPlan(Fault("", nth, interrupt=True))
            during = {key: values | {None} for key, values in recorder.allowed.items()}
            for work in (
                lambda: workload.put(KEYS[0], KEYS[3], durability=mode),  # noqa: B023
                workload.flush,
            ):
                try:
                    work()
                except KeyboardInterrupt as interrupt:
                    recorder._failed(interrupt, {**during, **recorder.allowed})
            workload.disk.faults = None
            workload.put(KEYS[1], KEYS[4])
            workload.put(KEYS[2], durability=mode)
            workload.flush()
            workload.delete(KEYS[4])
            store = recorder.store
            assert store is not None
            recorder.judge(read_all(store, recorder.keys), recorder.visible)
            left = open_simulated(workload.disk.survivor(), SMALL)
            audit(left, recovered=True)
            recorder.judge(read_all(left, recorder.keys), recorder.allowed)
            try:
                store.close()
            except (OSError, TablespaceError):
                pass
            if plan.met == 0:
                break
    finally:
        signal.signal(signal.SIGINT, before)
    assert nth >= 3


# The rules, each broken: the hunt must notice.


def overwrites(seed: int = 1) -> Workload:
    """Overwrite more often than there are slots, with few flushes."""
    workload = Workload(SMALL, disk=fresh_region(SMALL), seed=seed)
    for turn in range(16):
        workload.put(
            KEYS[turn % 5], *([KEYS[(turn + 2) % 5]] if turn % 3 else []), durability="none"
        )
        if turn % 6 == 5:
            workload.flush()
    return workload


def test_the_history_of_the_broken_rules_is_sound() -> None:
    assert hunt(overwrites(), limit=24, nested_limit=0).images > 200


def test_reuse_of_a_slot_freed_by_a_held_record_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(commit.Committer, "_hold_freed_slots", lambda self: None)
    workload = overwrites()
    with pytest.raises(AssertionError):
        hunt(workload, limit=24, nested_limit=0)


def append_first(devices: list[Any], journal: Any, writer: Any) -> tuple[commit.Stage, int, int]:
    stage, code = commit.append_lines(journal, writer)
    for device in devices:
        device.sync_data()
    return stage, code, 0


def skip_the_journal_sync(
    devices: list[Any], journal: Any, writer: Any
) -> tuple[commit.Stage, int, int]:
    for device in devices:
        device.sync_data()
    journal.append(writer.getvalue())
    return commit.Stage.DONE, 0, 0


@pytest.mark.parametrize("broken", [append_first, skip_the_journal_sync])
def test_a_flush_in_the_wrong_order_is_noticed(
    broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit, "sync_and_append", broken)
    workload = overwrites()
    with pytest.raises(AssertionError):
        hunt(workload, limit=24, nested_limit=0)


def test_a_snapshot_of_records_that_are_not_durable_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def settle_unless_in_a_barrier(self: commit.Committer) -> None:
        if not inside:
            settle(self)

    settle = commit.Committer.settle
    inside: list[bool] = []
    monkeypatch.setattr(commit.Committer, "settle", settle_unless_in_a_barrier)
    workload = Workload(SMALL, disk=fresh_region(SMALL))
    for turn in range(4):
        workload.put(KEYS[turn], KEYS[turn + 1], durability="none")
        inside.append(True)
        workload.snapshot()
        inside.clear()
        workload.flush()
    with pytest.raises(AssertionError):
        hunt(workload, limit=24, nested_limit=0)


def test_an_older_queued_value_that_is_committed_over_a_newer_one_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tablespace.write_queue import WriteQueue

    monkeypatch.setattr(WriteQueue, "directly", lambda self, keys, change: change())
    for change in ("put", "delete"):
        workload = Workload(SMALL, disk=fresh_region(SMALL))
        workload.put(KEYS[0], durability="interval")
        workload.put(KEYS[0]) if change == "put" else workload.delete(KEYS[0])
        workload.step()
        workload.flush()
        with pytest.raises(AssertionError):
            workload.recorder.get_many(KEYS)
