"""The disk fills while a compaction is under way: what it had taken of the reserve is kept."""

from __future__ import annotations

from typing import Any

import pytest
from tablespace.layout import Geometry
from tablespace.testing import Hunt, Workload
from tablespace.testing.model import audit
from tablespace.testing.workload import fresh_region

from tablespace import compaction, reserve

GEOMETRY = Geometry(4096, 1 << 18, 2)
KEYS = [b"key-%02d" % number for number in range(60)]


def filled_during_a_compaction(monkeypatch: pytest.MonkeyPatch, durability: str) -> Workload:
    """Puts while a snapshot is written, more than the next journal has space for; then no room."""
    monkeypatch.setattr(reserve, "journal_reserve_bytes", lambda snapshot_bytes: 4096)
    workload = Workload(GEOMETRY, disk=fresh_region(GEOMETRY))
    real = compaction.stage_snapshot

    def stage(*arguments: Any) -> int:
        for key in KEYS:
            assert workload.put(key, durability=durability)
        workload.disk.full = True
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(compaction, "stage_snapshot", stage)
        workload.snapshot()
    workload.recorder.failures.clear()
    return workload


@pytest.mark.parametrize("durability", ["sync", "none"])
def test_a_full_disk_blocks_nothing_after_a_rotation_that_found_no_room(
    monkeypatch: pytest.MonkeyPatch, durability: str
) -> None:
    """Space for the held records was taken in the old journal only: in the new one they did not
    fit, so every flush and delete failed, and the compaction that should make room did too. And
    a rotation that was called off gave the reserved space of its snapshot away."""
    workload = filled_during_a_compaction(monkeypatch, durability)
    store = workload.recorder.store
    assert store is not None
    for _ in range(2):
        assert workload.flush()
        assert workload.delete(KEYS[3]) and workload.snapshot() and workload.put(KEYS[3])
    assert store.stats().held_blocks == 0 and workload.recorder.failures == []
    audit(store)
    hunt = Hunt(workload.recorder, GEOMETRY, limit=4, nested_limit=0, stride=12)
    assert hunt.run().images > 50
