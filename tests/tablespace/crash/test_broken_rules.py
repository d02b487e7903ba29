"""Disks and stores that break a rule of durability, and the crash tests notice every one.

A crash test that cannot fail is decoration: here each must fail.  The switches that ship with the
kit are tried in test_rules_are_found.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tablespace._core.aligned_buffer import AlignedBuffer
from tablespace._core.victim_list import VictimList
from tablespace.commit import Committer
from tablespace.layout import Geometry
from tablespace.testing import (
    Breach,
    Hunt,
    HuntReport,
    Workload,
)
from tablespace.testing.broken import broken
from tablespace.testing.workload import fresh_region

GEOMETRY = Geometry(4096, 16384, 2)
KEYS = [b"key-%d" % number for number in range(5)]


def history(seed: int = 1, evict: bool = False, snapshots: bool = True) -> Workload:
    workload = Workload(GEOMETRY, disk=fresh_region(GEOMETRY, evict=evict), evict=evict, seed=seed)
    keys = [b"key-%02d" % number for number in range(14)] if evict else KEYS
    if snapshots:
        workload.random(18, keys)
    else:
        for number in range(12):
            workload.put(*workload.chance.sample(keys, 1 + number % 3))
            workload.delete(workload.chance.choice(keys))
    return workload


def hunt(workload: Workload, **options: Any) -> HuntReport:
    options = {"limit": 24, "nested_limit": 0, **options}
    return Hunt(workload.recorder, GEOMETRY, **options).run()


def starts(*names: str) -> Callable[[str], bool]:
    return lambda label: label.startswith(names)


@pytest.mark.parametrize(
    "rule, files",
    [
        ("sync of data before the journal", ("containers/",)),
        ("sync of the journal before the acknowledgement", ("index.log",)),
        ("sync of the snapshot before its rename", ("index.snapshot",)),
        ("sync of the directory after a rename", ("/",)),
    ],
)
def test_a_skipped_sync_is_noticed(rule: str, files: tuple[str, ...]) -> None:
    with pytest.raises(Breach):
        hunt(history(), ignore_sync=starts(*files))
    assert hunt(history()).images > 100


@pytest.mark.parametrize("verify, wrong", [(True, False), (False, True)])
def test_without_the_data_sync_only_checksums_keep_reads_true(verify: bool, wrong: bool) -> None:
    """Order and checksum are both needed: a disk that lies about data syncs gives misses where
    checksums are verified, and another value's bytes where they are not."""
    workload = history(seed=4, snapshots=False)
    options = {"ignore_sync": starts("containers/"), "truth_only": True, "verify": verify}
    if wrong:
        with pytest.raises(Breach, match="never stored"):
            hunt(workload, **options)
    else:
        assert hunt(workload, **options).images > 100


def test_on_a_disk_that_lies_about_every_sync_nothing_is_ever_wrong() -> None:
    images = 0
    for seed in range(3):
        workload = history(seed)
        report = hunt(
            workload,
            ignore_sync=lambda label: True,
            truth_only=True,
            ignore_from=workload.disk.clock // 3,
            seed=seed,
        )
        images += report.images
    assert images > 500


def evict_without_record(self: Committer, pool: int, wanted: int) -> None:
    """Making room that frees slots at once and journals the evictions only with the group."""
    short = wanted - self.allocator.room(pool)
    if short > 0:
        VictimList(self.index, short, pool).publish()


def test_an_eviction_without_its_record_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Committer, "_make_room", evict_without_record)
    workload = history(evict=True, snapshots=False)
    with pytest.raises(Breach):
        hunt(workload)


def seen_too_early(workload: Workload) -> list[str]:
    """Overwrite keys while an observer reads at every operation of the disk; return what it saw
    that was not durable then."""
    store = workload.recorder.store
    assert store is not None
    early: list[str] = []
    key = KEYS[0]
    disk = workload.disk
    workload.put(key)
    for _ in range(4):
        old = store.get(key)
        durable_from = disk.clock

        def look(kind: str, label: str, old: bytes | None = old) -> None:
            if kind in ("write", "sync") and store.get(key) != old:
                early.append(f"before {kind} of {label}")

        disk.observer = look
        workload.put(key)
        disk.observer = None
        assert disk.clock > durable_from and store.get(key) != old
    return early


def test_nothing_is_visible_before_its_record_is_durable() -> None:
    assert seen_too_early(Workload(GEOMETRY)) == []


def test_a_value_published_before_its_record_is_durable_is_noticed() -> None:
    with broken("publish_before_commit"):
        assert seen_too_early(Workload(GEOMETRY)) != []


def test_a_buffer_changed_in_flight_is_noticed() -> None:
    """The canary of the simulated queue: it must see a source changed before its completion."""
    workload = Workload(GEOMETRY, io_mode="direct")
    store = workload.recorder.store
    assert store is not None
    buffer = AlignedBuffer(4096)
    view = memoryview(buffer)

    def scribble(kind: str, label: str) -> None:
        if kind == "reap":
            view[0] = 1 - view[0]

    workload.disk.observer = scribble
    store.put(b"key", view)
    workload.disk.observer = None
    assert any("changed in flight" in text for text in workload.disk.violations)
    assert store.get(b"key") is None
