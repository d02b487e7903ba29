"""Lanes as the daemon reads them, over a real arena, with a client that writes what it likes."""

import asyncio
import mmap
import os
import random
import struct

import pytest

from kvd.errors import ProtocolError
from kvd.lanes import MAX_LANES, MAX_ORPHANS, Lanes
from kvd.process import Process
from kvd.session import Session


def test_what_a_client_writes_into_its_lane_harms_nobody(on_rig):
    async def scenario(rig):
        lanes = Lanes(rig.cache)
        session = Session(7)
        info, fd = lanes.open(session)
        hostile = mmap.mmap(fd, info.bytes)
        os.close(fd)
        source = random.Random(3)
        sizes = rig.arena.slot_count
        for number in range(300):
            for _ in range(50):
                word = source.choice((0, 1, sizes, sizes + 1, 2**64 - 1, source.getrandbits(64)))
                struct.pack_into("<Q", hostile, 8 * source.randrange(info.bytes // 8), word)
            assert rig.put(b"%d" % number, bytes(10), "ephemeral") == "stored"
            lanes.fold()
            if number % 3 == 0:
                await rig.cache.delete("m", [b"%d" % number])
            rig.cache.tick()
            held = rig.memory.held_slots
            assert held <= info.leases == sizes // 4
            assert rig.accounted() + held == sizes
        lanes.end(session)
        rig.cache.tick()
        assert rig.memory.held_slots == 0
        hostile.close()

    on_rig(scenario)


def test_a_lane_cannot_be_resized_under_the_daemon(on_rig):
    async def scenario(rig):
        _, fd = Lanes(rig.cache).open(Session(1))
        for size in (0, 1 << 20):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
        os.close(fd)

    on_rig(scenario)


def test_a_session_can_release_its_own_lanes_only(on_rig):
    async def scenario(rig):
        lanes = Lanes(rig.cache)
        first, second = Session(1), Session(2)
        infos = []
        for session in (first, first, second):
            info, fd = lanes.open(session)
            infos.append(info.id)
            os.close(fd)
        assert lanes.release(second, infos[:2]) == 0
        assert len(rig.arena.lanes) == 3
        assert lanes.release(first, [infos[0], infos[0], 99]) == 1
        assert lanes.release(first, infos[:1]) == 0
        lanes.end(first)
        assert len(rig.arena.lanes) == 1
        lanes.orphan(second)
        lanes.end(second)
        assert len(rig.arena.lanes) == 1
        lanes.free_orphans(second.process)
        assert rig.arena.lanes == []

    on_rig(scenario)


def test_a_process_that_leaves_lane_after_lane_behind_gets_no_more(on_rig):
    async def scenario(rig):
        lanes = Lanes(rig.cache)
        process = Process(42)
        sessions = [Session(number, process=process) for number in range(MAX_ORPHANS)]
        for session in sessions:
            os.close(lanes.open(session)[1])
            lanes.orphan(session)
        with pytest.raises(ProtocolError, match="RELEASE"):
            lanes.open(Session(1000, process=process))
        busy = Session(1001)
        for _ in range(MAX_LANES):
            os.close(lanes.open(busy)[1])
        with pytest.raises(ProtocolError, match="RELEASE"):
            lanes.open(busy)
        lanes.free_orphans(process)
        os.close(lanes.open(Session(1002, process=process))[1])
        lanes.end(busy)
        assert len(rig.arena.lanes) == 1

    on_rig(scenario)


def test_a_leased_block_in_flight_to_the_disk_keeps_its_slot_until_both_end(on_rig):
    async def scenario(rig):
        lanes = Lanes(rig.cache)
        info, fd = lanes.open(Session(1))
        memory = mmap.mmap(fd, info.bytes)
        os.close(fd)
        gate = rig.gate("write")
        assert rig.put(b"k", b"v") == "stored"
        await gate.wait_entered()
        block = rig.memory.find(rig.cache.namespaces.get("m"), b"k")
        struct.pack_into("<Q", memory, 64, block.slot + 1)
        struct.pack_into("<Q", memory, 0, 1)
        rig.evict(b"k")
        assert rig.memory.held_slots == 1  # By the write, and by nothing else until that ends.
        gate.opened.set()
        assert (await rig.cache.flush(Session(2), 20)).pending == 0
        while block.writing:
            await asyncio.sleep(0.005)
        assert rig.memory.held_slots == 1
        struct.pack_into("<Q", memory, 64, 0)
        rig.cache.tick()
        assert rig.memory.held_slots == 0
        assert rig.accounted() == rig.arena.slot_count
        memory.close()

    on_rig(scenario)
