"""The asyncio calls: many at once, errors apart, cancelled, closed, over several loops."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tablespace.layout import Geometry
from tablespace.testing import Disk, Fault, FaultPlan
from tablespace.testing.crash import open_simulated
from tablespace.testing.model import audit

import tablespace
from tablespace import Store

Opener = Callable[..., Store]
KEYS = [b"key-%04d" % number for number in range(1000)]
SIZES = {"max_bytes": "8M", "slot_bytes": "4K"}


def value_of(key: bytes) -> bytes:
    return key * (1 + key[-1] % 400)


def filled(open_small: Opener, count: int = 1000) -> Store:
    store = open_small(**SIZES)
    assert all(store.put_many((key, value_of(key)) for key in KEYS[:count]))
    return store


class Held:
    """All of a store's read contexts taken away: reads wait until they are given back."""

    def __init__(self, store: Store) -> None:
        self.loans = [store._readers.lending.lend() for _ in range(8)]

    def give_back(self) -> None:
        while self.loans:
            self.loans.pop().end()


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(20_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never came")


def test_a_thousand_puts_gets_and_deletes_at_once(open_small: Opener) -> None:
    store = open_small(**SIZES)
    before = threading.active_count()

    async def work() -> int:
        await asyncio.gather(*(store.aput(key, value_of(key)) for key in KEYS))
        threads = threading.active_count()
        found = await asyncio.gather(*(store.aget(key) for key in KEYS))
        assert found == [value_of(key) for key in KEYS]
        assert (
            await asyncio.gather(*(store.aget(b"absent" + key) for key in KEYS)) == [None] * 1000
        )
        gone = await asyncio.gather(*(store.adelete(key) for key in KEYS[:300] * 2))
        assert gone.count(True) == 300
        return max(threads, threading.active_count())

    assert asyncio.run(work()) <= before + 2
    assert sorted(store) == KEYS[300:]
    # Shared: not a commit for each put, nor a batch for each read.
    assert store.stats().groups < 100
    audit(store)


def test_every_call_does_what_its_namesake_does(open_small: Opener) -> None:
    store = open_small(slot_bytes=["4K", "16K"])

    async def work() -> None:
        await store.aput(b"a", b"1", metadata=b"m")
        assert await store.aput_many([(b"b", bytes(9000)), (b"c", b"")]) == [True, True]
        buffer, aligned = bytearray(9000), tablespace.AlignedBuffer(16384)
        assert await store.aget_into(b"a", buffer) == 1 and buffer[:1] == b"1"
        assert await store.aget_many([b"c", b"x", b"a"]) == [b"", None, b"1"]
        into = await store.aget_many_into([b"b", b"x", b"c"], [aligned, buffer, bytearray()])
        assert into == [9000, None, 0]
        assert await store.aget_many([]) == [] and await store.aput_many([]) == []
        assert await store.adelete(b"a") and not await store.adelete(b"a")
        assert await store.adelete_many([b"b", b"c", b"b", b"x"]) == 2
        await store.aflush()
        with pytest.raises(ValueError, match="2 keys, but 1 buffers"):
            await store.aget_many_into([b"a", b"b"], [buffer])

    asyncio.run(work())
    assert len(store) == 0 and store.stat(b"a") is None


def test_writes_of_one_loop_happen_in_the_order_of_the_calls(open_small: Opener) -> None:
    store = open_small()

    async def work() -> None:
        calls: list[Any] = []
        for number in range(300):
            calls.append(store.aput(b"k", b"%d" % number))
            if number % 7 == 0:
                calls.append(store.adelete(b"k"))
        await asyncio.gather(*calls)

    asyncio.run(work())
    assert store.get(b"k") == b"299"


def test_errors_of_calls_served_together_are_kept_apart(open_small: Opener) -> None:
    store = filled(open_small, 100)
    held = Held(store)
    short, good = bytearray(3), bytearray(4096)

    async def work() -> list[Any]:
        gate = asyncio.gather(
            store.aget(KEYS[0]),
            store.aget_into(KEYS[1], short),
            store.aget_into(KEYS[2], good),
            store.aget("text"),
            store.aget(b""),
            store.aget_into(KEYS[3], b"read-only"),
            store.aget_into(KEYS[3], 7),
            store.aput(b"large", bytes(4097)),
            store.aput(b"fine", b"1"),
            store.aput(b"fine too", b"2"),
            store.aput(b"k" * 256, b"3"),
            store.aput(b"no buffer", 3),
            store.aput(b"meta", b"4", metadata=bytes(256)),
            store.adelete(None),
            store.adelete(KEYS[99]),
            return_exceptions=True,
        )
        await asyncio.sleep(0.01)
        held.give_back()
        return list(await gate)

    found = asyncio.run(work())
    assert found[0] == value_of(KEYS[0]) and found[2] == len(value_of(KEYS[2]))
    assert good[: found[2]] == value_of(KEYS[2])
    assert isinstance(found[1], ValueError)
    assert f"has 3 bytes, its value {len(value_of(KEYS[1]))}" in str(found[1])
    kinds = [type(each).__name__ for each in found]
    assert kinds[3:8] == [
        "TypeError",
        "ValueError",
        "BufferError",
        "TypeError",
        "ValueTooLargeError",
    ]
    assert found[8:10] == [None, None] and store.get_many([b"fine", b"fine too"]) == [b"1", b"2"]
    assert kinds[10:14] == ["ValueError", "TypeError", "ValueError", "TypeError"]
    assert found[14] is True


def test_one_blocks_write_error_is_not_its_neighbours() -> None:
    disk = Disk(seed=3)
    store = open_simulated(disk, Geometry(4096, 65536, 2))
    disk.faults = FaultPlan(
        Fault("write", 2, errno.EIO, label="containers"),
        # The bad block's second try, alone.
        Fault("write", 6, errno.EIO, label="containers"),
    )

    async def work() -> list[Any]:
        calls = [store.aput(key, key) for key in KEYS[:4]]
        return list(await asyncio.gather(*calls, return_exceptions=True))

    found = asyncio.run(work())
    failed = [key for key, each in zip(KEYS, found, strict=False) if each is not None]
    assert [type(each) for each in found].count(OSError) == len(failed) == 1
    disk.faults = None
    assert [key for key in KEYS[:4] if key not in store] == failed
    audit(store)
    store.close()


def test_full_is_an_error_of_the_one_put_that_found_no_room(open_small: Opener) -> None:
    store = open_small(max_bytes="64K", slot_bytes="4K")
    count = store.stats().capacity

    async def work() -> list[Any]:
        calls = [store.aput(key, key) for key in KEYS[: count + 3]]
        return list(await asyncio.gather(*calls, return_exceptions=True))

    found = asyncio.run(work())
    assert [each is None for each in found].count(True) == count
    assert sum(isinstance(each, tablespace.FullError) for each in found) == 3


def test_a_waiting_call_that_is_cancelled_never_happens(open_small: Opener) -> None:
    store = filled(open_small, 10)
    held = Held(store)
    buffer = bytearray(b"mine" * 1024)

    async def work() -> None:
        first = asyncio.ensure_future(store.aget(KEYS[0]))
        await until(lambda: bool(store._async._lanes["reads"]._thread) and not first.done())
        await asyncio.sleep(0.01)
        second = asyncio.ensure_future(store.aget_into(KEYS[1], buffer))
        await asyncio.sleep(0.01)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(second, 1)
        buffer.extend(bytes(1 << 16))  # Nobody holds it any more.
        held.give_back()
        assert await first == value_of(KEYS[0])

    asyncio.run(work())
    assert buffer[:8] == b"minemine"
    assert store.stats().gets == 1


def test_a_read_under_way_into_a_buffer_holds_its_cancellation_back(open_small: Opener) -> None:
    """A task was cancelled with a transfer in flight; its buffer went to the next request, and
    the bytes of the first arrived in it."""
    store = filled(open_small, 10)
    held = Held(store)
    buffer = bytearray(4096)

    async def work() -> None:
        task = asyncio.ensure_future(store.aget_into(KEYS[1], buffer))
        await until(lambda: store._index.get(KEYS[1]) is not None and pinned(store, KEYS[1]))
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0.01)
            assert not task.done()
            with pytest.raises(BufferError):
                buffer.extend(bytes(1 << 16))
        held.give_back()
        with pytest.raises(asyncio.CancelledError):
            await task
        buffer.extend(bytes(1 << 16))

    asyncio.run(work())
    assert buffer[: len(value_of(KEYS[1]))] == value_of(KEYS[1])


def pinned(store: Store, key: bytes) -> bool:
    """Say whether a reader holds a key's slot: then nobody may evict it."""
    from tablespace._core.victim_list import VictimList

    chosen = VictimList(store._index, len(store), 0)
    missing = chosen.count < len(store)
    chosen.spare()
    return missing


def test_a_put_under_way_is_finished_before_its_cancellation(open_small: Opener) -> None:
    store = open_small()
    entered, go = threading.Event(), threading.Event()
    real = store._committer._queue.run

    class Slow:
        """The commit queue behind a door."""

        def run(self, request: Any) -> None:
            entered.set()
            assert go.wait(20)
            real(request)

    store._committer._queue = Slow()
    value = bytearray(b"v" * 100)

    async def work() -> None:
        task = asyncio.ensure_future(store.aput(b"k", value))
        await until(entered.is_set)
        task.cancel()
        await asyncio.sleep(0.01)
        assert not task.done()
        with pytest.raises(BufferError):
            value.clear()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        value.clear()

    asyncio.run(work())
    assert store.get(b"k") == b"v" * 100


@pytest.mark.parametrize("seed", range(3))
def test_cancelling_anywhere_keeps_values_and_accounting_true(
    open_small: Opener, seed: int
) -> None:
    store = open_small(**SIZES, on_full="evict")
    chance = random.Random(seed)

    async def call() -> None:
        key = chance.choice(KEYS[:100])
        buffer = bytearray(8192)
        action = chance.randrange(4)
        if action == 0:
            await store.aput(key, value_of(key))
        elif action == 1:
            assert await store.aget(key) in (None, value_of(key))
        elif action == 2:
            await store.adelete(key)
        else:
            length = await store.aget_into(key, buffer)
            assert length is None or buffer[:length] == value_of(key)

    async def work() -> None:
        tasks = []
        for _ in range(600):
            tasks.append(asyncio.ensure_future(call()))
            if chance.random() < 0.5:
                chance.choice(tasks).cancel()
            if chance.random() < 0.2:
                await asyncio.sleep(chance.choice((0, 0, 0.001)))
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(each) for each in done} <= {type(None), asyncio.CancelledError}
        port = store._async.gate("reads").port
        await until(lambda: port.calls == 0)

    asyncio.run(work())
    for key in store:
        assert store.get(key) == value_of(key)
    audit(store)


def test_the_loop_goes_on_while_a_read_waits(open_small: Opener) -> None:
    store = filled(open_small, 10)
    held = Held(store)

    async def work() -> None:
        task = asyncio.ensure_future(store.aget_many(KEYS[:10]))
        for _ in range(200):
            await asyncio.sleep(0)
            await asyncio.sleep(0.0001)
        assert not task.done()
        held.give_back()
        assert await task == [value_of(key) for key in KEYS[:10]]

    asyncio.run(work())
    assert store.stats().hits == 10


def test_two_loops_in_two_threads_at_once(open_small: Opener) -> None:
    store = filled(open_small)
    wrong: list[BaseException] = []

    def thread(number: int) -> None:
        async def work() -> None:
            for turn in range(5):
                mine = KEYS[number::4]
                found = await asyncio.gather(*(store.aget(key) for key in mine))
                assert found == [value_of(key) for key in mine]
                await asyncio.gather(*(store.aput(key, value_of(key)) for key in mine[turn::10]))

        try:
            asyncio.run(work())
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=thread, args=(number,)) for number in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert wrong == []
    audit(store)


def test_more_than_a_loop_may_have_under_way_waits_its_turn(
    open_small: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tablespace.async_queue.MAX_KEYS_UNDER_WAY", 20)
    store = filled(open_small)

    async def work() -> None:
        gate = store._async.gate("reads")
        tasks = [asyncio.ensure_future(store.aget(key)) for key in KEYS]
        most = 0
        while not all(task.done() for task in tasks):
            most = max(most, gate._keys)
            if len(tasks) > 500:
                tasks.pop(480 - len(tasks) % 7).cancel()
            await asyncio.sleep(0)
        assert 0 < most <= 20
        for task in tasks:
            assert task.result() in {value_of(key) for key in KEYS}
        assert await store.aget_many(KEYS[:50]) == [value_of(key) for key in KEYS[:50]]
        assert (gate._keys, gate.port.calls, len(gate._waiting)) == (0, 0, 0)

    asyncio.run(work())


def test_closing_answers_every_call_with_a_value_or_closed(open_small: Opener) -> None:
    store = filled(open_small)

    async def work() -> list[Any]:
        tasks = [asyncio.ensure_future(store.aget(key)) for key in KEYS]
        tasks += [asyncio.ensure_future(store.aput(key, b"new")) for key in KEYS[:100]]
        await asyncio.sleep(0.001)
        store.close()
        found = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)
        with pytest.raises(tablespace.ClosedError):
            await store.aget(KEYS[0])
        with pytest.raises(tablespace.ClosedError):
            await store.aput(KEYS[0], b"x")
        return list(found)

    found = asyncio.run(work())
    for key, each in zip(KEYS, found, strict=False):
        assert isinstance(each, tablespace.ClosedError) or each in (value_of(key), b"new")
    stored = {key for key, each in zip(KEYS, found[1000:], strict=False) if each is None}
    again = open_small(**SIZES)
    assert all(again.get(key) == b"new" for key in stored)
    assert threading.active_count() < 10


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_loops_that_come_and_go_leave_no_descriptor_and_no_thread(
    open_small: Opener, tmp_path: Path
) -> None:
    store = filled(open_small, 10)
    asyncio.run(store.aget(KEYS[0]))
    before, threads = descriptors(), threading.active_count()
    for _ in range(40):
        assert asyncio.run(store.aget(KEYS[1])) == value_of(KEYS[1])
    assert descriptors() <= before + 2 and threading.active_count() == threads
    for number in range(10):
        each = open_small(tmp_path / "other")
        asyncio.run(each.aput(b"k", b"%d" % number))
        each.close()
    assert descriptors() <= before + 2 and threading.active_count() == threads


def test_a_loop_that_is_closed_with_calls_under_way_hurts_nobody(open_small: Opener) -> None:
    store = filled(open_small, 50)
    held = Held(store)
    loop = asyncio.new_event_loop()
    buffer = bytearray(4096)
    calls = [loop.create_task(store.aget(key)) for key in KEYS[:20]]
    calls.append(loop.create_task(store.aget_into(KEYS[20], buffer)))

    async def begin() -> None:
        await until(lambda: pinned(store, KEYS[0]))

    loop.run_until_complete(begin())
    loop.close()
    held.give_back()
    assert asyncio.run(store.aget(KEYS[1])) == value_of(KEYS[1])
    assert not any(call.done() for call in calls)
    for call in calls:
        call._log_destroy_pending = False
    calls.clear()
    store.close()
    audit_again = open_small(**SIZES)
    assert len(audit_again) == 50


def test_a_forked_child_is_told_and_the_parent_goes_on(open_small: Opener) -> None:
    store = filled(open_small, 10)
    assert asyncio.run(store.aget(KEYS[0])) == value_of(KEYS[0])
    child = os.fork()
    if child == 0:
        code = 1
        try:
            asyncio.run(store.aget(KEYS[0]))
        except tablespace.ClosedError:
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert asyncio.run(store.aget(KEYS[1])) == value_of(KEYS[1])


def test_reads_find_what_waits_for_its_commit(open_small: Opener) -> None:
    """Every read of a key that was still queued raised a TypeError: the mark for "new bytes, no
    buffer" went to the queue's copy as if it were a buffer."""
    store = open_small(durability="interval", flush_interval_ms=60_000)
    store.put(b"c", b"durable", durability="sync")
    buffer = bytearray(10)

    async def run() -> list[Any]:
        await store.aput_many([(b"a", b"first" * 100), (b"b", b"second")])
        await store.aput(b"a", b"newest")
        return await asyncio.gather(
            store.aget(b"a"), store.aget_into(b"b", buffer), store.aget_many([b"c", b"a", b"no"])
        )

    assert asyncio.run(run()) == [b"newest", 6, [b"durable", b"newest", None]]
    assert store.stats().queue_blocks == 2 and buffer[:6] == b"second"
