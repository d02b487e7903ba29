"""Moves between the tiers, forced into the interesting orders by gates at the disk."""

import asyncio

import pytest

from kvd.session import Session
from tablespace import FailedError

SLOT = 4096
SLOTS = 64


def test_many_askers_cause_one_read(on_rig):
    async def scenario(rig):
        await rig.only_on_disk({b"k": b"value"})
        gate = rig.gate("read")
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
        gate = rig.gate("read")
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
        gate = rig.gate("delete")
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
        gate = rig.gate("write")
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
        gate = rig.gate("read")
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
        gate = rig.gate("touch")
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
        gate = rig.gate("write")
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
        monkeypatch.setattr("kvd.write_lane.STALL_S", 0.0)
        gate = rig.gate("write")
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
        gate = rig.gate("write")
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
        gate = rig.gate("read")
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


def test_a_lookup_in_waiting_holds_no_values(on_rig):
    """Values of memory were copied when found and kept until the disk had answered for the
    rest: sixty small requests held 1.2 GiB. They are copied as the reply is made."""

    async def scenario(rig):
        await rig.only_on_disk({b"k": b"on disk"})
        assert rig.put(b"m", b"in memory", "ephemeral") == "stored"
        assert rig.put(b"gone", b"in memory", "ephemeral") == "stored"
        gate = rig.gate("read")
        keys = [b"m", b"gone", b"k"]
        hits, missing = rig.cache.get("m", keys, True)
        assert missing == [2]
        assert [hit and hit.data for hit in hits] == [None] * 3
        asked = asyncio.ensure_future(rig.cache.fetch("m", keys, True, hits, missing))
        await gate.wait_entered()
        rig.evict(b"gone")
        gate.opened.set()
        assert [hit and hit.data for hit in await asked] == [b"in memory", None, b"on disk"]

    on_rig(scenario)


def test_what_lookups_read_past_memory_is_bounded_together(on_rig, monkeypatch):
    """A full arena sends blocks of the disk inline, 16 MiB a lookup, however many looked up."""

    async def scenario(rig):
        monkeypatch.setattr("kvd.promotion.MAX_LOOSE_BYTES", 2 * SLOT)
        await rig.only_on_disk({b"%d" % n: b"value" for n in range(4)})
        while rig.memory.reserve(1) is not None:
            pass
        gate = rig.gate("read")
        first = asyncio.ensure_future(rig.get(b"0", b"1"))
        await gate.wait_entered()
        assert await rig.get(b"2", b"3") == [None, None]
        gate.opened.set()
        assert await first == [b"value", b"value"]
        assert await rig.get(b"2", b"3") == [b"value", b"value"]

    on_rig(scenario)


def test_a_batch_read_from_one_open_path_costs_the_loop_one_task(on_rig):
    """Each task is some turns of the loop, which a lookup of few blocks waits for: one for the
    read, none to ask an index that is in memory."""

    async def scenario(rig):
        values = {b"%d" % number: bytes([number]) * 100 for number in range(8)}
        await rig.only_on_disk(values)
        made = []
        loop = asyncio.get_running_loop()

        def factory(loop, work, **options):
            made.append(work)
            return asyncio.Task(work, loop=loop, **options)

        loop.set_task_factory(factory)
        try:
            assert await rig.get(*values) == list(values.values())
        finally:
            loop.set_task_factory(None)
        assert len(made) == 1

    on_rig(scenario)
