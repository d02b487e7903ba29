"""Where two features meet: queued values, held records, policies, compaction, damage, closing."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from tablespace._core.key_index import KeyIndex
from tablespace._core.slot_allocator import SlotAllocator
from tablespace.compaction import Compactor
from tablespace.io.commit_group import CommitGroup
from tablespace.io.put_request import PutRequest
from tablespace.layout import Geometry
from tablespace.testing import Disk
from tablespace.testing.crash import open_simulated
from tablespace.testing.model import audit

import tablespace
from tablespace import Store, compaction, reserve

Opener = Callable[..., Store]
GEOMETRY = Geometry(4096, 65536, 2)
WAIT_S = 30.0


class Awkward(bytes):
    """Bytes that compare and hash as they like."""

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


def damage(store: Store, key: bytes) -> None:
    """Change a value on the simulated disk."""
    disk: Disk = store._directory.disk  # type: ignore[attr-defined]
    entry = store.stat(key)
    assert entry is not None
    node = disk.find(f"containers/{entry.container:04d}.bin")
    assert node is not None
    disk.damage(node, entry.slot * 4096, b"x")


def survivor(store: Store) -> Store:
    """Open what is left when the process dies now."""
    disk: Disk = store._directory.disk  # type: ignore[attr-defined]
    return open_simulated(disk.survivor(), GEOMETRY)


def in_a_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


# Keys of the caller's own making.


def test_a_damaged_value_read_by_a_key_of_a_subclass_blocks_no_later_commit() -> None:
    """The key went as it was into the record of the drop, which took nothing but bytes: every
    commit after that failed, and the store could not be closed."""
    store = open_simulated(Disk(), GEOMETRY)
    store.put(b"k", b"v" * 100)
    damage(store, b"k")
    assert store.get(Awkward(b"k")) is None
    store.put(b"other", b"1")
    store.flush()
    assert list(survivor(store)) == [b"other"]
    store.close()


@pytest.mark.parametrize("mode", ["interval", "none"])
def test_an_awkward_key_is_queued_and_found_by_its_bytes(mode: str) -> None:
    """A value queued under such a key was found by nobody, and its delete passed it by."""
    store = open_simulated(Disk(), GEOMETRY, durability=mode)
    store.put(Awkward(b"k"), b"1")
    store.put(Awkward(b"k"), b"2")
    assert store.get(b"k") == store.get(Awkward(b"k")) == b"2"
    assert b"k" in store and Awkward(b"k") in store and len(store) == 1
    assert store.delete(Awkward(b"k")) and store.get(b"k") is None
    store.put(Awkward(b"k"), b"3")
    assert asyncio.run(store.adelete_many([Awkward(b"k"), Awkward(b"k")])) == 1
    store.close()


# Awaited calls and the other durabilities.


def test_an_awaited_read_finds_what_is_queued(open_small: Opener) -> None:
    """It asked the queue to copy into the mark that stands for "make bytes": a TypeError."""
    store = open_small(durability="interval", flush_interval_ms=60_000)
    store.put_many([(b"a", b"1"), (b"b", b"")])
    buffer = bytearray(4)

    async def work() -> list[Any]:
        return await asyncio.gather(
            store.aget(b"a"),
            store.aget_many([b"b", b"x"]),
            store.aget_into(b"a", buffer),
        )

    assert asyncio.run(work()) == [b"1", [b"", None], 1]
    assert buffer[:1] == b"1" and store.stats().queue_blocks == 2


def test_an_awaited_put_may_ask_for_less(open_small: Opener) -> None:
    store = open_small(flush_interval_ms=60_000)

    async def work() -> None:
        await store.aput(b"q", b"1", durability="interval")
        assert store.stats().queue_blocks == 1 and store.stats().held_blocks == 0
        assert await store.aput_many([(b"h", b"1"), (b"i", b"2")], durability="none") == [True] * 2
        assert store.stats().held_blocks == 2
        with pytest.raises(ValueError, match="must be one of sync, interval, none, not 'fsync'"):
            await store.aput(b"k", b"1", durability="fsync")
        await store.aflush()
        assert store.stats().held_blocks == store.stats().queue_blocks == 0
        await store.aput(b"s", b"1")
        assert store.stats().held_blocks == store.stats().queue_blocks == 0
        await store.aput(b"q", b"2", durability="interval")
        assert await store.adelete(b"q") and await store.aget(b"q") is None

    asyncio.run(work())
    assert sorted(store) == [b"h", b"i", b"s"]


def test_awaited_puts_served_together_share_one_durability(
    open_small: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_small(flush_interval_ms=60_000)
    modes: list[tuple[str | None, int]] = []
    put_many = store._writer.put_many

    def note(items: Any, mode: str | None) -> list[bool]:
        modes.append((mode, len(items)))
        return put_many(items, mode)

    monkeypatch.setattr(store._writer, "put_many", note)
    asked = ["none", "none", "interval", None, "sync", "none"]

    async def work() -> None:
        puts = [store.aput(b"%d" % at, b"v", durability=mode) for at, mode in enumerate(asked)]
        await asyncio.gather(*puts)

    asyncio.run(work())
    assert modes == [("none", 2), ("interval", 1), (None, 1), ("sync", 1), ("none", 1)]
    assert store.stats().held_blocks == 1


def test_a_value_that_cannot_be_unpacked_is_no_matter_of_reads_served_with_it(
    open_small: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_small(slot_bytes="16K", compression="lz4")
    store.put_many([(b"packed", b"a" * 16000), (b"plain", b"1")])
    store.close()
    for name in ("lz4", "lz4.block"):
        monkeypatch.setitem(sys.modules, name, None)
    store = open_small(slot_bytes="16K")

    async def work() -> list[Any]:
        calls = [store.aget(b"plain"), store.aget(b"packed"), store.aget(b"plain")]
        return await asyncio.gather(*calls, return_exceptions=True)

    first, packed, last = asyncio.run(work())
    assert first == last == b"1" and isinstance(packed, tablespace.MissingCodecError)


# Policies.


class Meddler:
    """A policy that calls the store when it is told of a use."""

    def __init__(self) -> None:
        self.meddle: Callable[[], object] = lambda: None
        self.problems: list[str] = []

    def inserted(self, key: bytes, slot_bytes: int) -> None:
        try:
            self.meddle()
        except RuntimeError as error:
            self.problems.append(str(error))

    def used(self, key: bytes) -> None: ...
    def removed(self, key: bytes) -> None: ...
    def victims(self, slot_bytes: int, wanted: int) -> Iterable[bytes]:
        return []


@pytest.mark.parametrize("call", ["put", "delete", "entries", "snapshot", "flush"])
def test_a_policy_that_uses_a_store_with_a_queue_is_refused_not_deadlocked(
    open_small: Opener, call: str
) -> None:
    """It was told within a commit, and waited for that commit to be over."""
    policy = Meddler()
    store = open_small(eviction=policy, durability="interval", flush_interval_ms=60_000)
    calls: dict[str, Callable[[], object]] = {
        "put": lambda: store.put(b"inner", b"x"),
        "delete": lambda: store.delete(b"outer"),
        "entries": store.entries,
        "snapshot": store.snapshot,
        "flush": store.flush,
    }

    def meddle() -> None:
        policy.meddle = lambda: None
        calls[call]()

    store.put(b"queued", b"1")
    policy.meddle = meddle
    thread = in_a_thread(lambda: store.put(b"outer", b"x", durability="sync"))
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert "uses the store that asks it" in policy.problems[0]
    assert store.get_many([b"outer", b"queued", b"inner"]) == [b"x", b"1", None]


# Held records.


def test_a_repairs_tests_begin_when_nothing_is_held() -> None:
    """A failed sync of a test concerns the slot alone only while no other write waits for one."""
    store = open_simulated(Disk(), GEOMETRY)
    store.put(b"k", b"v", durability="none")
    assert store._committer.retest() == []
    assert store.stats().held_blocks == 0
    assert list(survivor(store)) == [b"k"]


def test_records_held_during_a_compaction_fit_a_disk_that_fills_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their space was fetched in the old journal; the new one had none for them, and what was
    acknowledged could not become durable any more."""
    monkeypatch.setattr(reserve, "journal_reserve_bytes", lambda snapshot_bytes: 4096)
    store = open_simulated(Disk(), GEOMETRY)
    disk: Disk = store._directory.disk  # type: ignore[attr-defined]
    stage = compaction.stage_snapshot
    items = [(b"%03d" % number * 80, b"v", b"m" * 250) for number in range(16)]

    def fill(*arguments: Any) -> int:
        size = stage(*arguments)
        assert all(store.put_many(items, durability="none"))
        disk.full = True
        return size

    monkeypatch.setattr(compaction, "stage_snapshot", fill)
    try:
        store.snapshot()
    except OSError:
        pass  # Too full for a compaction; that loses nothing.
    monkeypatch.undo()
    store.flush()
    assert store.stats().held_blocks == 0
    audit(store)
    assert len(survivor(store)) == len(items)


# Files.


def test_after_a_clear_no_record_names_a_value_that_was_found_damaged() -> None:
    """The record of its drop waited for the next group, and went into the fresh journal."""
    store = open_simulated(Disk(), GEOMETRY)
    disk: Disk = store._directory.disk  # type: ignore[attr-defined]
    store.put(b"secret", b"v" * 100)
    damage(store, b"secret")
    assert store.get(b"secret") is None
    store.clear(b"sec")
    store.put(b"other", b"1")
    files = [name for name in store._directory.list() if name.startswith("index.")]
    assert "index.log" in files
    for name in files:
        assert b"secret".hex().encode() not in disk.read_file(name), name


def test_closing_waits_for_a_snapshot_that_another_thread_writes(
    open_small: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock was let go while it was still at files which are then another writer's."""
    store = open_small()
    begun, go_on = threading.Event(), threading.Event()
    stage = compaction.stage_snapshot

    def pause(*arguments: Any) -> int:
        begun.set()
        assert go_on.wait(WAIT_S)
        return stage(*arguments)

    monkeypatch.setattr(compaction, "stage_snapshot", pause)
    ends: list[type[BaseException]] = []

    def snapshot() -> None:
        try:
            store.snapshot()
        except tablespace.TablespaceError as error:
            ends.append(type(error))

    writing = in_a_thread(snapshot)
    assert begun.wait(WAIT_S)
    # A store that has failed writes no snapshot of its own, for which it would wait.
    store._committer.failed = OSError(5, "a sync failed")
    closing = in_a_thread(store.close)
    closing.join(0.3)
    assert closing.is_alive()
    with pytest.raises(tablespace.BusyError):
        tablespace.open(tmp_path / "region")
    go_on.set()
    closing.join(WAIT_S)
    writing.join(WAIT_S)
    assert not closing.is_alive() and not writing.is_alive()
    assert ends and issubclass(ends[0], (tablespace.ClosedError, tablespace.FailedError))
    assert len(open_small()) == 0


def test_finishing_waits_for_nothing_when_nothing_runs() -> None:
    store = open_simulated(Disk(), GEOMETRY)
    compactor: Compactor = store._compactor
    compactor.finish()
    store.snapshot()
    compactor.finish()
    assert store.stats().compactions == 1


# Requests that are tried again, and forks.


def test_a_put_tried_again_gives_back_no_slot_of_its_first_try() -> None:
    """Tried again after the journal was full, and failing before it had slots, it gave back those
    of the first try: another value's by then."""
    allocator = SlotAllocator(1, 16 * 4096, [4096])
    index = KeyIndex(allocator)
    request = PutRequest(4096, 1)
    request.add(b"k", b"v")
    first = CommitGroup([request], [None], allocator)  # type: ignore[list-item]
    assert first.place() == 1
    first.abandon(28)
    assert allocator.reserve_slots(1) == [(0, 0)]
    CommitGroup([request], [None], allocator).abandon(28)  # type: ignore[list-item]
    assert allocator.used_slots(0) == 1 and len(index) == 0
    request.release()


def test_a_child_forked_while_another_thread_closes_a_follower_does_not_hang(
    open_small: Opener, tmp_path: Path
) -> None:
    store = open_small()
    follower = tablespace.open(tmp_path / "region", read_only=True)
    held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with follower._closing:
            held.set()
            go_on.wait(WAIT_S)

    thread = in_a_thread(hold)
    assert held.wait(WAIT_S)
    child = os.fork()
    if child == 0:
        closing = in_a_thread(follower.close)
        closing.join(WAIT_S)
        os._exit(closing.is_alive())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    go_on.set()
    thread.join(WAIT_S)
    follower.close()
    assert len(store) == 0
