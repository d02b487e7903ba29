"""An append that an error cut short is taken back, durably, before its slots are used again."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest
from tablespace.layout import Geometry
from tablespace.testing import Breach, Event, Fault, FaultPlan, Hunt, HuntReport, Workload
from tablespace.testing.workload import fresh_region

# Four slots: the group after the failed one must take the slots that one had.
GEOMETRY = Geometry(4096, 8192, 2)
KEYS = [b"key-%d" % number for number in range(6)]


def history(seed: int) -> tuple[Workload, int]:
    """Return a history with a failed append in it, and the clock before that."""
    workload = Workload(GEOMETRY, disk=fresh_region(GEOMETRY).survivor(seed), seed=seed)
    # Both containers belong to the pool, so that half an append holds a whole record of a put.
    assert workload.put(*KEYS[:4]) and workload.delete(*KEYS[1:4])
    start = workload.disk.clock
    workload.disk.faults = FaultPlan(Fault("write", 1, errno.EIO, label="index.log"))
    assert not workload.put(*KEYS[:3])
    workload.disk.faults = None
    assert isinstance(workload.recorder.failures.pop(), OSError)
    assert workload.put(*KEYS[3:])
    return workload, start


def hunt(seed: int, change: Callable[[list[Event]], None] | None = None) -> HuntReport:
    workload, start = history(seed)
    if change is not None:
        change(workload.disk.trace)
    options = {"start": start, "limit": 64, "nested_limit": 0, "seed": seed}
    return Hunt(workload.recorder, GEOMETRY, **options).run()


@pytest.mark.parametrize("seed", range(3))
def test_an_append_cut_short_never_comes_back_over_slots_that_others_have(seed: int) -> None:
    """The journal was cut by ftruncate without a sync, and the slots of the failed group handed
    out at once. A power loss that kept the lines of the failed append replayed them over the next
    group's data: an acknowledged value of an overwritten key was lost, and with verify=False
    another key's bytes came back."""
    assert hunt(seed).images > 250


def without_the_sync_of_the_cut(trace: list[Event]) -> None:
    cut = max(at for at, event in enumerate(trace) if event.kind == "length")
    assert (trace[cut + 1].kind, trace[cut + 1].node) == ("sync", trace[cut].node)
    # An event that changes nothing, so that all others keep their dates.
    trace[cut + 1] = Event("done", trace[cut].node, ident=-1)


def test_a_cut_that_is_not_synced_is_noticed() -> None:
    with pytest.raises(Breach):
        for seed in range(6):
            hunt(seed, without_the_sync_of_the_cut)
