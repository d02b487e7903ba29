"""Power loss over histories in which everything happens: modes, bad slots, a full disk, pools."""

from __future__ import annotations

import random

import pytest
from tablespace.errors import FailedError, FullError
from tablespace.layout import Geometry
from tablespace.testing import Hunt, HuntReport, Workload
from tablespace.testing.model import audit
from tablespace.testing.workload import fresh_region

from tablespace import held, reserve

SHAPES = [
    [Geometry((4096, 12288), 12288, count) for count in (3, 5, 6)],
    [Geometry((4096, 8192, 16384), 16384, count) for count in (3, 4, 6)],
    [Geometry(4096, 16384, count) for count in (2, 3, 4)],
]
MODES = [("none",), ("interval",), ("sync", "none"), ("sync", "interval", "none")]
KEYS = [b"key-%02d" % number for number in range(10)]


def hunted(seed: int, patch: pytest.MonkeyPatch, **options: int) -> HuntReport:
    chance = random.Random(seed)
    shapes = chance.choice(SHAPES)
    full = chance.random() < 0.5
    if chance.random() < 0.5:
        patch.setattr(reserve, "journal_reserve_bytes", lambda snapshot_bytes: 4096)
    if chance.random() < 0.3:
        patch.setattr(held, "HELD_LINE_BYTES", 600)
    evict = chance.random() < 0.5
    workload = Workload(
        shapes[1],
        disk=fresh_region(shapes[1], evict=evict, seed=seed),
        evict=evict,
        eviction=chance.choice(("lru", "fifo")),
        compression=chance.choice((None, "lz4")),
        io_mode=chance.choice(("buffered", "direct")),
        seed=seed,
    )
    for part in range(4):
        workload.disk.full = full and part % 2 == 1
        workload.random(
            6,
            KEYS,
            modes=MODES[seed % 4],
            shapes=() if full else shapes,
            spoil=3,
            clear=True,
            damage=True,
            clean=seed % 3 > 0,
        )
        store = workload.recorder.store
        assert store is not None
        audit(store)
    # More keys than slots: blocks without room are dropped, and a flush or close says so.
    assert all(isinstance(each, (FullError, FailedError)) for each in workload.recorder.failures)
    assert workload.disk.violations == []
    report = Hunt(workload.recorder, workload.geometry, seed=seed, **options).run()
    print(f"seed {seed}: {report}")
    return report


def test_every_promise_holds_where_everything_happens() -> None:
    images = 0
    for seed in range(4):
        with pytest.MonkeyPatch.context() as patch:
            images += hunted(
                seed, patch, limit=6, nested_limit=2, nested_every=24, stride=9
            ).images
    assert images > 300


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(600, 608))
def test_hunt_over_many_combined_histories(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hunted(seed, monkeypatch, limit=12, nested_limit=3, nested_every=12).images > 50
