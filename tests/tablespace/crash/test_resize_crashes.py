"""A resize stopped at every event: the old region or the new, and a second crash in recovery."""

from __future__ import annotations

import pytest
import tablespace.opening
import tablespace.resize
from tablespace.layout import Geometry
from tablespace.resize import CONTAINERS
from tablespace.snapshot import SNAPSHOT_BACKUP_NAME, SNAPSHOT_NAME
from tablespace.testing import Breach, Disk, Hunt, HuntReport, SimulatedDirectory, Workload
from tablespace.testing.crash import open_simulated, shape_of
from tablespace.testing.images import IgnoreSync
from tablespace.testing.model import audit, read_all
from tablespace.testing.workload import fresh_region

SIZES = (4096, 12288)
# Three small slots a container, or one large.
SHAPES = {count: Geometry(SIZES, 12288, count) for count in (2, 3, 5, 6)}
ONE_POOL = {count: Geometry(4096, 16384, count) for count in (2, 4)}
KEYS = [b"key-%d" % number for number in range(8)]


def filled(shape: Geometry, *, evict: bool = False, seed: int = 1) -> Workload:
    workload = Workload(shape, disk=fresh_region(shape, evict=evict), evict=evict, seed=seed)
    for key in KEYS:
        workload.put(key)
    workload.delete(KEYS[1], KEYS[4])
    workload.put(KEYS[4])
    return workload


def crash_everywhere(workload: Workload, start: int, **options: object) -> HuntReport:
    """Crash at every event from `start` on, and within some of the recoveries."""
    given = {"start": start, "limit": 16, "nested_limit": 2, "nested_every": 8, **options}
    report = Hunt(workload.recorder, workload.geometry, **given).run()  # type: ignore[arg-type]
    assert workload.disk.violations == []
    print(report)
    return report


CHANGES = [(3, 5), (2, 6), (5, 3), (6, 2), (5, 2)]


@pytest.mark.parametrize("clean", [True, False], ids=["closed", "killed"])
@pytest.mark.parametrize("before, after", CHANGES)
def test_every_crash_of_a_resize_leaves_the_old_region_or_the_new(
    before: int, after: int, clean: bool
) -> None:
    workload = filled(SHAPES[before])
    start = workload.disk.clock
    workload.resize(SHAPES[after], clean=clean)
    assert len(SimulatedDirectory(workload.disk).list(CONTAINERS)) == after
    workload.put(KEYS[0], KEYS[2])
    report = crash_everywhere(workload, start)
    assert report.images > 150 and report.nested > 30


def test_a_shrink_whose_evictions_are_not_durable_first_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The canary: containers that go before the snapshot without their entries."""

    def remove_first(
        directory: SimulatedDirectory, region: object, recovered: object, containers: int
    ) -> int:
        tablespace.resize.remove_surplus_containers(directory, SHAPES[containers])
        return real(directory, region, recovered, containers)  # type: ignore[arg-type]

    real = tablespace.opening.shrink_index
    monkeypatch.setattr(tablespace.opening, "shrink_index", remove_first)
    workload = filled(SHAPES[6])
    start = workload.disk.clock
    workload.resize(SHAPES[2])
    with pytest.raises(Breach, match="no recovery"):
        crash_everywhere(workload, start)


def containers_directory(label: str) -> bool:
    return label == "/containers"


def containers(label: str) -> bool:
    return label.startswith("containers/")


@pytest.mark.parametrize("ignored", [containers_directory, containers])
def test_a_growth_whose_containers_are_not_durable_first_is_noticed(ignored: IgnoreSync) -> None:
    workload = filled(SHAPES[3])
    start = workload.disk.clock
    workload.resize(SHAPES[6])
    with pytest.raises(Breach, match="no recovery"):
        crash_everywhere(workload, start, ignore_sync=ignored, ignore_from=start)


def test_a_resize_of_a_region_that_evicts_keeps_every_promise() -> None:
    workload = filled(SHAPES[3], evict=True, seed=4)
    start = workload.disk.clock
    for count in (5, 2, 6):
        workload.resize(SHAPES[count])
        workload.put(*KEYS[:2])
    assert crash_everywhere(workload, start, stride=3).images > 200


def test_slot_sizes_added_while_the_power_fails() -> None:
    single = Geometry(SIZES[1], 12288, 3)
    workload = Workload(single, disk=fresh_region(single), seed=2)
    workload.put(KEYS[0])
    workload.put(KEYS[1])
    start = workload.disk.clock
    workload.resize(SHAPES[5])
    for key in KEYS[2:6]:
        workload.put(key)
    assert crash_everywhere(workload, start).images > 150


def test_crashes_of_two_resizes_in_a_row_that_evict_nothing() -> None:
    """A shrink that had nothing to evict kept the journal, whose records of gone containers were
    written anew under a header of the smaller region: the next opening found them outside the
    geometry and refused the region, or cut acknowledged records as a torn tail."""
    workload = Workload(ONE_POOL[4], disk=fresh_region(ONE_POOL[4]))
    keys = [b"key-%02d" % number for number in range(16)]
    for key in keys:
        workload.put(key)
    store = workload.recorder.store
    assert store is not None
    high = [key for key in keys if (entry := store.stat(key)) and entry.container >= 2]
    assert len(high) == 8
    workload.delete(*high)
    start = workload.disk.clock
    workload.resize(ONE_POOL[2], clean=False)
    workload.crash()
    workload.delete(keys[0])
    workload.put(high[0])
    workload.crash()
    assert crash_everywhere(workload, start, stride=2).images > 150


def shrunk_and_grown(compactions: int) -> Workload:
    workload = Workload(ONE_POOL[4], disk=fresh_region(ONE_POOL[4]))
    keys = [b"key-%02d" % number for number in range(14)]
    for key in keys:
        workload.put(key)
    workload.resize(ONE_POOL[2])
    for number in range(compactions):
        workload.put(b"between-%d" % number)
        workload.snapshot()
    workload.resize(ONE_POOL[4], clean=False)
    for number in range(3):
        workload.put(b"new-%d" % number, b"more-%d" % number)
    return workload


@pytest.mark.parametrize("compactions", [0, 1, 2, 3])
def test_a_region_shrunk_and_grown_opens_from_the_older_snapshot_or_says_why_not(
    compactions: int,
) -> None:
    """The snapshot before the shrink named containers that had gone; after a growth they were
    there again. Its entries came back, and the records of new puts into these containers did not
    fit: they were cut as a torn tail, acknowledged as they were."""
    workload = shrunk_and_grown(compactions)
    left = workload.disk.survivor()
    left.write_file(SNAPSHOT_NAME, b"")
    try:
        store = open_simulated(left, ONE_POOL[4])
    except tablespace.CorruptionError:
        assert SNAPSHOT_BACKUP_NAME not in SimulatedDirectory(left).list()
        return
    assert store.stats().recovery.source == SNAPSHOT_BACKUP_NAME
    recorder = workload.recorder
    recorder.judge(read_all(store, recorder.keys), recorder.allowed)
    audit(store, recovered=True)


@pytest.mark.parametrize("before, after", [(3, 5), (5, 3)])
def test_the_process_may_die_at_every_step_of_a_resize(before: int, after: int) -> None:
    """Everything so far is visible then, also surplus containers and temporary files."""
    workload = filled(SHAPES[before])
    recorder = workload.recorder
    recorder.begin_resize(SHAPES[after], clean=False)
    steps: list[Disk] = []
    left = workload.disk.survivor()
    left.observer = lambda kind, label: steps.append(left.survivor())
    open_simulated(left, SHAPES[after])
    left.observer = None
    between = 0
    for number, step in enumerate(steps):
        found = shape_of(step)
        assert found in (SHAPES[before], SHAPES[after])
        there = set(SimulatedDirectory(step).list(CONTAINERS))
        between += len(there) != found.containers
        for shape in (found, SHAPES[after]):
            disk = step.survivor()
            store = open_simulated(disk, shape)
            audit(store, recovered=True)
            recorder.judge(read_all(store, recorder.keys), recorder.allowed)
            assert len(SimulatedDirectory(disk).list(CONTAINERS)) == shape.containers, number
            assert disk.violations == []
    assert len(steps) > 20 and between > 0
