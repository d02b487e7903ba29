"""--admission second-hit and --write-budget: what does not pay does not wear the disk."""

import asyncio
import time

import pytest

from kvd.admission import KeyFilter, SecondHit
from kvd.write_budget import WriteBudget
from tablespace import key_hash

SLOTS = 64


def test_a_filter_knows_its_keys_and_few_others():
    known = KeyFilter(1 << 16)
    hashes = [key_hash(b"key %d" % number) for number in range(1 << 16)]
    taken_for_old = sum(known.add(each) for each in hashes)
    assert all(each in known for each in hashes)
    assert taken_for_old < len(hashes) * 0.003
    others = sum(key_hash(b"other %d" % number) in known for number in range(1 << 16))
    assert others < (1 << 16) * 0.005


def test_a_trace_without_reuse_writes_next_to_nothing(on_rig):
    """A disk tier wrote 100 GB, served no get and made serving slower."""

    async def scenario(rig):
        for number in range(3000):
            assert rig.put(b"key %d" % number, b"v", "long" if number % 2 else "short") == "stored"
            if not number % 16:
                await asyncio.sleep(0)
        flushed = await rig.cache.flush(rig.session, 20)
        assert flushed.pending == 0
        assert flushed.durable + flushed.dropped == 1500
        await rig.cache.write_back.drain(10)
        counters = rig.paths.counters
        assert counters.blocks_written <= 3000 * 0.05
        assert counters.dropped_by["not_admitted"] == flushed.dropped >= 1400
        # Memory turned over all the same: what is not admitted is no load on it.
        assert rig.memory.counters.no_room == 0
        assert rig.memory.counters.dropped == 0

    on_rig(scenario, admission=SecondHit(1 << 16))


def test_a_block_stored_again_is_written(on_rig):
    async def scenario(rig):
        assert rig.put(b"k", b"value") == "stored"
        assert (await rig.cache.flush(rig.session, 20)).dropped == 1
        rig.evict(b"k")
        assert await rig.get(b"k") == [None]
        assert rig.put(b"k", b"value") == "stored"
        assert (await rig.cache.flush(rig.session, 20)).durable == 1
        rig.evict(b"k")
        assert await rig.get(b"k") == [b"value"]

    on_rig(scenario, admission=SecondHit(1 << 16))


@pytest.mark.parametrize("use", ["get", "put", "touch", "prefetch"])
def test_a_block_used_in_memory_is_written(on_rig, use):
    async def scenario(rig):
        assert rig.put(b"k", b"value") == "stored"
        assert rig.long.blocks_written == 0
        if use == "get":
            assert await rig.get(b"k") == [b"value"]
        elif use == "put":
            assert rig.put(b"k", b"value") == "refreshed"
        elif use == "prefetch":
            assert rig.cache.prefetch("m", [b"k"], 1.0) == 0
        else:
            rig.cache.touch("m", [b"k"])
        await rig.ticking(lambda: rig.long.blocks_written == 1)
        assert (await rig.cache.locate("m", [b"k"]))[0].durable

    on_rig(scenario, admission=SecondHit(1 << 16))


def test_a_used_short_block_is_written_when_it_leaves_and_an_unused_one_is_not(on_rig):
    async def scenario(rig):
        assert rig.put(b"used", b"v", "short") == "stored"
        assert rig.put(b"once", b"v", "short") == "stored"
        assert await rig.get(b"used") == [b"v"]
        assert rig.long.blocks_written == 0
        assert await rig.cache.write_back.drain(10) == 0
        assert await rig.exists(b"used", b"once") == [True, True]
        rig.evict(b"used", b"once")
        assert await rig.exists(b"used", b"once") == [True, False]

    on_rig(scenario, admission=SecondHit(1 << 16))


def test_removed_blocks_are_not_kept_by_the_admission(on_rig):
    async def scenario(rig):
        rig.put(b"k", b"v")
        await rig.cache.delete("m", [b"k"])
        rig.cache.touch("m", [b"k"])
        assert (await rig.cache.flush(rig.session, 10)).pending == 0
        assert rig.long.blocks_written == 0
        assert rig.accounted() == SLOTS

    on_rig(scenario, admission=SecondHit(1 << 16))


def test_a_budget_saves_up_a_second_and_no_more():
    now = [0.0]
    budget = WriteBudget(1000, lambda: now[0])
    assert budget.wait_s() == 0
    budget.spend(1500)
    assert budget.wait_s() == pytest.approx(0.5)
    now[0] = 0.6
    assert budget.wait_s() == 0
    budget.spend(-500)
    now[0] = 100.0
    assert budget.wait_s() == 0
    budget.spend(1000)
    assert budget.wait_s() == 0 or budget.wait_s() < 0.01
    assert WriteBudget(0).wait_s() == 0


def test_what_exceeds_the_budget_waits_and_is_then_dropped_and_counted(on_rig):
    async def scenario(rig):
        rate = 40 * 4096
        began = time.monotonic()
        slowest, stored = 0.0, 0
        for number in range(600):
            one = time.monotonic()
            # Never blocked: memory gives away what waits for the budget. Refused only while the
            # disk is at a group that the budget allowed.
            stored += rig.put(b"%d" % number, bytes(4096)) == "stored"
            slowest = max(slowest, time.monotonic() - one)
            await asyncio.sleep(0.001)
        took = time.monotonic() - began
        assert slowest < 0.2
        assert rig.long.bytes_put <= rate * (took + 1.0) + rate
        assert stored > 500
        assert rig.memory.counters.dropped > 250
        flushed = await rig.cache.flush(rig.session, 20)
        assert flushed.pending == 0
        assert flushed.durable + flushed.dropped == stored
        assert flushed.durable == rig.long.blocks_written
        took = time.monotonic() - began
        assert rig.long.bytes_put <= rate * (took + 1.0) + rate

    on_rig(scenario, budget=WriteBudget(40 * 4096))


def test_blocks_that_are_there_already_cost_no_budget(on_rig):
    async def scenario(rig):
        rig.put(b"k", bytes(4096))
        assert (await rig.cache.flush(rig.session, 20)).durable == 1
        began = time.monotonic()
        for turn in range(40):
            rig.put(b"k", bytes(4096))
            assert (await rig.cache.flush(rig.session, 20)).durable == turn + 2
        assert time.monotonic() - began < 5

    on_rig(scenario, budget=WriteBudget(2 * 4096))
