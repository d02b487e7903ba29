"""Crashes of a region whose victims somebody else names: the promises are those of any other."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from tablespace.eviction import EvictionPolicy
from tablespace.layout import Geometry
from tablespace.testing.crash import Hunt
from tablespace.testing.model import audit
from tablespace.testing.workload import Workload

GEOMETRY = Geometry([4096, 8192], 16384, 3)
KEYS = [b"key-%d" % number for number in range(14)]


class Erratic:
    """Names keys at random: some that are not there, some twice, sometimes none, or raises."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)

    def inserted(self, key: bytes, slot_bytes: int) -> None:
        if self.chance.random() < 0.1:
            raise ValueError("no")

    def used(self, key: bytes) -> None: ...

    def removed(self, key: bytes) -> None: ...

    def victims(self, slot_bytes: int, wanted: int) -> Iterable[bytes]:
        yield from self.chance.choices(KEYS, k=self.chance.randrange(4))
        if self.chance.random() < 0.3:
            raise ValueError("no")


@pytest.mark.parametrize("order", ["fifo", "erratic"])
@pytest.mark.parametrize("seed", [1, 2])
def test_no_crash_breaks_a_promise_whoever_names_the_victims(order: str, seed: int) -> None:
    eviction: str | EvictionPolicy = order if order == "fifo" else Erratic(seed)
    workload = Workload(GEOMETRY, evict=True, eviction=eviction, seed=seed)
    workload.random(40, KEYS)
    store = workload.recorder.store
    assert store is not None
    audit(store)
    report = Hunt(workload.recorder, GEOMETRY, limit=6, stride=7, seed=seed).run()
    assert report.images > 100
