"""PREFETCH: from disk into memory before anybody waits, in the daemon's own time."""

import asyncio
import time

import pytest

import kvd
from kvd import prefetching
from kvd.prefetching import Prefetcher


@pytest.fixture
def on_disk_only(daemons, make_blocks, put_all):
    """A restarted daemon: everything on disk, nothing in memory."""
    daemon = daemons().start()
    values = make_blocks(100)
    with daemon.client() as client:
        put_all(client, client.namespace("m"), values)
    assert daemon.stop() == 0
    return daemon.start(), values


def test_prefetched_blocks_are_served_from_memory(on_disk_only, wait_until):
    daemon, values = on_disk_only
    with daemon.client() as client:
        blocks = client.namespace("m")
        keys = list(values)
        assert blocks.prefetch([*keys[:40], keys[0], b"absent"]) == 41
        wait_until(lambda: all(place.memory for place in blocks.locate(keys[:40])))
        assert not any(place.memory for place in blocks.locate(keys[40:]))
        tiers = []
        buffers = [bytearray(65536) for _ in keys[:40]]
        assert blocks.get_many_into(keys[:40], buffers, tiers) == [65536] * 40
        assert tiers == ["memory"] * 40
        assert [bytes(buffer) for buffer in buffers] == [values[key] for key in keys[:40]]
        assert blocks.prefetch(keys[:40]) == 0
        assert client.stats().long.blocks_promoted == 40


def test_what_cannot_be_meant_is_an_error_and_an_absent_daemon_none(tmp_path):
    blocks = kvd.Client(tmp_path / "absent.sock").namespace("m")
    assert blocks.prefetch([b"k"]) == 0
    for deadline_s in (-1, 61, float("nan")):
        with pytest.raises(ValueError, match="deadline_s"):
            blocks.prefetch([b"k"], deadline_s=deadline_s)


def test_without_a_disk_tier_there_is_nothing_to_prefetch(daemons):
    with daemons(disk=False).start().client() as client:
        assert client.namespace("m").prefetch([b"k"]) == 0


def test_what_has_not_begun_by_the_deadline_is_left_out(on_rig):
    async def scenario(rig):
        await rig.only_on_disk({b"%d" % n: bytes(100) for n in range(50)})
        keys = [b"%d" % n for n in range(50)]
        gate = rig.gate("read")
        assert rig.cache.prefetch("m", keys[:20], 20.0) == 20
        # In an executor the gate stops both reads that may be under way; the rest waits.
        assert rig.cache.prefetch("m", keys[20:30], 0.0) == 10
        await gate.wait_entered()
        gate.opened.set()
        space = rig.cache.namespaces.get("m")
        for _ in range(1000):
            if all(rig.memory.present(space, keys[:20])):
                break
            await asyncio.sleep(0.005)
        assert rig.memory.present(space, keys[:20]) == [True] * 20
        await asyncio.sleep(0.05)
        assert rig.memory.present(space, keys[20:]) == [False] * 30

    on_rig(scenario)


def test_the_queue_is_bounded_and_says_what_it_took(on_rig, monkeypatch):
    monkeypatch.setattr(prefetching, "MAX_WAITING_KEYS", 100)

    async def scenario(rig):
        keys = [b"%d" % n for n in range(150)]
        assert rig.cache.prefetch("m", keys, 20.0) == 100
        assert rig.cache.prefetch("m", keys, 20.0) == 0
        for _ in range(1000):
            if rig.cache.prefetch("m", keys[:1], 20.0):
                break
            await asyncio.sleep(0.005)
        else:
            raise AssertionError("the queue never emptied")

    on_rig(scenario)


def test_prefetching_more_than_memory_holds_leaks_no_slot(on_rig):
    """Buffers of a batched prefetch stayed pinned when the next allocation failed; after three
    hours the pool was exhausted and the server hung."""

    async def scenario(rig):
        values = {b"%d" % n: b"%d" % n * 50 for n in range(100)}
        keys = list(values)
        for first in (0, 50):
            part = keys[first : first + 50]
            await rig.only_on_disk({key: values[key] for key in part})
        held = [rig.memory.reserve(1)[0] for _ in range(60)]
        for turn in range(200):
            rig.cache.prefetch("m", keys[turn % 50 : turn % 50 + 50], 20.0)
            if turn % 10 == 0:
                await asyncio.sleep(0.005)
        for _ in range(2000):
            if not rig.cache._prefetcher._tasks:
                break
            await asyncio.sleep(0.005)
        assert not rig.cache._prefetcher._tasks
        assert rig.memory.reserved_slots == 60
        for slot in held:
            rig.memory.unreserve(slot)
        assert rig.accounted() == 64
        assert rig.memory.quarantined_slots == 0
        assert await rig.get(keys[7]) == [values[keys[7]]]

    on_rig(scenario)


def test_a_prefetch_of_deleted_blocks_brings_nothing_back(on_rig):
    async def scenario(rig):
        await rig.only_on_disk({b"k": b"value", b"l": b"other"})
        gate = rig.gate("read")
        assert rig.cache.prefetch("m", [b"k", b"l"], 20.0) == 2
        await gate.wait_entered()
        deleting = asyncio.ensure_future(rig.cache.delete("m", [b"k"]))
        await asyncio.sleep(0)
        gate.opened.set()
        assert await deleting == 1
        assert await rig.exists(b"k", b"l") == [False, True]
        assert await rig.get(b"k", b"l") == [None, b"other"]

    on_rig(scenario)


def test_a_thousand_loads_at_once_all_end(on_disk_only):
    """A channel of 64 overflowed under concurrency, and loads were lost."""
    daemon, values = on_disk_only
    keys = list(values)

    async def main():
        async with kvd.AsyncClient(daemon.socket, timeout_s=60.0) as client:
            blocks = client.namespace("m")
            assert await blocks.prefetch(keys) == 100
            found = await asyncio.gather(*(blocks.get(keys[n % 100]) for n in range(1024)))
            assert found == [values[keys[n % 100]] for n in range(1024)]

    asyncio.run(main())


def test_a_prefetch_that_fails_does_not_stop_those_behind_it(on_rig, caplog):
    class Failing:
        def __init__(self):
            self.keys = []

        async def fetch(self, namespace, keys, *, loose):
            self.keys += keys
            raise OSError("nothing works")

    async def scenario(rig):
        promoter = Failing()
        prefetcher = Prefetcher(promoter)
        keys = [b"%d" % n for n in range(130)]
        prefetcher.offer(rig.cache.namespaces.get("m"), keys, 20.0)
        deadline = time.monotonic() + 10
        while len(promoter.keys) < 130 and time.monotonic() < deadline:
            await asyncio.sleep(0.001)
        assert sorted(promoter.keys) == sorted(keys)
        assert "were not prefetched" in caplog.text

    on_rig(scenario)
