"""Slots of values that failed: tested, used again or taken out of use, through every crash."""

from __future__ import annotations

import errno
from typing import Any

import pytest
from tablespace.commit import Committer
from tablespace.errors import FullError
from tablespace.io.read_batch import ReadBatch
from tablespace.io.slot_test import Verdict
from tablespace.layout import Geometry
from tablespace.quarantine import PAUSE_COMMITS, Quarantine
from tablespace.recovery import new_index
from tablespace.region import Region
from tablespace.requests import DeleteRequest
from tablespace.snapshot import SNAPSHOT_NAME, capture_index, encode_snapshot, load_snapshot
from tablespace.store import Store
from tablespace.testing import (
    Breach,
    Disk,
    Fault,
    FaultPlan,
    Hunt,
    HuntReport,
    SimulatedDirectory,
    Workload,
)
from tablespace.testing.bad_sectors import BAD_KINDS
from tablespace.testing.crash import open_simulated
from tablespace.testing.model import audit
from tablespace.testing.workload import fresh_region

GEOMETRY = Geometry(4096, 16384, 2)
KEYS = [b"key-%d" % number for number in range(6)]
SIZES = (4096, 12288)
POOLS = [Geometry(SIZES, 24576, count) for count in (2, 3, 4)]


def started(geometry: Geometry = GEOMETRY, **options: Any) -> tuple[Workload, Store]:
    evict = options.get("evict", False)
    workload = Workload(geometry, disk=fresh_region(geometry, evict=evict), **options)
    assert workload.recorder.store is not None
    return workload, workload.recorder.store


def counts(store: Store) -> tuple[int, int, int]:
    found = store.stats()
    audit(store)
    return found.live, found.limbo, found.quarantined


def place_of(store: Store, key: bytes) -> tuple[int, int]:
    entry = store.stat(key)
    assert entry is not None
    return entry.container, entry.slot


def put_full(store: Store, key: bytes) -> None:
    store.put(key, key * 500)


# What becomes of one slot.


def test_a_slot_whose_value_was_damaged_is_tested_and_used_again() -> None:
    workload, store = started()
    put_full(store, b"a")
    place = place_of(store, b"a")
    workload.damage(b"a")
    assert counts(store) == (0, 1, 0)
    store.flush()
    assert counts(store) == (0, 0, 0)
    put_full(store, b"b")
    assert place_of(store, b"b") == place and store.get(b"b") == b"b" * 500


@pytest.mark.parametrize("kind", BAD_KINDS)
@pytest.mark.parametrize("mode", ["direct", "buffered"])
def test_a_bad_slot_is_out_of_use_for_good(kind: str, mode: str) -> None:
    workload, store = started(io_mode=mode)
    put_full(store, b"a")
    place = place_of(store, b"a")
    workload.spoil(b"a", kind=kind)
    assert counts(store) == (0, 1, 0)
    put_full(store, b"b")
    put_full(store, b"c")
    # The first put carried the drop, the second the result of the test.
    assert counts(store) == (2, 0, 1)
    for way in ("kill", "close", "kill"):
        if way == "close":
            store.close()
        workload.disk = workload.disk.survivor()
        store = open_simulated(workload.disk, GEOMETRY)
        audit(store, recovered=True)
        assert counts(store) == (2, 0, 1)
        assert store._index.allocator.quarantined_slots() == [place]
    stored = store.put_many([(b"%d" % number, b"v") for number in range(8)])
    assert sum(stored) == 5
    assert place not in {place_of(store, key) for key in store}
    assert store.stats().failed is None


def test_a_slot_is_not_tested_while_a_reader_holds_it() -> None:
    workload, store = started()
    put_full(store, b"a")
    batch = ReadBatch(store._index, store._devices, 4096, True)
    batch.start([b"a"], None)
    workload.damage(b"a")
    store.flush()
    put_full(store, b"b")
    assert counts(store) == (1, 1, 0)
    batch.finish()
    assert counts(store) == (1, 1, 0)
    store.flush()
    assert counts(store) == (1, 0, 0)


def test_a_region_full_of_suspects_tests_them_before_it_refuses_a_put() -> None:
    workload, store = started()
    keys = [b"%d" % number for number in range(8)]
    assert all(store.put_many([(key, key * 500) for key in keys]))
    for key in keys:
        workload.recorder.damage(key)
    assert store.get_many(keys) == [None] * 8
    assert counts(store) == (0, 8, 0)
    assert all(store.put_many([(key, b"new") for key in keys]))
    assert counts(store) == (8, 0, 0)


@pytest.mark.parametrize("evict", [False, True], ids=["reject", "evict"])
def test_a_region_with_nothing_but_bad_slots_ends_in_full_error(evict: bool) -> None:
    workload, store = started(evict=evict)
    keys = [b"%d" % number for number in range(8)]
    store.put_many([(key, key * 500) for key in keys])
    assert workload.spoil(*keys) == 8
    for _ in range(3):
        with pytest.raises(FullError):
            store.put(b"new", b"v")
    assert counts(store) == (0, 0, 8)
    store = open_simulated(workload.disk.survivor(), GEOMETRY, evict=evict)
    with pytest.raises(FullError):
        store.put(b"new", b"v")
    assert counts(store) == (0, 0, 8)


def test_a_pool_with_nothing_but_bad_slots_takes_a_container_of_another() -> None:
    workload, store = started(Geometry(SIZES, 24576, 3), evict=True)
    small = [b"s%d" % number for number in range(12)]
    assert all(store.put_many([(key, key * 100) for key in small]))
    store.put_many([(b"large", b"L" * 12288), (b"larger", b"M" * 12288)])
    assert workload.spoil(b"large", b"larger") == 2
    store.flush()
    assert counts(store)[2] == 2
    store.put(b"again", b"N" * 12288)
    assert store.get(b"again") == b"N" * 12288
    assert counts(store)[2] == 2 and store.stats().failed is None
    again = open_simulated(workload.disk.survivor(), Geometry(SIZES, 24576, 3), evict=True)
    audit(again, recovered=True)
    assert again.get(b"again") == b"N" * 12288 and again.stats().quarantined == 2


def test_no_container_with_a_bad_slot_is_emptied_for_another_pool() -> None:
    workload, store = started(Geometry(SIZES, 24576, 1), evict=True)
    small = [b"s%d" % number for number in range(6)]
    assert all(store.put_many([(key, key * 100) for key in small]))
    workload.spoil(small[0])
    store.flush()
    with pytest.raises(FullError):
        store.put(b"large", b"L" * 12288)
    assert counts(store) == (5, 0, 1)


def test_a_full_disk_says_nothing_of_a_slot() -> None:
    workload, store = started()
    put_full(store, b"a")
    workload.damage(b"a")
    store._committer.run(DeleteRequest([]))
    workload.disk.faults = FaultPlan(
        Fault("write", 1, errno.ENOSPC, persistent=True, label="containers/")
    )
    store.flush()
    workload.disk.faults = None
    assert counts(store) == (0, 1, 0)
    for number in range(PAUSE_COMMITS + 1):
        store.put(b"b", b"%d" % number)
    assert counts(store) == (1, 0, 0)


@pytest.mark.parametrize("kind", ["write", "sync", "read"])
def test_an_error_of_the_test_itself_quarantines_and_the_store_goes_on(kind: str) -> None:
    """A failed sync turns a store read-only; that of a test concerns the slot alone, since no
    data of anybody waits for it. Through a page cache a bad sector shows as just that."""
    workload, store = started()
    put_full(store, b"a")
    put_full(store, b"b")
    workload.damage(b"a")
    store._committer.run(DeleteRequest([]))
    workload.disk.faults = FaultPlan(Fault(kind, 1, errno.EIO, label="containers/"))
    store.flush()
    workload.disk.faults = None
    assert counts(store) == (1, 0, 1)
    put_full(store, b"c")
    assert store.stats().failed is None
    again = open_simulated(workload.disk.survivor(), GEOMETRY)
    assert counts(again) == (2, 0, 1)
    assert again.get_many([b"b", b"c"]) == [b"b" * 500, b"c" * 500]


def test_an_unreadable_sector_as_the_kernel_names_it_under_o_direct_drops_the_value() -> None:
    """A medium error reaches an O_DIRECT read as ENODATA. Only EIO was taken for a bad sector:
    the entry stayed, and was a miss for ever."""
    workload, store = started(io_mode="direct")
    put_full(store, b"a")
    workload.disk.faults = FaultPlan(Fault("read", 1, errno.ENODATA, persistent=True))
    assert store.get(b"a") is None
    workload.disk.faults = None
    assert b"a" not in store and counts(store) == (0, 1, 0)


def test_a_full_disk_for_the_record_of_a_failed_test_keeps_the_slot_in_limbo() -> None:
    workload, store = started()
    put_full(store, b"a")
    workload.spoil(b"a")
    store._committer.run(DeleteRequest([]))
    workload.disk.faults = FaultPlan(
        Fault("write", 1, errno.ENOSPC, persistent=True, label="index.log")
    )
    with pytest.raises(FullError):
        store.flush()
    assert counts(store) == (0, 1, 0)
    workload.disk.faults = None
    store.flush()
    assert counts(store) == (0, 0, 1)


@pytest.mark.parametrize("bad", [0, 3])
def test_a_resize_forgets_the_bad_slots_of_containers_that_go(bad: int) -> None:
    shape = Geometry(4096, 16384, 4)
    workload, store = started(shape)
    for number in range(16):
        assert workload.recorder.put(b"%d" % number, b"v" * 100)
    spoilt = [key for key in store if place_of(store, key)[0] == bad]
    assert workload.spoil(*spoilt[:2]) == 2
    workload.flush()
    workload.resize(Geometry(4096, 16384, 2))
    assert workload.recorder.store is not None
    assert counts(workload.recorder.store)[2] == (2 if bad == 0 else 0)
    workload.resize(shape)
    assert counts(workload.recorder.store)[2] == (2 if bad == 0 else 0)
    report = Hunt(workload.recorder, shape, limit=4, nested_limit=0, stride=9).run()
    assert report.images > 20


def test_a_snapshot_carries_any_number_of_bad_slots_in_lines_of_bounded_length() -> None:
    region = Region("0" * 32, Geometry(4096, 4096 * 6000, 2))
    index = new_index(region)
    index.allocator.assign_container(1, 0)
    index.restore(b"key", 1, 5999, 1, 2, 3)
    for slot in range(5000):
        index.allocator.quarantine_slot(1, slot)
    lines = list(encode_snapshot(capture_index(index, 3), region))
    assert max(map(len, lines)) < 50_000 and len(lines) == 5
    disk = Disk()
    disk.write_file(SNAPSHOT_NAME, b"".join(lines))
    again = new_index(region)
    assert load_snapshot(SimulatedDirectory(disk), SNAPSHOT_NAME, region, again) == 3
    assert again.allocator.quarantined_slots() == index.allocator.quarantined_slots()
    # Another one of this region, with the second container gone: nothing of it counts.
    smaller = Region(region.uuid, Geometry(4096, 4096 * 6000, 1))
    index.discard(b"key")
    disk.write_file(SNAPSHOT_NAME, b"".join(encode_snapshot(capture_index(index, 4), region)))
    again = new_index(smaller)
    assert load_snapshot(SimulatedDirectory(disk), SNAPSHOT_NAME, smaller, again) == 4
    assert again.allocator.quarantined_slots() == []


# Crashes.


def history(
    seed: int, shapes: list[Geometry], *, evict: bool = False, count: int = 30
) -> Workload:
    shape = shapes[0]
    workload = Workload(shape, disk=fresh_region(shape, evict=evict), evict=evict, seed=seed)
    workload.random(
        count, KEYS, shapes=shapes[1:] and shapes, damage=True, spoil=shape.capacity // 3
    )
    return workload


def hunt(workload: Workload, geometry: Geometry = GEOMETRY, **options: Any) -> HuntReport:
    options = {"limit": 8, "nested_limit": 2, "nested_every": 12, "stride": 3, **options}
    return Hunt(workload.recorder, geometry, **options).run()


@pytest.mark.parametrize("shapes", [[GEOMETRY], POOLS], ids=["one pool", "pools and resizes"])
@pytest.mark.parametrize("evict", [False, True], ids=["reject", "evict"])
def test_every_promise_holds_over_bad_sectors(shapes: list[Geometry], evict: bool) -> None:
    images = quarantined = 0
    for seed in range(3):
        workload = history(seed, shapes, evict=evict)
        images += hunt(workload, shapes[0], seed=seed).images
        quarantined += len(workload.recorder.moments[-1].quarantined)
    assert images > 200 and quarantined > 1


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(300, 310))
def test_hunt_over_many_histories_of_bad_sectors(seed: int) -> None:
    shapes = ([GEOMETRY], POOLS)[seed % 2]
    workload = history(seed, shapes, evict=seed % 3 > 0, count=45)
    report = hunt(
        workload, shapes[0], seed=seed, limit=24, nested_limit=4, nested_every=4, stride=1
    )
    assert report.images > 100


@pytest.mark.parametrize("seed", range(4))
def test_power_loss_after_power_loss_over_bad_sectors(seed: int) -> None:
    workload = history(seed, [GEOMETRY], evict=seed % 2 == 1, count=6)
    for turn in range(12):
        workload.random(workload.chance.randint(1, 4), KEYS, damage=True, spoil=3)
        workload.power_loss(seed * 1000 + turn)
    assert not workload.recorder.failures


# Rules broken on purpose.


def test_a_slot_tested_before_its_drop_is_durable_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A read fails once, the value is sound: a crash before the drop's record is durable brings
    it back, so nothing may have been written over it."""

    def transient(seed: int) -> Workload:
        workload, _ = started(seed=seed)
        for key in KEYS:
            workload.put(key)
        for key in KEYS[:4]:
            workload.disk.faults = FaultPlan(Fault("read", 1, errno.EIO))
            workload.recorder.get_many([key])
            workload.disk.faults = None
            workload.put(KEYS[4])
        return workload

    options = {"verify": False, "stride": 1, "nested_limit": 0}
    assert hunt(transient(1), **options).images > 50
    drop = Store._drop

    def drop_and_test(self: Store, key: bytes, seq: int) -> None:
        drop(self, key, seq)
        for container, slot in [(c, s) for _, c, s in self._committer.dropped]:
            self._index.confirm_drop(container, slot)
        self._committer.quarantine.try_suspects(seq, 8)

    monkeypatch.setattr(Store, "_drop", drop_and_test)
    with pytest.raises(Breach):
        hunt(transient(1), **options)


def untested(self: Quarantine, container: int, slot: int, seq: int) -> Verdict:
    return Verdict.GOOD


def test_a_slot_used_again_without_its_test_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Quarantine, "try_one", untested)
    with pytest.raises(Breach, match="known to be bad"):
        for seed in range(12):
            history(seed, [GEOMETRY], count=40)


def test_a_quarantine_without_its_record_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    append = Committer._append_drops

    def forget(self: Committer) -> None:
        for place in self.index.convicted():
            self.index.condemn(*place)
        append(self)

    monkeypatch.setattr(Committer, "_append_drops", forget)
    with pytest.raises(Breach, match="in use again"):
        for seed in range(6):
            hunt(history(seed, [GEOMETRY], count=40))


def test_a_snapshot_without_the_quarantine_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(index: Any, seq: int) -> Any:
        source = real(index, seq)
        source.quarantined = []
        return source

    real = capture_index
    for module in ("compaction", "recovery", "resize"):
        monkeypatch.setattr(f"tablespace.{module}.capture_index", capture)
    with pytest.raises(Breach):
        for seed in range(3):
            hunt(history(seed, [GEOMETRY], count=40))
