"""What a use and an eviction cost the event loop, by memory tiers of 100,000 blocks."""

import gc
import time

import pytest

from kvd.arena import Arena
from kvd.block import Block, Retention
from kvd.memory_tier import MemoryTier
from kvd.namespaces import Namespaces
from kvd.policy.live import Sampled

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
