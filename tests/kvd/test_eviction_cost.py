"""What uses and evictions cost: the event loop, in a memory tier of 100,000 blocks; a region."""

import gc
import time

import pytest

import tablespace
from kvd.arena import Arena
from kvd.block import Block, Retention
from kvd.census import Census
from kvd.memory_tier import MemoryTier
from kvd.namespaces import Namespaces
from kvd.policy.live import Sampled
from kvd.policy.region_policy import RegionPolicy
from kvd.policy.rules import LONG_HALF_LIFE_S, make_rule

BLOCKS = 100_000
SLOT_BYTES = 4096  # Never touched: the arena's pages stay unpopulated.


@pytest.mark.long
@pytest.mark.parametrize("policy", ["value", "lru", "fifo"])
def test_an_eviction_costs_microseconds_however_many_were_used_before(policy):
    namespace = Namespaces(None).get("m")
    arena = Arena(BLOCKS * SLOT_BYTES, SLOT_BYTES)
    tier = MemoryTier(arena, writes_back=False, rule=Sampled(policy, BLOCKS))
    tier.add_slabs(0, arena.geometry.slab_count)

    def publish(number, slot):
        key = b"%d" % number
        tier.publish(Block(namespace, key, slot, SLOT_BYTES, 0, Retention.LONG, 0, number % 16))

    for number in range(BLOCKS):
        publish(number, tier.reserve(SLOT_BYTES)[0])
    blocks = tier.blocks_of(namespace)
    gc.disable()
    try:
        began = time.thread_time()
        for block in blocks:
            tier.touch(block)
        use_us = (time.thread_time() - began) / BLOCKS * 1e6
        times = []
        for number in range(BLOCKS, 2 * BLOCKS):
            began = time.thread_time()
            slot, _ = tier.reserve(SLOT_BYTES)
            times.append(time.thread_time() - began)
            publish(number, slot)
    finally:
        gc.enable()
        arena.close()
    mean_us = sum(times) / BLOCKS * 1e6
    print(
        f"{policy}: touch {use_us:.1f} us, reserve and evict {mean_us:.1f} us, "
        f"the worst {max(times) * 1e3:.2f} ms"
    )
    assert tier.counters.evictions == BLOCKS
    # Generous for a busy machine; a walk over all entries at once takes a tenth of a second.
    assert mean_us < 50
    assert max(times) < 0.03


@pytest.mark.long
@pytest.mark.parametrize("policy", ["value", "lru", "fifo"])
def test_a_use_of_what_is_on_disk_costs_less_than_a_microsecond(policy, tmp_path):
    """By 64 keys at a time, through the store, the census and the policy."""
    count, rounds = 8192, 10
    rule = make_rule(policy, count, half_life_s=LONG_HALF_LIFE_S)
    chooser = Census(RegionPolicy(rule))
    keys = [b"0123456789abcdef%06d" % number for number in range(count)]
    options = {"max_bytes": "64M", "slot_bytes": "4K", "durability": "none"}
    with tablespace.open(tmp_path / "region", eviction=chooser, **options) as store:
        assert all(store.put_many((key, b"value") for key in keys))
        gc.disable()
        try:
            began = time.thread_time()
            for _ in range(rounds):
                for first in range(0, count, 64):
                    store.touch_many(keys[first : first + 64])
            used_us = (time.thread_time() - began) / (rounds * count) * 1e6
        finally:
            gc.enable()
    print(f"{policy}: touch_many {used_us:.2f} us a key")
    assert used_us < 5  # Generous for a busy machine; a call and a lock a key took 6.
