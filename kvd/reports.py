"""Reports: the counters of every part, gathered into one Stats."""

from __future__ import annotations

from kvd.cache import Cache
from kvd.class_reports import class_use
from kvd.long_paths import LongPaths
from kvd.long_reports import long_stats, no_long_tier
from kvd.policy.live import curve_of
from kvd.quotas import Quotas
from kvd.results import LongStats, MemoryStats, Stats
from kvd.version import __version__
from kvd.write_back import WriteBack


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
        slots=memory.slabs.slots,
        slots_populated=memory.slabs.populated_slots,
        slots_free=memory.free_slots,
        slots_reserved=memory.reserved_slots,
        slots_quarantined=memory.quarantined_slots,
        slots_leased=memory.leased_slots,
        slots_held=memory.held_slots,
        bytes_in=counters.bytes_in,
        bytes_out=counters.bytes_out,
        pinned=arena.pin_refusal is None,
        used_bytes=memory.slabs.used_bytes,
        free_bytes=memory.slabs.free_bytes,
        data_bytes=arena.data_bytes,
        slab_bytes=arena.geometry.slab_bytes,
        slabs=arena.geometry.slab_count,
        slabs_spare=memory.slabs.spare_slabs,
        slabs_taken=memory.slabs_taken,
        huge_bytes=arena.huge_bytes,
        classes=class_use(memory),
    )


async def _long(
    paths: LongPaths | None, write_back: WriteBack | None, quotas: Quotas | None
) -> LongStats:
    if paths is None or write_back is None:
        return no_long_tier()
    return await long_stats(paths, write_back, quotas)
