"""Moves between the tiers, forced into the interesting orders by gates at the disk."""

import asyncio
import threading

import pytest

from kvd import protocol
from kvd.arena import Arena
from kvd.cache import Cache
from kvd.long_tier import LongTier
from kvd.memory_tier import MemoryTier
from kvd.namespaces import Namespaces
from kvd.session import Session
from kvd.storing import Keep
from tablespace import FailedError, checksum64

SLOT = 4096
SLOTS = 64


class Gate:
    """Stops a call of the long tier before and after its work until it is told to go on."""

    def __init__(self, long_tier, name):
        self.entered = threading.Event()
        self.opened = threading.Event()
        self.calls = 0
        self._call = getattr(long_tier, name)
        setattr(long_tier, name, self)

    def __call__(self, *args):
        self.calls += 1
        result = self._call(*args)
        self.entered.set()
        assert self.opened.wait(20)
        return result

    async def wait_entered(self):
        assert await asyncio.get_running_loop().run_in_executor(None, self.entered.wait, 20)


class Rig:
    """A cache over a real region, in this process and loop."""

    def __init__(self, directory):
        self.long = LongTier(directory, 1 << 20, SLOT, "auto")
        self.long.open_region()
        self.arena = Arena(SLOTS * SLOT, SLOT)
        self.memory = MemoryTier(self.arena, writes_back=True)
        self.memory.add_slots(0, SLOTS)
        self.cache = Cache(self.memory, Namespaces(directory), self.long)
        self.session = Session(1)

    def put(self, key, value, retention="long", session=None):
        item = protocol.SetItem(key, value, checksum64(value))
        session = session or self.session
        return self.cache.storing.set_inline(session, "m", [item], Keep.of(retention, None))[0]

    async def get(self, *keys):
        hits, missing = self.cache.get("m", list(keys), True)
        if missing:
            hits = await self.cache.fetch("m", list(keys), True, hits, missing)
        return [hit and hit.data for hit in hits]

    async def exists(self, *keys):
        present = self.cache.in_memory("m", list(keys))
        return await self.cache.complete("m", list(keys), present)

    async def only_on_disk(self, values):
        for key, value in values.items():
            assert self.put(key, value) == "stored"
        assert (await self.cache.flush(self.session, 20)).pending == 0
        space = self.cache.namespaces.get("m")
        for key in values:
            self.memory.remove(self.memory.find(space, key))

    async def close(self):
        for _ in range(1000):
            if self.cache.write_back.idle:
                break
            await asyncio.sleep(0.005)
        await self.long.on_writer(self.long.close_region)
        self.long.shut_down()
        self.arena.close()

    def accounted(self):
        memory = self.memory
        return memory.free_slots + memory.entries + memory.reserved_slots


@pytest.fixture
def on_rig(tmp_path):
    """Run a coroutine function over a fresh rig."""

    def run(scenario):
        async def main():
            rig = Rig(tmp_path)
            try:
                await scenario(rig)
            finally:
                await rig.close()

        asyncio.run(main())

    return run


def test_many_askers_cause_one_read(on_rig):
    async def scenario(rig):
        await rig.only_on_disk({b"k": b"value"})
        gate = Gate(rig.long, "read")
        askers = [asyncio.ensure_future(rig.get(b"k")) for _ in range(8)]
        await gate.wait_entered()
        late = asyncio.ensure_future(rig.get(b"k", b"k"))
        gate.opened.set()
        assert await asyncio.gather(*askers) == [[b"value"]] * 8
        assert await late == [b"value", b"value"]
        assert gate.calls == 1
        assert rig.long.counters.blocks_promoted == 1
        assert rig.accounted() == SLOTS

    on_rig(scenario)


@pytest.mark.parametrize("how", ["delete", "clear"])
def test_removal_during_a_promotion_wins(on_rig, how):
    async def scenario(rig):
        await rig.only_on_disk({b"k": b"value"})
        gate = Gate(rig.long, "read")
        asker = asyncio.ensure_future(rig.get(b"k"))
        await gate.wait_entered()
        remove = rig.cache.delete("m", [b"k"]) if how == "delete" else rig.cache.clear("m")
        removed = asyncio.ensure_future(remove)
        await asyncio.sleep(0)
        gate.opened.set()
        assert await asker == [None]
        outcome = await removed
        assert outcome == 1 or outcome.entries == 1
        assert await rig.get(b"k") == [None]
        assert rig.accounted() == SLOTS

    on_rig(scenario)


def test_lookups_do_not_believe_the_disk_while_a_delete_is_on_its_way(on_rig):
    async def scenario(rig):
        await rig.only_on_disk({b"k": b"value"})
        gate = Gate(rig.long, "delete")
        removed = asyncio.ensure_future(rig.cache.delete("m", [b"k"]))
        await gate.wait_entered()
        assert await rig.get(b"k") == [None]
        assert await rig.exists(b"k") == [False]
        assert rig.put(b"k", b"new") == "stored"
        gate.opened.set()
        assert await removed == 1
        assert await rig.get(b"k") == [b"new"]
        await rig.cache.flush(rig.session, 20)
        assert (await rig.cache.locate("m", [b"k"]))[0].durable

    on_rig(scenario)


@pytest.mark.parametrize("how", ["delete", "clear"])
def test_removal_during_a_write_back_wins(on_rig, how):
    async def scenario(rig):
        gate = Gate(rig.long, "write")
        assert rig.put(b"k", b"value") == "stored"
        await gate.wait_entered()
        remove = rig.cache.delete("m", [b"k"]) if how == "delete" else rig.cache.clear("m")
        removed = asyncio.ensure_future(remove)
        await asyncio.sleep(0)
        assert await rig.get(b"k") == [None]
        gate.opened.set()
        await removed
        assert await rig.get(b"k") == [None]
        assert await rig.exists(b"k") == [False]
        assert (await rig.cache.flush(rig.session, 5)).pending == 0
        assert rig.accounted() == SLOTS

    on_rig(scenario)


def test_a_set_during_a_promotion_keeps_the_set(on_rig):
    async def scenario(rig):
        await rig.only_on_disk({b"k": b"old"})
        gate = Gate(rig.long, "read")
        asker = asyncio.ensure_future(rig.get(b"k"))
        await gate.wait_entered()
        assert rig.put(b"k", b"new") == "stored"
        gate.opened.set()
        assert await asker == [b"new"]
        await rig.cache.flush(rig.session, 20)
        assert rig.accounted() == SLOTS

    on_rig(scenario)


def test_a_block_changed_after_commit_is_thrown_away_not_written(on_rig):
    async def scenario(rig):
        gate = Gate(rig.long, "touch")
        stuck = rig.long.on_writer(rig.long.touch, [])
        await gate.wait_entered()
        assert rig.put(b"k", b"value") == "stored"
        space = rig.cache.namespaces.get("m")
        rig.arena.view(rig.memory.find(space, b"k").slot, 1)[:] = b"V"
        gate.opened.set()
        await stuck
        flushed = await rig.cache.flush(rig.session, 20)
        assert (flushed.durable, flushed.dropped, flushed.pending) == (0, 1, 0)
        assert await rig.get(b"k") == [None]
        assert rig.memory.counters.corrupt == 1

    on_rig(scenario)


def test_a_full_arena_serves_the_disk_inline_and_refuses_sets(on_rig):
    async def scenario(rig):
        await rig.only_on_disk({b"k": b"value"})
        gate = Gate(rig.long, "write")
        stored = [rig.put(b"%d" % number, b"v") for number in range(SLOTS + 5)]
        assert stored == ["stored"] * SLOTS + ["no_room"] * 5
        await gate.wait_entered()
        assert await rig.get(b"k") == [b"value"]
        assert (await rig.cache.flush(rig.session, 0.05)).pending > 0
        gate.opened.set()
        flushed = await rig.cache.flush(rig.session, 20)
        assert (flushed.dropped, flushed.pending) == (0, 0)
        assert rig.long.counters.promotions_no_room == 1

    on_rig(scenario)


def test_a_failed_long_tier_still_serves_and_says_what_it_drops(on_rig):
    async def scenario(rig):
        await rig.only_on_disk({b"k": b"value"})

        def broken(items, touched):
            raise FailedError("an earlier sync failed: Input/output error")

        rig.long.write = broken
        assert rig.put(b"l", b"w") == "stored"
        flushed = await rig.cache.flush(rig.session, 20)
        assert (flushed.durable, flushed.dropped) == (1, 1)
        assert await rig.get(b"k", b"l") == [b"value", b"w"]
        for number in range(2 * SLOTS):
            assert rig.put(b"%d" % number, b"v") == "stored"
        assert "Input/output" in rig.long.failure

    on_rig(scenario)


def test_a_group_the_disk_refused_is_dropped_and_the_next_one_tried(on_rig):
    async def scenario(rig):
        write = rig.long.write

        def full(items, touched):
            raise OSError(28, "No space left on device")

        rig.long.write = full
        assert rig.put(b"k", b"v") == "stored"
        assert (await rig.cache.flush(rig.session, 20)).dropped == 1
        assert rig.long.failure is None
        rig.long.write = write
        assert rig.put(b"k", b"v") == "refreshed"
        assert (await rig.cache.flush(rig.session, 20)).durable == 1
        assert await rig.get(b"k") == [b"v"]

    on_rig(scenario)


def test_a_stalled_disk_makes_dirty_blocks_give_way(on_rig, monkeypatch):
    async def scenario(rig):
        monkeypatch.setattr("kvd.write_back.STALL_S", 0.0)
        gate = Gate(rig.long, "write")
        for number in range(3 * SLOTS):
            assert rig.put(b"%d" % number, bytes(SLOT)) == "stored"
            await asyncio.sleep(0)
        assert rig.memory.counters.dropped > 0
        gate.opened.set()
        assert (await rig.cache.flush(rig.session, 20)).pending == 0

    on_rig(scenario)


def test_flush_is_about_the_session_that_asks(on_rig):
    async def scenario(rig):
        other = Session(2)
        gate = Gate(rig.long, "write")
        rig.put(b"k", b"value", session=other)
        await gate.wait_entered()
        assert await rig.cache.flush(rig.session, 5) == rig.session.flushed()
        assert rig.put(b"k", b"value") == "refreshed"
        assert (await rig.cache.flush(rig.session, 0.05)).pending == 1
        gate.opened.set()
        assert (await rig.cache.flush(rig.session, 20)).durable == 1
        assert (await rig.cache.flush(other, 20)).durable == 1

    on_rig(scenario)


def test_closing_waits_for_readers_and_refuses_new_ones(on_rig):
    async def scenario(rig):
        await rig.only_on_disk({b"k": b"value"})
        gate = Gate(rig.long, "read")
        asker = asyncio.ensure_future(rig.get(b"k"))
        await gate.wait_entered()
        closing = asyncio.ensure_future(rig.long.on_writer(rig.long.close_region))
        await asyncio.sleep(0.05)
        assert not closing.done()
        assert len(rig.long.store) == 1
        gate.opened.set()
        assert await asker == [b"value"]
        await closing
        assert await rig.get(b"k", b"absent") == [b"value", None]

    on_rig(scenario)
