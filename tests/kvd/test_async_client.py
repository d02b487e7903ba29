"""The client in asyncio: the same surface, nothing that blocks the loop, safe to cancel."""

import asyncio
import inspect
import os
import signal
import threading
import time

import pytest

import kvd
from kvd.async_calls import Calls
from kvd.async_handle import AsyncNamespaceHandle, AsyncSlots
from kvd.client import Client
from kvd.namespace_handle import NamespaceHandle
from kvd.reserving import Slots

# What only one of the two needs: used by the handles, or a thing of threads.
INTERNAL = {
    "ask",
    "begin_write",
    "connection",
    "connection_of",
    "connection_to_look_up",
    "end_write",
    "give_up",
    "hold",
    "lease_ended",
    "local_lookup",
    "look_up_rest",
    "refuse",
    "session",
    "subscriber_hello",
    "close",
}


def surface(kind):
    return {
        name: list(inspect.signature(member).parameters)
        for name, member in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_") and name not in INTERNAL
    }


@pytest.mark.parametrize(
    ("blocking", "awaited"),
    [(Client, kvd.AsyncClient), (NamespaceHandle, AsyncNamespaceHandle), (Slots, AsyncSlots)],
)
def test_the_surface_is_the_same(blocking, awaited):
    assert surface(awaited) == surface(blocking)


def test_every_call_works_awaited(running):
    async def main():
        async with kvd.AsyncClient(running.socket) as client:
            blocks = client.namespace("m")
            assert await blocks.put(b"a", b"1")
            assert await blocks.put_many([(b"b", b"22"), (b"c", bytes(1 << 20))]) == [True, False]
            assert await blocks.get(b"a") == b"1"
            assert await blocks.get(b"a", verify=True) == b"1"
            buffer = bytearray(10)
            assert await blocks.get_into(b"b", buffer) == 2
            assert bytes(buffer[:2]) == b"22"
            assert await blocks.get_many([b"a", b"x"]) == [b"1", None]
            tiers = []
            assert await blocks.get_many_into([b"a"], [buffer], tiers) == [1]
            assert tiers == ["memory"]
            async with blocks.reserve([3, 3]) as slots:
                assert len(slots) == 2
                slots[0].view[:] = b"333"
                assert await slots.commit([b"d", None]) == [True, False]
            async with blocks.lease([b"d", b"x"]) as views:
                assert views == [b"333", None]
            with pytest.raises(ValueError):
                bytes(views[0])
            assert await blocks.exists([b"d", b"x"]) == [True, False]
            assert await blocks.match_prefix([b"a", b"b", b"x"]) == 2
            assert await client.flush(20) == kvd.Flushed(3, 0, 0)
            assert (await blocks.locate([b"d"]))[0].durable
            assert await blocks.prefetch([b"a"]) == 0
            assert await blocks.touch([b"a", b"x"]) == 1
            assert await client.namespaces() == ["m"]
            assert await blocks.delete([b"a"]) == 1
            assert (await blocks.clear()).entries == 2
            stats = await client.stats()
            assert (stats.sessions, stats.memory.slots_reserved) == (1, 0)
            assert client.refusals == {"too_large": 1}

    asyncio.run(main())


def test_without_a_daemon_lookups_miss_and_puts_return_false(tmp_path):
    async def main():
        async with kvd.AsyncClient(tmp_path / "absent.sock") as client:
            blocks = client.namespace("m")
            assert await blocks.get(b"k") is None
            assert not await blocks.put(b"k", b"v")
            async with blocks.reserve([1]) as slots:
                assert slots[0].view is None
                assert await slots.commit([b"k"]) == [False]
            for call in (client.stats, client.flush, client.namespaces, blocks.clear):
                with pytest.raises(kvd.UnavailableError):
                    await call()
            with pytest.raises(ValueError):
                await blocks.put(b"", b"v")

    asyncio.run(main())


def test_no_call_blocks_the_loop_and_every_wait_ends(running):
    """The daemon hangs; the loop goes on, and all calls end within their bounds."""

    async def main():
        async with kvd.AsyncClient(running.socket, timeout_s=1.0, threads=4) as client:
            blocks = client.namespace("m")
            assert await blocks.put(b"k", b"v")
            os.kill(running.pid, signal.SIGSTOP)
            gaps = []
            done = asyncio.Event()

            async def tick():
                last = time.monotonic()
                while not done.is_set():
                    await asyncio.sleep(0.01)
                    now = time.monotonic()
                    gaps.append(now - last)
                    last = now

            ticking = asyncio.ensure_future(tick())
            try:
                started = time.monotonic()
                calls = [blocks.put(b"%d" % n, b"v") for n in range(20)]
                calls += [blocks.get(b"k") for _ in range(20)]
                calls += [blocks.exists([b"k"]) for _ in range(20)]
                calls += [client.flush(1.0), client.stats()]
                results = await asyncio.gather(*calls, return_exceptions=True)
                assert time.monotonic() - started < 12
            finally:
                os.kill(running.pid, signal.SIGCONT)
                done.set()
            await ticking
            assert results[:20] == [False] * 20
            assert set(results[20:40]) <= {None, b"v"}
            assert all(isinstance(result, kvd.UnavailableError) for result in results[60:])
            assert max(gaps) < 0.5
            for _ in range(200):
                if await blocks.get(b"k") == b"v":
                    break
                await asyncio.sleep(0.05)
            else:
                pytest.fail("the client did not come back")

    asyncio.run(main())


def test_a_call_that_finds_no_thread_in_time_is_never_made():
    async def main():
        calls = Calls(1, 0.05)
        gate = threading.Event()
        made = []
        first = asyncio.ensure_future(calls.run(lambda: gate.wait(10), lambda: False))
        await asyncio.sleep(0.01)
        assert await calls.run(lambda: made.append(1), lambda: "late") == "late"
        gate.set()
        assert await first is True
        assert made == []
        calls.close()

    asyncio.run(main())


def test_a_cancelled_call_ends_before_its_buffer_is_used_again():
    """A thread went on filling a buffer that its cancelled caller had given to another."""

    async def main():
        calls = Calls(1, 5.0)
        begun, gate = threading.Event(), threading.Event()
        buffer = bytearray(1)

        def fill():
            begun.set()
            gate.wait(10)
            buffer[0] = 1

        task = asyncio.ensure_future(calls.run(fill, lambda: None))
        await asyncio.get_running_loop().run_in_executor(None, begun.wait, 5)
        queued = asyncio.ensure_future(calls.run(lambda: buffer.append(2), lambda: None))
        await asyncio.sleep(0.01)
        for _ in range(3):
            task.cancel()
            queued.cancel()
            await asyncio.sleep(0.01)
        assert not task.done()
        assert queued.cancelled()
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert buffer == b"\x01"
        calls.close()

    asyncio.run(main())


def test_cancelled_reservations_leak_no_slot(running):
    async def main():
        async with kvd.AsyncClient(running.socket) as client:
            blocks = client.namespace("m")

            async def write(number):
                async with blocks.reserve([10] * 4) as slots:
                    await asyncio.sleep(0.002 * (number % 5))
                    await slots.commit([b"%d" % number, None, None, None], retention="ephemeral")

            for turn in range(30):
                tasks = [asyncio.ensure_future(write(turn * 4 + n)) for n in range(4)]
                await asyncio.sleep(0.0007 * (turn % 10))
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            memory = (await client.stats()).memory
            assert (memory.slots_reserved, memory.slots_quarantined) == (0, 0)
            assert await blocks.put(b"after", b"v")

    asyncio.run(main())


def test_cancelled_leases_leave_nothing_leased(running):
    async def main():
        async with kvd.AsyncClient(running.socket) as client:
            blocks = client.namespace("m")
            keys = [b"%d" % number for number in range(8)]
            assert all(await blocks.put_many([(key, bytes(1000)) for key in keys]))

            async def read():
                async with blocks.lease(keys) as views:
                    assert [bytes(view) for view in views] == [bytes(1000)] * 8
                    await asyncio.sleep(0.002)

            for turn in range(30):
                tasks = [asyncio.ensure_future(read()) for _ in range(4)]
                await asyncio.sleep(0.0007 * (turn % 10))
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            lane = client._client.connection().mapping.reader.lane
            assert lane.held == 0

    asyncio.run(main())


def test_many_tasks_share_one_client(running, make_blocks):
    values = make_blocks(64, 5000)

    async def main():
        async with kvd.AsyncClient(running.socket) as client:
            blocks = client.namespace("m")

            async def one(key, value):
                assert await blocks.put(key, value, retention="ephemeral")
                return await blocks.get(key)

            found = await asyncio.gather(*(one(key, value) for key, value in values.items()))
            assert found == list(values.values())

    asyncio.run(main())
