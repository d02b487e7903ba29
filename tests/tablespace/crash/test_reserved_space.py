"""Somebody else fills the disk to its last byte: deletes, evictions and compactions go on.

The simulated disk is `full`: no file grows beyond the blocks it has, and what a file gives up is
gone at once.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import pytest
from tablespace.errors import FullError, TablespaceError
from tablespace.io.device import Device
from tablespace.layout import Geometry
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
from tablespace.testing.model import audit
from tablespace.testing.workload import fresh_region

from tablespace import compaction, journal, recovery, reserve, snapshot, spare

GEOMETRY = Geometry(4096, 16384, 2)
KEYS = [b"key-%02d" % number for number in range(14)]


# A snapshot of these, and the records of ten of them, take several blocks.
LARGER = Geometry(4096, 65536, 2)
LONG_KEYS = [b"key-%02d" % number * 40 for number in range(40)]


def filled(evict: bool = True, seed: int = 0, shape: Geometry = GEOMETRY) -> Workload:
    """Return an open region on a disk that was filled right behind the opening."""
    disk = fresh_region(shape, evict=evict, seed=seed)
    workload = Workload(shape, disk=disk, evict=evict, seed=seed)
    workload.disk.full = True
    return workload


@pytest.fixture
def short_journals(monkeypatch: pytest.MonkeyPatch) -> None:
    """A journal's reserved space holds some ten records, so that histories fill it often."""
    monkeypatch.setattr(reserve, "journal_reserve_bytes", lambda snapshot_bytes: 4096)


def names(disk: Disk) -> list[str]:
    return SimulatedDirectory(disk).list()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.usefixtures("short_journals")
def test_a_full_disk_blocks_nothing_for_ever(seed: int) -> None:
    """A delete needs room for its record, and a compaction for a snapshot and a journal: a region
    on a full disk could not even be emptied."""
    workload = filled(seed=seed)
    compactions = 0
    for _ in range(12):
        workload.random(40, KEYS, clear=True)
        store = workload.recorder.store
        assert store is not None
        audit(store)
        compactions += store.stats().compactions
        assert "reserve: " in " ".join(store.stats().choices)
        assert not any("short" in choice for choice in store.stats().choices)
        assert workload.recorder.failures == []
    assert compactions > 8
    assert workload.disk.violations == []


@pytest.mark.usefixtures("short_journals")
def test_a_put_that_needs_a_new_journal_gets_one_at_once() -> None:
    """Nobody asks for the compaction here: the journal's space runs out under the records."""
    workload = filled(evict=False)
    store = workload.recorder.store
    assert store is not None
    for number in range(200):
        key = KEYS[number % 4]
        assert workload.delete(key) if number % 8 > 3 else workload.put(key)
    assert store.stats().compactions > 3
    assert workload.recorder.failures == []


def give_up_files_out_of_use(patch: pytest.MonkeyPatch) -> None:
    for module in (journal, snapshot):
        patch.setattr(module, "retire", lambda *_: None)


def reserve_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reserve.Reserve, "settle", lambda *_: None)


def reserve_spares_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reserve.Reserve, "_keep", lambda *_: True)


def remove_unfinished_files(patch: pytest.MonkeyPatch) -> None:
    def unlink(directory: SimulatedDirectory, files: spare.FileSet) -> None:
        directory.unlink(files.temporary)

    for module in (recovery, journal, snapshot):
        patch.setattr(module, "put_aside", unlink)


def tidy_always(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reserve.Reserve, "is_roomy", lambda self: True)


def remove_backups_when_clearing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(compaction, "rename_to_retired", lambda *_: False)


@pytest.mark.parametrize(
    "give_up",
    [
        give_up_files_out_of_use,
        reserve_nothing,
        reserve_spares_alone,
        remove_unfinished_files,
        tidy_always,
        remove_backups_when_clearing,
    ],
)
def test_space_given_up_anywhere_is_noticed(
    give_up: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dry()
    give_up(monkeypatch)
    with pytest.raises((AssertionError, OSError, TablespaceError)):
        run_dry()


def run_dry() -> None:
    """Do what needs much room, again and again; nothing may fail."""
    workload = filled(shape=LARGER)
    for _ in range(6):
        workload.random(10, LONG_KEYS)
        for first in range(0, 40, 10):
            workload.put(*LONG_KEYS[first : first + 10])
        workload.delete(*LONG_KEYS[20:30])
        workload.reopen()
        interrupted_compaction(workload)
        workload.clear()
        assert not workload.recorder.failures


def interrupted_compaction(workload: Workload) -> None:
    """Let the process die while a snapshot is being written, and open again."""
    dead: list[Disk] = []

    def die(kind: str, label: str) -> None:
        if kind == "sync" and not dead and "index.snapshot.json.tmp" in names(workload.disk):
            dead.append(workload.disk.survivor(workload.disk.seed))

    workload.disk.observer = die
    workload.snapshot()
    workload.disk.observer = None
    assert dead
    workload.disk = workload.recorder.disk = dead[0]
    workload.open()


@pytest.mark.usefixtures("short_journals")
def test_processes_that_die_in_a_compaction_cost_no_space() -> None:
    workload = filled()
    for _ in range(20):
        workload.random(5, KEYS)
        interrupted_compaction(workload)
        store = workload.recorder.store
        assert store is not None
        assert not any("short" in choice for choice in store.stats().choices)
    assert workload.recorder.failures == []


def lives_on(store: Store, disk: Disk) -> None:
    """A recovered store on a disk that is still full deletes, compacts and stores."""
    try:
        for key in list(store)[:2]:
            assert store.delete(key)
        store.put(b"after", b"the crash")
        store.snapshot()
        store.snapshot()
    except (OSError, TablespaceError) as error:
        raise Breach(f"no way on after the crash: {error!r}, {names(disk)}") from error


def hunted(seed: int, operations: int = 14, **options: Any) -> HuntReport:
    workload = filled(seed=seed)
    start = workload.disk.clock
    workload.random(operations, KEYS, clear=True, reopen=seed % 2 == 1)
    assert workload.recorder.failures == []
    options = {"limit": 10, "nested_limit": 2, "nested_every": 12, "start": start, **options}
    return Hunt(workload.recorder, GEOMETRY, seed=seed, **options).run()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.usefixtures("short_journals")
def test_no_crash_on_a_full_disk_loses_anything(seed: int) -> None:
    """Files out of use are written over in place: none of their old lines may come back, and no
    file may be written over that a crash can give a name that counts."""
    report = hunted(seed)
    assert report.images > 500 and report.nested > 50


def write_before_the_names_are_durable(patch: pytest.MonkeyPatch) -> None:
    """A file that has a name that counts on the disk is blanked: in memory it has none."""
    real = SimulatedDirectory.sync

    def sync(self: SimulatedDirectory, name: str = "") -> None:
        if name:
            real(self, name)

    patch.setattr(SimulatedDirectory, "sync", sync)


def test_a_file_written_over_before_its_names_are_durable_is_noticed(
    monkeypatch: pytest.MonkeyPatch, short_journals: None
) -> None:
    write_before_the_names_are_durable(monkeypatch)
    with pytest.raises((Breach, OSError)):
        for seed in range(4):
            hunted(seed, nested_limit=0)


def left_by_a_failed_sync() -> int:
    """A journal's sync fails, the region is opened again on a full disk, the power fails."""
    images = 0
    for seed in range(8):
        workload = filled(seed=seed)
        start = workload.disk.clock
        workload.put(*KEYS[:2])
        workload.disk.faults = FaultPlan(Fault("sync", 1, errno.EIO, label="index.log"))
        workload.put(*KEYS[2:6])
        workload.disk.faults = None
        workload.recorder.failures.clear()
        workload.crash()
        for _ in range(3):
            assert workload.snapshot() and workload.put(*KEYS[:5])
        options: dict[str, Any] = {"limit": 8, "nested_limit": 0, "start": start, "seed": seed}
        images += Hunt(workload.recorder, GEOMETRY, **options).run().images
    return images


def test_a_file_whose_sync_failed_is_a_sound_journal_again_once_blanked() -> None:
    """What a failed sync left in memory looks written: a journal over it was shorter after a
    crash than it had looked, down to nothing."""
    assert left_by_a_failed_sync() > 1000


def test_a_length_that_a_failed_sync_left_in_memory_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def blank_alone(device: Device) -> None:
        device.write_at(0, b"\n" * device.size_bytes)

    for module in (reserve, spare):
        monkeypatch.setattr(module, "blank", blank_alone)
    with pytest.raises(Breach):
        left_by_a_failed_sync()


def test_what_was_cleared_is_in_no_file_on_a_full_disk() -> None:
    """A file out of use becomes a spare in place: its old lines named the keys."""
    workload = filled(evict=False)
    for _ in range(3):
        workload.put(*KEYS[:4])
        workload.snapshot()
        workload.put(*KEYS[4:8])
        assert workload.clear()
        for name in names(workload.disk):
            if name != "containers":
                assert b'"key":"6b' not in workload.disk.read_file(name), name


def test_a_file_that_is_not_blanked_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (reserve, spare):
        monkeypatch.setattr(module, "blank", lambda device: None)
    with pytest.raises(AssertionError):
        test_what_was_cleared_is_in_no_file_on_a_full_disk()


def test_without_room_for_the_reserve_a_region_opens_and_says_so() -> None:
    disk = fresh_region(GEOMETRY)
    directory = SimulatedDirectory(disk)
    for name in directory.list():
        if "spare" in name:
            directory.unlink(name)
    disk.full = True
    workload = Workload(GEOMETRY, disk=disk)
    store = workload.recorder.store
    assert store is not None
    assert any(choice.startswith("reserve: short") for choice in store.stats().choices)
    disk.full = False
    assert workload.snapshot()
    assert not any("short" in choice for choice in store.stats().choices)


def test_entries_that_outgrow_the_reserve_are_refused_before_they_block_deletes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The data slots are there, so nothing but the index stops a put: it must stop while the
    reserved space still holds a snapshot of what is in."""
    monkeypatch.setattr(reserve, "SMALL_BYTES", 4096)
    monkeypatch.setattr(reserve, "SHARE", 1 << 30)
    shape = Geometry(4096, 32 << 12, 4)
    workload = Workload(shape)
    workload.disk.full = True
    store = workload.recorder.store
    assert store is not None
    stored = 0
    while stored < 128 and workload.put(b"%03d" % stored * 80):
        stored += 1
    assert 4 < stored < 128
    assert isinstance(workload.recorder.failures.pop(), FullError)
    for number in range(stored):
        assert workload.snapshot()
        assert workload.delete(b"%03d" % number * 80)
    assert workload.put(b"k") and workload.recorder.failures == []
    audit(store)


def test_the_reserve_grows_with_the_entries_and_touches_no_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A put can come while a compaction is writing into a spare: a put that then blanked or
    renamed files would write over the compaction's snapshot."""
    monkeypatch.setattr(reserve, "SMALL_BYTES", 4096)
    monkeypatch.setattr(reserve, "SHARE", 1 << 30)
    workload = Workload(Geometry(4096, 32 << 12, 4))
    store = workload.recorder.store
    assert store is not None
    assert workload.snapshot() and workload.snapshot()
    before, kept = names(workload.disk), store._reserve.snapshot_bytes
    for number in range(128):
        assert workload.put(b"%03d" % number * 80)
    assert names(workload.disk) == before
    assert store._reserve.snapshot_bytes > 2 * kept
    workload.disk.full = True
    for number in range(128):
        assert workload.delete(b"%03d" % number * 80)
        assert number % 16 or workload.snapshot()
    assert workload.recorder.failures == []


def test_a_region_made_smaller_gives_its_reserve_back() -> None:
    large, small = Geometry(4096, 64 << 12, 8), Geometry(4096, 64 << 12, 2)
    workload = Workload(large)
    workload.put(*KEYS)
    workload.snapshot()
    disk = workload.disk
    before = sum(disk.held_bytes(disk.find(name) or 0) for name in names(disk) if "index" in name)
    workload.resize(small)
    held = sum(disk.held_bytes(disk.find(name) or 0) for name in names(disk) if "index" in name)
    assert held < before // 3
