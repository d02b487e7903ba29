"""Reads that take too long: a miss for who asks, a slot out of use until the transfer ends."""

import asyncio
import time

import kvd.read_progress
from kvd.read_progress import ReadProgress

TIMEOUT_S = 0.2
VALUES = {b"k%d" % number: b"value %d" % number for number in range(8)}


def test_a_late_read_is_a_miss_and_promotes_when_it_comes(on_rig):
    async def scenario(rig):
        await rig.only_on_disk(VALUES)
        gate = rig.gate("read")
        began = time.monotonic()
        assert await rig.get(b"k0") == [None]
        assert TIMEOUT_S * 0.9 < time.monotonic() - began < 5
        # Its slot is neither free nor anybody's.
        assert rig.memory.reserved_slots == 1
        assert rig.memory.free_slots + rig.memory.entries == rig.arena.slot_count - 1
        gate.opened.set()
        await rig.ticking(lambda: rig.memory.entries == 1)
        assert await rig.get(b"k0") == [b"value 0"]
        assert gate.calls == 1
        assert rig.accounted() == rig.arena.slot_count

    on_rig(scenario, timeout_s=TIMEOUT_S)


def test_a_disk_that_stands_still_is_passed_over(on_rig, monkeypatch):
    """A dead backend cost every lookup its whole timeout, one after another."""
    monkeypatch.setattr(kvd.read_progress, "PROBE_S", 0.4)

    async def scenario(rig):
        await rig.only_on_disk(VALUES)
        gate = rig.gate("read")
        assert await rig.get(b"k0") == [None]
        await asyncio.sleep(0.05)
        # One try, then none for a while: the rest are misses at once, of the same key as well.
        await rig.get(b"k1")
        began = time.monotonic()
        for _ in range(50):
            assert await rig.get(b"k0", b"k2", b"k3") == [None] * 3
        assert time.monotonic() - began < TIMEOUT_S + 0.2
        assert await rig.exists(b"k4") == [False]
        assert gate.calls <= 4
        gate.opened.set()
        await rig.ticking(lambda: rig.long.progress.calls == 0)
        assert await rig.get(*VALUES) == list(VALUES.values())

    on_rig(scenario, timeout_s=TIMEOUT_S)


def test_a_stuck_path_makes_no_lookup_of_another_wait(on_rig):
    async def scenario(rig):
        await rig.only_on_disk(VALUES)
        stuck, well = rig.tiers
        gate = rig.gate("read", stuck)
        sick = [key for key in VALUES if rig.home(key) is stuck]
        sound = [key for key in VALUES if rig.home(key) is well]
        if sick and sound:
            await rig.get(sick[0])
            began = time.monotonic()
            assert await rig.get(*sound) == [VALUES[key] for key in sound]
            assert time.monotonic() - began < TIMEOUT_S
        gate.opened.set()

    on_rig(scenario, timeout_s=TIMEOUT_S, paths=2)


def test_progress_is_what_ends_not_what_waits():
    now = [0.0]

    async def scenario():
        progress = ReadProgress(2, lambda: now[0])
        loop = asyncio.get_running_loop()
        first, second = loop.create_future(), loop.create_future()
        progress.watch(first)
        now[0] = 1.0
        progress.watch(second)
        assert not progress.stands_still(2.0)
        now[0] = 2.5
        assert progress.stands_still(2.0)
        assert not progress.admits(2.0)  # Both threads are in use.
        second.set_result(None)
        await asyncio.sleep(0)
        # Something ended: the other one is slow, the disk is not dead.
        assert not progress.stands_still(2.0)
        now[0] = 5.0
        assert progress.admits(2.0)
        assert not progress.admits(2.0)
        now[0] = 6.5
        assert progress.admits(2.0)
        first.set_result(None)
        await asyncio.sleep(0)
        assert progress.admits(2.0)
        assert progress.calls == 0

    asyncio.run(scenario())


def test_groups_are_smaller_while_reads_wait(on_rig):
    async def scenario(rig):
        await rig.only_on_disk({b"k": b"value"})
        sizes = []
        write = rig.long.write

        def noting(items, touched):
            sizes.append(len(items))
            return write(items, touched)

        rig.long.write = noting
        gate = rig.gate("read")
        asker = asyncio.ensure_future(rig.get(b"k"))
        await gate.wait_entered()
        for number in range(32):
            rig.put(b"%d" % number, b"v")
        assert (await rig.cache.flush(rig.session, 20)).pending == 0
        assert sizes == [16, 16]
        gate.opened.set()
        assert await asker == [b"value"]
        sizes.clear()
        rig.cache.long.counters.hits = 0
        for number in range(32):
            rig.put(b"n%d" % number, b"v")
        assert (await rig.cache.flush(rig.session, 20)).pending == 0
        assert sizes == [32]

    on_rig(scenario)


def test_a_group_waits_to_be_filled_and_flush_does_not_wait(on_rig):
    async def scenario(rig):
        sizes = []
        write = rig.long.write

        def noting(items, touched):
            sizes.append(len(items))
            return write(items, touched)

        rig.long.write = noting
        for number in range(10):
            rig.put(b"%d" % number, b"v")
            await asyncio.sleep(0.002)
        assert sizes == []
        began = time.monotonic()
        assert (await rig.cache.flush(rig.session, 20)).durable == 10
        assert time.monotonic() - began < 2
        assert sizes == [10]

    on_rig(scenario, flush_interval_s=5.0)
