"""A region's creation cut short, by a kill or a power loss, and what comes after it."""

from __future__ import annotations

import copy
import errno
import random

from tablespace.layout import Geometry
from tablespace.region import REGION_NAME, encode_region, new_region
from tablespace.testing import Disk, Fault, FaultPlan, Hunt, HuntReport, Workload
from tablespace.testing.crash import open_simulated
from tablespace.testing.images import DiskState, choices

SMALL = Geometry(4096, 8192, 1)
KEY = b"key"


def killed_at(step: int) -> Disk | None:
    """Create a region; return the disk as before its step-th operation, None where there is none.

    What was not synced then is not durable.
    """
    disk = Disk(seed=step)
    left: list[Disk] = []
    operations = 0

    def look(kind: str, label: str) -> None:
        nonlocal operations
        operations += 1
        if operations == step:
            left.append(copy.deepcopy(disk))

    disk.observer = look
    open_simulated(disk, SMALL)
    for each in left:
        each.observer, each._in_observer = None, False
        each.locks.clear()
        return each
    return None


def hunt(workload: Workload) -> HuntReport:
    """Let the power fail at every event of some operations after an acknowledged put."""
    start = workload.disk.clock
    workload.put(KEY)
    workload.snapshot()
    return Hunt(workload.recorder, SMALL, limit=16, nested_limit=0, start=start).run()


def test_what_a_killed_creation_left_in_the_page_cache_is_made_durable_by_the_next_open() -> None:
    """region.json was read from the page cache of a killed process and never synced: values were
    acknowledged, and after a power loss the region had no identity."""
    step = images = 0
    while disk := killed_at(step := step + 1):
        workload = Workload(SMALL, disk=disk, seed=step)
        assert workload.put(KEY)
        images += hunt(workload).images
    assert step > 20 and images > 100


def test_what_a_failed_sync_of_a_creation_left_is_written_anew_by_the_next_open() -> None:
    """As above, where the sync failed: another one of the same file alone would prove nothing."""
    nth = images = 0
    while True:
        nth += 1
        disk = Disk(seed=nth)
        plan = disk.faults = FaultPlan(Fault("sync", nth, errno.EIO))
        try:
            open_simulated(disk, SMALL)
        except OSError:
            pass
        disk.faults = None
        disk.locks.clear()
        workload = Workload(SMALL, disk=disk, seed=nth)
        assert workload.put(KEY)
        images += hunt(workload).images
        if plan.met == 0:
            break
    assert nth > 4 and images > 40


def test_halves_of_two_creations_do_not_make_one_region() -> None:
    """The power failed when half of region.json was durable, and again in the next creation: its
    other half made the first one whole, beside index files that it knew nothing of."""
    page = encode_region(new_region(SMALL))
    for begin, end in ((0, 512), (512, 4096), (1024, 1536), (0, 4096 - 512)):
        disk = Disk(seed=begin)
        disk.write_file(REGION_NAME, bytes(begin) + page[begin:end] + bytes(8192 - end))
        disk = disk.survivor()
        open_simulated(disk, SMALL)
        state = DiskState(disk)
        chance = random.Random(begin)
        images = 0
        for stop in range(disk.clock + 1):
            state.advance_to(stop)
            for choice in choices(state, 64, chance):
                images += 1
                assert len(open_simulated(state.image(choice), SMALL)) == 0
        assert images > 200
