"""The queue of durability "interval": what is seen, what bounds it, how it ends."""

from __future__ import annotations

import errno
import linecache
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from tablespace.layout import Geometry
from tablespace.testing import Disk, Fault, FaultPlan
from tablespace.testing.crash import open_simulated
from tablespace.testing.model import audit
from tablespace.write_queue import WriteQueue

import tablespace
from tablespace import Store, write_queue

Opener = Callable[..., Store]
GEOMETRY = Geometry(4096, 16384, 2)


def by_hand(evict: bool = False) -> Store:
    """Open a store without a thread whose puts are queued."""
    return open_simulated(Disk(), GEOMETRY, evict=evict, durability="interval")


def disk_of(store: Store) -> Disk:
    disk: Disk = store._directory.disk  # type: ignore[attr-defined]
    return disk


# Looking.


def test_every_way_of_looking_sees_the_queue() -> None:
    store = by_hand()
    store.put(b"both", b"old", durability="sync")
    store.put(b"index", b"i", durability="sync")
    store.put_many([(b"both", b"new"), (b"queue", b"q" * 100)])
    assert len(store) == 3 and set(store) == {b"both", b"index", b"queue"}
    assert b"queue" in store and b"none" not in store
    assert store.contains_many([b"queue", b"none", b"index"]) == [True, False, True]
    assert store.match_prefix([b"queue", b"both", b"none", b"index"]) == 2
    assert store.touch_many(iter([b"queue", b"none", b"both"])) == 2
    assert store.get(b"both") == b"new" and store[b"queue"] == b"q" * 100
    assert store.get_many([b"none", b"queue", b"index"]) == [None, b"q" * 100, b"i"]
    buffers = [bytearray(100), bytearray(5), bytearray(1)]
    assert store.get_many_into([b"queue", b"both", b"index"], buffers) == [100, 3, 1]
    assert buffers == [bytearray(b"q" * 100), bytearray(b"new\0\0"), bytearray(b"i")]
    stats = store.stats()
    assert (stats.queue_blocks, stats.gets, stats.hits) == (2, 8, 7)
    assert stats.queue_bytes == 2 * write_queue.ITEM_BYTES + 4 + 3 + 5 + 100
    audit(store)


@pytest.mark.parametrize("call", ["stat", "entries"])
def test_what_tells_of_slots_commits_the_queue_first(call: str) -> None:
    store = by_hand()
    store.put(b"k", b"v" * 7, metadata=b"m")
    assert store.stat(b"other") is None and store.stats().queue_blocks == 1
    if call == "stat":
        entry = store.stat(b"k")
        assert entry is not None and (entry.length, entry.metadata) == (7, b"m")
    else:
        assert list(store.entries()["length"]) == [7]
    assert store.stats().queue_blocks == 0


def test_a_short_or_unwritable_buffer_for_a_queued_value_is_refused() -> None:
    store = by_hand()
    store.put(b"k", b"v" * 10)
    store.put(b"empty", b"")
    with pytest.raises(ValueError, match=r"key 1 has 9 bytes, its value 10"):
        store.get_many_into([b"empty", b"k"], [bytearray(0), bytearray(9)])
    with pytest.raises(BufferError):
        store.get_into(b"k", b"0123456789")
    with pytest.raises(TypeError):
        store.get("k")  # type: ignore[arg-type]


def test_the_callers_buffer_is_its_own_again_when_the_put_returns() -> None:
    store = by_hand()
    memory = bytearray(b"first")
    store.put(b"k", memory)
    memory[:] = b"other"
    memory.extend(b"grown")
    assert store.get(b"k") == b"first"
    store.flush()
    assert store.get(b"k") == b"first"


def test_at_no_moment_of_a_commit_is_a_key_in_neither_place_or_older_than_before() -> None:
    store = by_hand()
    keys = [b"a", b"b", b"c"]
    store.put_many([(key, b"old") for key in keys], durability="sync")
    store.put_many([(key, b"new") for key in keys])
    seen: list[list[bytes | None]] = []
    lengths: list[int] = []

    def look(kind: str, label: str) -> None:
        if kind in ("write", "sync"):
            seen.append(store.get_many(keys))
            lengths.append(len(store))

    disk_of(store).observer = look
    store._queue.step()
    disk_of(store).observer = None
    assert len(seen) > 3
    assert all(each == [b"new"] * 3 for each in seen) and set(lengths) == {3}


def test_a_queue_emptied_before_its_commit_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The canary of the test above."""
    commit_all = WriteQueue._commit_all

    def forget_first(self: WriteQueue) -> int:
        items = [(key, item.value, item.metadata) for key, item in self._pending.items()]
        self._pending = {}
        commit_all(self)
        self._put(items)
        return len(items)

    monkeypatch.setattr(WriteQueue, "_commit_all", forget_first)
    with pytest.raises(AssertionError):
        test_at_no_moment_of_a_commit_is_a_key_in_neither_place_or_older_than_before()


# Order.


def test_values_of_one_key_queued_one_after_the_other_become_one_block() -> None:
    store = by_hand()
    for number in range(100):
        store.put(b"k", b"%d" % number)
    stats = store.stats()
    assert stats.queue_blocks == 1 and stats.queue_bytes == write_queue.ITEM_BYTES + 3
    store.flush()
    assert store.get(b"k") == b"99" and store.stats().puts == 1
    assert store.stats().queue_bytes == 0


@pytest.mark.parametrize("mode", ["sync", "none"])
def test_modes_mixed_on_one_key_keep_the_order_of_the_calls(mode: str) -> None:
    store = by_hand()
    for turn in range(4):
        store.put(b"k", b"queued %d" % turn)
        store.put(b"k", b"direct %d" % turn, durability=mode)
        assert store.get(b"k") == b"direct %d" % turn
        store.put(b"k", b"last %d" % turn)
        store._queue.step()
        assert store.get(b"k") == b"last %d" % turn
    store.put(b"k", b"queued")
    assert store.delete(b"k") and store.get(b"k") is None and not store.delete(b"k")
    store._queue.step()
    assert b"k" not in store
    audit(store)


def test_clear_takes_queued_keys_too() -> None:
    store = by_hand()
    store.put_many([(b"a/1", b"x"), (b"a/2", b"y"), (b"b/1", b"z")])
    assert store.clear(b"a/") == 2 and set(store) == {b"b/1"}
    assert store.clear() == 1 and len(store) == 0


# Bounds.


def test_a_full_queue_makes_the_caller_commit_it() -> None:
    store = by_hand()
    store._queue.limit_bytes = 2 * (write_queue.ITEM_BYTES + 1001)
    for number in range(7):
        store.put(b"%d" % number, b"v" * 1000)
        assert store.stats().queue_bytes <= store._queue.limit_bytes
        assert store.stats().queue_blocks <= 2
    assert store.stats().puts == 6
    store.put(b"0", b"v" * 4000)
    assert store.stats().queue_blocks == 1
    store.flush()
    assert len(store) == 7


def test_a_value_larger_than_the_queue_is_taken_when_that_is_empty() -> None:
    store = by_hand()
    store._queue.limit_bytes = 100
    assert store.put_many([(b"a", b"v" * 1000), (b"b", b"w" * 1000)]) == [True, True]
    assert store.stats().queue_blocks == 1 and len(store) == 2


# Errors of a commit that nobody waits for.


def test_blocks_without_room_are_dropped_counted_logged_once_and_told_by_the_flush(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = by_hand()
    store.put(b"0", b"old", durability="sync")
    store.put_many([(b"%d" % number, b"v") for number in range(12)])
    store._queue.step()
    store.put(b"again", b"v")
    store._queue.step()
    stats = store.stats()
    assert (stats.queue_dropped, stats.queue_blocks, stats.live) == (5, 0, 8)
    assert store.get(b"again") is None and store.get(b"0") in (b"old", b"v")
    assert caplog.text.count("were not stored") == 1
    with pytest.raises(tablespace.FullError, match="5 blocks acknowledged before"):
        store.flush()
    store.flush()
    audit(store)
    store.close()


def test_a_failed_journal_write_drops_the_group_and_the_store_goes_on() -> None:
    store = by_hand()
    disk = disk_of(store)
    store.put_many([(b"a", b"1"), (b"b", b"2")])
    disk.faults = FaultPlan(Fault("write", 1, errno.EIO, label="index.log"))
    store._queue.step()
    disk.faults = None
    store.put(b"c", b"3")
    with pytest.raises(OSError, match="2 blocks"):
        store.flush()
    assert store.get_many([b"a", b"b", b"c"]) == [None, None, b"3"]
    audit(store)


def test_each_thread_that_puts_is_told_once_of_what_was_dropped() -> None:
    """Told to whoever flushes first, the thread whose block was dropped would be promised it."""
    store = by_hand()
    for number in range(8):
        store.put(b"%d" % number, b"v")
    store.flush()
    told: dict[str, list[bool]] = {}
    both_put, dropped = threading.Barrier(2), threading.Barrier(3)

    def flush_fails() -> bool:
        try:
            store.flush()
        except tablespace.FullError:
            return True
        return False

    def work(name: str) -> None:
        store.put(name.encode(), b"no room")
        both_put.wait()
        dropped.wait()
        told[name] = [flush_fails(), flush_fails()]

    threads = [threading.Thread(target=work, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    dropped.wait()
    for thread in threads:
        thread.join()
    assert told == {"one": [True, False], "two": [True, False]}
    late: list[bool] = []
    other = threading.Thread(target=lambda: late.append(flush_fails()))
    other.start()
    other.join()
    assert late == [False]


def test_drops_that_no_flush_told_of_are_raised_by_the_close() -> None:
    store = by_hand()
    store.put_many([(b"%d" % number, b"v") for number in range(9)])
    with pytest.raises(tablespace.FailedError, match="1 blocks acknowledged") as caught:
        store.close()
    assert isinstance(caught.value.__cause__, tablespace.FullError)
    again = open_simulated(disk_of(store).survivor(), GEOMETRY)
    assert len(again) == 8
    store.close()


def test_a_commit_interrupted_in_the_thread_that_led_it_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = by_hand()
    put, calls = store._queue._put, []

    def interrupted(items: Any) -> list[bool]:
        calls.append(len(items))
        if len(calls) < 3:
            raise InterruptedError(errno.EINTR, "led elsewhere")
        return put(items)

    monkeypatch.setattr(store._queue, "_put", interrupted)
    store.put(b"k", b"v")
    store.flush()
    assert calls == [1, 1, 1] and store.stats().queue_dropped == 0
    assert store.get(b"k") == b"v"


def test_what_an_exception_from_outside_interrupts_stays_queued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = by_hand()
    store.put_many([(b"%d" % number, b"v") for number in range(3)])

    def interrupt(items: Any) -> list[bool]:
        store.put(b"1", b"newer")
        raise KeyboardInterrupt

    monkeypatch.setattr(store._queue, "_put", interrupt)
    with pytest.raises(KeyboardInterrupt):
        store.flush()
    monkeypatch.undo()
    assert store.stats().queue_blocks == 3
    assert store.get_many([b"0", b"1"]) == [b"v", b"newer"]
    store.flush()
    assert store.stats().queue_bytes == 0
    assert store.get_many([b"0", b"1", b"2"]) == [b"v", b"newer", b"v"]


def interrupt_at_line(nth: int, work: Callable[[], object]) -> bool:
    """Raise at the nth line that `work` runs in the queue; return whether it came so far."""
    left = nth

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename != write_queue.__file__:
            return None
        # A signal's handler runs after a call or at a jump: never between a lock and its block.
        text = linecache.getline(write_queue.__file__, frame.f_lineno)
        if event == "line" and "with self._mutex" not in text:
            left -= 1
            if left == 0:
                raise TimeoutError("a signal's exception")
        return trace

    old = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except TimeoutError:
        pass
    finally:
        sys.settrace(old)
    return left <= 0


def test_an_interrupt_at_any_line_of_the_queue_loses_nothing_acknowledged() -> None:
    """One that struck between the moves of a step would leave values where no step looks."""
    reached = True
    nth = 0
    while reached:
        nth += 1
        store = by_hand()
        store.put_many([(b"%d" % number, b"v%d" % number) for number in range(4)])
        reached = interrupt_at_line(nth, store.flush)
        interrupt_at_line(nth, lambda store=store: store.put(b"3", b"v4"))  # type: ignore[misc]
        keys = [b"%d" % number for number in range(4)]
        last = store.get(b"3")
        assert last in (b"v3", b"v4")
        assert store.get_many(keys) == [b"v0", b"v1", b"v2", last]
        store.put(b"0", b"newer")
        store.flush()
        assert store.get_many(keys) == [b"newer", b"v1", b"v2", last]
        assert store.stats().queue_bytes == 0
        assert store.delete(b"1")
        audit(store)
    assert nth > 40


# The thread, and the end.


def test_the_thread_commits_within_the_interval_and_ends_when_idle(open_small: Opener) -> None:
    store = open_small(durability="interval", flush_interval_ms=1)
    for turn in range(5):
        store.put(b"k%d" % turn, b"v")
        thread = store._queue._thread
        if thread is not None:
            assert not thread.daemon
            thread.join(30)
        assert store.stats().queue_blocks == 0
    assert store.stats().puts == 5


def test_a_close_does_not_wait_for_the_interval_and_drains_the_queue(open_small: Opener) -> None:
    store = open_small(durability="interval", flush_interval_ms=60_000)
    store.put_many([(b"%d" % number, b"v") for number in range(20)])
    thread = store._queue._thread
    assert thread is not None and thread.is_alive()
    store.close()
    assert not thread.is_alive()
    with pytest.raises(tablespace.ClosedError):
        store.put(b"late", b"v")
    with pytest.raises(tablespace.ClosedError):
        store._queue.add([(b"late", b"v", None)])
    assert len(open_small()) == 20


def test_without_a_thread_to_be_had_the_caller_commits(
    open_small: Opener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_small(durability="interval")

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    store.put(b"k", b"v")
    assert store.stats().queue_blocks == 0 and "committed by the caller" in caplog.text


# Changes that pass the queue by.


def delete_during_a_step(store: Store, monkeypatch: pytest.MonkeyPatch) -> list[bytes | None]:
    """Delete a key between its commit by a step and its leaving the queue; return what is read
    as soon as the delete has returned."""
    put, seen = store._queue._put, []

    def delete() -> None:
        store.delete(b"k")
        seen.append(store.get(b"k"))

    deleter = threading.Thread(target=delete)

    def linger(items: Any) -> list[bool]:
        stored = put(items)
        deleter.start()
        deleter.join(0.2)
        return stored

    store.put(b"k", b"v")
    monkeypatch.setattr(store._queue, "_put", linger)
    store._queue.step()
    deleter.join()
    return seen


def test_a_delete_that_returned_is_not_undone_by_a_step_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert delete_during_a_step(by_hand(), monkeypatch) == [None]


def test_a_delete_during_a_step_without_the_gate_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = by_hand()
    monkeypatch.setattr(WriteQueue, "directly", lambda self, keys, change: change())
    assert delete_during_a_step(store, monkeypatch) == [b"v"]
