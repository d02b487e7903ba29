"""What each durability acknowledges, what reads see meanwhile, what a flush and a close do."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from tablespace.layout import Geometry
from tablespace.testing import Disk
from tablespace.testing.crash import open_simulated
from tablespace.testing.model import audit

import tablespace
from tablespace import Store

Opener = Callable[..., Store]
GEOMETRY = Geometry(4096, 16384, 2)
unsynced = pytest.mark.parametrize("mode", ["interval", "none"])


def by_hand(evict: bool = False, mode: str = "sync") -> Store:
    """Open a store without a thread, on a disk in memory."""
    return open_simulated(Disk(), GEOMETRY, evict=evict, durability=mode)


def survivor(store: Store) -> Store:
    """Open what is left when the process dies now."""
    disk: Disk = store._directory.disk  # type: ignore[attr-defined]
    return open_simulated(disk.survivor(), GEOMETRY)


# Arguments.


@pytest.mark.parametrize("bad", ["fsync", "", None, 1, b"sync"])
def test_an_unknown_durability_is_refused_by_name_of_the_choices(
    open_small: Opener, bad: Any
) -> None:
    text = "must be one of sync, interval, none, not"
    with pytest.raises(ValueError, match=text):
        open_small(durability=bad)
    if bad is not None:
        store = open_small()
        with pytest.raises(ValueError, match=text):
            store.put(b"k", b"v", durability=bad)
        with pytest.raises(ValueError, match=text):
            store.put_many([(b"k", b"v")], durability=bad)
        assert b"k" not in store


@pytest.mark.parametrize("bad", [0, -1, 60_001, 1.5, "20", True])
def test_a_flush_interval_outside_its_domain_is_refused(open_small: Opener, bad: Any) -> None:
    with pytest.raises(ValueError, match="flush_interval_ms"):
        open_small(durability="interval", flush_interval_ms=bad)


@pytest.mark.parametrize("mode", ["sync", "interval", "none"])
def test_the_durability_chosen_is_said_once_and_shown(
    open_small: Opener, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "tablespace"):
        store = open_small(durability=mode, flush_interval_ms=7)
    said = [each for each in store.stats().choices if each.startswith(f"durability {mode}:")]
    assert len(said) == 1 and ("7 ms" in said[0]) == (mode == "interval")
    assert caplog.text.count(said[0]) == 1


@pytest.mark.parametrize("mode", ["sync", "interval", "none"])
def test_a_bad_value_is_refused_by_the_put_itself(open_small: Opener, mode: str) -> None:
    store = open_small(durability=mode)
    with pytest.raises(tablespace.ValueTooLargeError):
        store.put(b"k", bytes(4097))
    with pytest.raises(ValueError, match=r"1\.\.255"):
        store.put(b"", b"v")
    with pytest.raises(TypeError):
        store.put("k", b"v")  # type: ignore[arg-type]
    with pytest.raises(tablespace.ValueTooLargeError):
        store.put_many([(b"good", b"v"), (b"bad", bytes(4097))])
    store.flush()
    assert len(store) == 0


# What is there when.


@unsynced
def test_an_unsynced_put_is_read_at_once_and_durable_after_a_flush(mode: str) -> None:
    store = by_hand()
    store.put(b"k", b"old", metadata=b"1")
    syncs = store.stats().groups
    store.put(b"k", b"new", metadata=b"2", durability=mode)
    assert store.put_many([(b"a", b"1"), (b"b", b"")], durability=mode) == [True, True]
    assert store.stats().groups == syncs
    assert store.get_many([b"k", b"a", b"b", b"c"]) == [b"new", b"1", b"", None]
    assert survivor(store).get_many([b"k", b"a"]) == [b"old", None]
    store.flush()
    audit(store)
    again = survivor(store)
    assert again.get_many([b"k", b"a", b"b", b"c"]) == [b"new", b"1", b"", None]
    entry = again.stat(b"k")
    assert entry is not None and entry.metadata == b"2"


@pytest.mark.parametrize("mode", ["sync", "interval", "none"])
def test_the_stores_mode_is_that_of_puts_that_name_none(mode: str) -> None:
    store = by_hand(mode=mode)
    store.put(b"k", b"v")
    store[b"l"] = b"w"
    stats = store.stats()
    assert (stats.queue_blocks, stats.held_blocks) == {
        "sync": (0, 0),
        "interval": (2, 0),
        "none": (0, 2),
    }[mode]
    for other in ("sync", "interval", "none"):
        store.put(b"m", b"x", durability=other)
    store.flush()
    assert survivor(store).get_many([b"k", b"l", b"m"]) == [b"v", b"w", b"x"]


@unsynced
@pytest.mark.parametrize("call", ["sync put", "delete", "flush", "snapshot", "close"])
def test_other_changes_make_held_puts_durable_on_their_way(mode: str, call: str) -> None:
    store = by_hand()
    store.put(b"k", b"v", durability=mode)
    disk: Disk = store._directory.disk  # type: ignore[attr-defined]
    if call == "sync put":
        store.put(b"k" if mode == "interval" else b"other", b"new")
    elif call == "delete":
        store.delete(b"k" if mode == "interval" else b"other")
    else:
        getattr(store, call)()
    found = open_simulated(disk.survivor(), GEOMETRY).get(b"k")
    changed = {"sync put": b"new", "delete": None}.get(call, b"v")
    assert found == (changed if mode == "interval" else b"v")


def test_held_puts_are_counted_until_they_are_durable() -> None:
    store = by_hand()
    store.put_many([(b"a", b"x" * 100), (b"b", b"y" * 50)], durability="none")
    store.put(b"a", b"z" * 10, durability="none")
    stats = store.stats()
    assert (stats.held_blocks, stats.held_bytes, stats.limbo, stats.live) == (3, 160, 1, 2)
    audit(store)
    store.flush()
    stats = store.stats()
    assert (stats.held_blocks, stats.held_bytes, stats.limbo) == (0, 0, 0)
    audit(store)


def test_a_batch_of_both_kinds_is_durable_for_all() -> None:
    store = by_hand()
    requests = [
        store._writer._request([(b"a", b"1")], True),
        store._writer._request([(b"b", b"2")]),
    ]
    store._committer._commit_puts(requests)
    for request in requests:
        request.release()
    assert store.stats().held_blocks == 0
    assert survivor(store).get_many([b"a", b"b"]) == [b"1", b"2"]


def test_held_puts_into_a_full_region_are_refused_like_others() -> None:
    store = by_hand()
    stored = store.put_many([(b"%d" % number, b"v") for number in range(10)], durability="none")
    assert stored == [True] * 8 + [False] * 2
    with pytest.raises(tablespace.FullError):
        store.put(b"more", b"v", durability="none")
    assert store.delete(b"0")
    store.put(b"more", b"v", durability="none")
    audit(store)


def test_a_value_found_damaged_while_records_are_held_is_dropped_after_its_put() -> None:
    store = by_hand()
    store.put(b"k", b"v" * 100, durability="none")
    disk: Disk = store._directory.disk  # type: ignore[attr-defined]
    entry = store.stat(b"k")
    assert entry is not None
    node = disk.find(f"containers/{entry.container:04d}.bin")
    assert node is not None
    disk.damage(node, entry.slot * 4096, b"x")
    assert store.get(b"k") is None
    store.put(b"other", b"v", durability="none")
    store.flush()
    again = survivor(store)
    assert list(again) == [b"other"]
    audit(again, recovered=True)


@pytest.mark.parametrize("pinned_until", ["before the flush", "after the flush"])
def test_a_slot_that_a_held_record_freed_waits_for_reader_and_flush(pinned_until: str) -> None:
    from tablespace.io.read_batch import ReadBatch

    store = by_hand()
    store.put(b"k", b"old")
    batch = ReadBatch(store._index, store._devices, 4096, True)
    batch.start([b"k"], None)
    store.put(b"k", b"new", durability="none")
    assert store.stats().limbo == 1
    if pinned_until == "before the flush":
        batch.finish()
        assert store.stats().limbo == 1
        store.flush()
    else:
        store.flush()
        assert store.stats().limbo == 1
        batch.finish()
    audit(store)
    assert store.stats().limbo == 0 and store.stats().free == 7


@unsynced
def test_a_real_region_keeps_what_was_flushed_or_closed(open_small: Opener, mode: str) -> None:
    items = [(b"%d" % number, b"%d" % number * 500) for number in range(50)]
    with open_small(durability=mode) as store:
        store.put_many(items)
        store.flush()
    with open_small(durability=mode) as store:
        assert store.get_many([key for key, _ in items]) == [value for _, value in items]
        store.put_many([(key, b"new") for key, _ in items[:10]])
    assert open_small().get_many([key for key, _ in items[:11]])[9:] == [b"new", b"10" * 500]
