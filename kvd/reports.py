"""Reports: the counters of every part, gathered into one Stats."""

from __future__ import annotations

from kvd.cache import Cache
from kvd.latency import LatencyRing
from kvd.long_tier import LongCounters, LongTier
from kvd.policy.live import curve_of
from kvd.quotas import Quotas
from kvd.results import LongStats, MemoryStats, Stats
from kvd.version import __version__
from kvd.write_back import WriteBack
from tablespace import TablespaceError


async def gather(
    cache: Cache,
    *,
    pid: int,
    uptime_s: float,
    sessions: int,
    engines: int,
    errors: int,
    notes: list[str],
) -> Stats:
    """Return the daemon's counters now. The store is asked on the index thread."""
    counters = cache.counters
    return Stats(
        version=__version__,
        pid=pid,
        uptime_s=uptime_s,
        sessions=sessions,
        engines=engines,
        namespaces=len(cache.namespaces),
        sets_total=counters.sets,
        sets_stored=counters.stored,
        sets_refreshed=counters.refreshed,
        sets_refused=sum(counters.refused.values()),
        refused=dict(counters.refused),
        gets_total=counters.gets,
        hits_total=counters.hits,
        misses_total=counters.gets - counters.hits,
        deletes_total=counters.deletes,
        errors_total=errors,
        inline_total=counters.inline,
        memory=_memory(cache),
        long=await _long(cache.long, cache.write_back, cache.quotas),
        notes=notes,
        curve=curve_of(cache.memory.rule),
    )


def _memory(cache: Cache) -> MemoryStats:
    memory, counters, arena = cache.memory, cache.memory.counters, cache.memory.arena
    return MemoryStats(
        hits=counters.hits,
        misses=counters.misses,
        evictions=counters.evictions,
        expired=counters.expired,
        no_room=counters.no_room,
        corrupt=counters.corrupt,
        dropped=counters.dropped,
        entries=memory.entries,
        value_bytes=memory.value_bytes,
        slot_bytes=arena.slot_bytes,
        slots=arena.slot_count,
        slots_populated=arena.populated_slots,
        slots_free=memory.free_slots,
        slots_reserved=memory.reserved_slots,
        slots_quarantined=memory.quarantined_slots,
        slots_leased=memory.leased_slots,
        slots_held=memory.held_slots,
        bytes_in=counters.bytes_in,
        bytes_out=counters.bytes_out,
        pinned=arena.pin_refusal is None,
    )


async def _long(
    long_tier: LongTier | None, write_back: WriteBack | None, quotas: Quotas | None
) -> LongStats:
    store = None
    tiers = long_tier.tiers if long_tier is not None else []
    if long_tier is not None:
        try:
            store = await long_tier.on_index(long_tier.stats)
        except (TablespaceError, OSError):
            store = None
    counters = long_tier.counters if long_tier is not None else LongCounters()
    empty = LatencyRing().summary()
    return LongStats(
        enabled=long_tier is not None,
        failed=long_tier is not None and long_tier.failure is not None,
        hits=counters.hits,
        misses=counters.misses,
        evictions=long_tier.eviction.evictions if long_tier is not None else 0,
        reclaimed_bytes=long_tier.eviction.reclaimed_bytes if long_tier is not None else 0,
        corrupt=store.corrupt if store is not None else 0,
        dropped=counters.dropped,
        entries=store.live if store is not None else 0,
        capacity_slots=store.capacity if store is not None else 0,
        used_bytes=sum((pool.slots - pool.free) * pool.slot_bytes for pool in store.pools)
        if store is not None
        else 0,
        max_bytes=long_tier.max_bytes if long_tier is not None else 0,
        blocks_written=counters.blocks_written,
        bytes_written=counters.bytes_written,
        blocks_promoted=counters.blocks_promoted,
        bytes_read=counters.bytes_read,
        reads_failed=counters.reads_failed,
        promotions_no_room=counters.promotions_no_room,
        queue_blocks=write_back.queue_blocks if write_back is not None else 0,
        queue_bytes=write_back.queue_bytes if write_back is not None else 0,
        in_flight_blocks=write_back.in_flight_blocks if write_back is not None else 0,
        write_back=long_tier.write_latency.summary() if long_tier is not None else empty,
        promotion=long_tier.promotion_latency.summary() if long_tier is not None else empty,
        io_mode=store.io_mode if store is not None else "",
        io_engine=store.io_engine if store is not None else "",
        recovered_entries=store.recovery.entries if store is not None else 0,
        recovery_seconds=store.recovery.seconds if store is not None else 0.0,
        region=str(long_tier.region) if long_tier is not None else "",
        recovery_source=str(store.recovery.source) if store is not None else "",
        rejected_writes=sum(tier.ledger.rejected_writes for tier in tiers)
        + (quotas.rejected.total() if quotas is not None else 0),
        written_never_read_bytes=sum(tier.ledger.census.never_read_bytes for tier in tiers),
    )
