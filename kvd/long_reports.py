"""The long tier's part of STATS: each path's state, and their sums."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvd.census import in_our_words
from kvd.followed import Followed
from kvd.latency import LatencyRing
from kvd.long_paths import LongPaths
from kvd.long_tier import LongTier
from kvd.long_values import LongCounters
from kvd.quotas import Quotas
from kvd.results import LongStats, PathStats, SlotCounts
from kvd.write_back import WriteBack
from kvd.write_lane import WriteLane
from tablespace import TablespaceError

if TYPE_CHECKING:
    from tablespace import FollowerStats, StoreStats


LOOK_S = 0.5


def no_long_tier() -> LongStats:
    """Return the report where there is no long tier."""
    return _sums([], LongCounters(), None, [], [])


async def long_stats(paths: LongPaths, write_back: WriteBack, quotas: Quotas | None) -> LongStats:
    """Collect the counters of every path. The stores are asked on their index threads."""
    found: list[tuple[LongTier, StoreStats | None]] = []
    reports: list[PathStats] = []
    for lane in write_back.lanes:
        store: StoreStats | None = None
        try:
            store = await lane.tier.on_index(lane.tier.stats)
            # Not on a thread that lookups use: of a dead mount this may never return.
            looked = lane.tier.on_scrubber(lane.tier.free_space.look)
            await asyncio.wait_for(looked, LOOK_S)
        except (TablespaceError, OSError, asyncio.TimeoutError):
            pass  # It is being opened, the daemon stops, or the mount does not answer.
        found.append((lane.tier, store))
        reports.append(_path(lane, store, paths.timeout_s))
    followed = [await _followed(source) for source in paths.followed]
    return _sums(found, paths.counters, (paths, write_back, quotas), reports, followed)


def _used_bytes(store: StoreStats | None) -> int:
    if store is None:
        return 0
    return sum((pool.slots - pool.free) * pool.slot_bytes for pool in store.pools)


def state_of(tier: LongTier, timeout_s: float) -> str:
    """Return one word for how a path is."""
    if not tier.is_up:
        return "read_only" if tier.is_open else "away"
    return "stuck" if tier.progress.stands_still(timeout_s) else "up"


def _path(lane: WriteLane, store: StoreStats | None, timeout_s: float) -> PathStats:
    tier = lane.tier
    return PathStats(
        path=str(tier.directory),
        state=state_of(tier, timeout_s),
        problem=tier.failure or tier.health.problem or tier.refusal,
        retry_in_s=round(tier.health.retry_in_s, 3),
        failures=tier.health.failures,
        reopened=tier.health.reopened,
        uuid=tier.uuid,
        entries=store.live if store is not None else 0,
        used_bytes=_used_bytes(store),
        max_bytes=tier.max_bytes,
        index_bound_bytes=tier.index_bound_bytes,
        free_bytes=tier.free_space.free_bytes,
        slot_sizes=list(tier.slot_sizes),
        blocks_written=tier.blocks_written,
        hits=store.hits if store is not None else 0,
        evictions=tier.eviction.evictions,
        corrupt=store.corrupt if store is not None else 0,
        reads_under_way=tier.progress.calls,
        queue_blocks=lane.queue_blocks,
        queue_bytes=lane.queue_bytes,
        choices=in_our_words(store.choices, tier.evict_policy) if store is not None else [],
        slots=_slots(store),
        deletions_owed=len(tier.hidden),
    )


def _slots(store: StoreStats | None) -> SlotCounts:
    if store is None:
        return SlotCounts()
    return SlotCounts(
        store.capacity, store.free, store.live, store.limbo, store.reserved, store.quarantined
    )


async def _followed(source: Followed) -> PathStats:
    store: FollowerStats | None = None
    try:
        store = await source.on_index(source.stats)
    except (TablespaceError, OSError, RuntimeError):
        pass  # It is not there; `problem` says why.
    return PathStats(
        path=str(source.directory),
        state="away" if store is None else "followed",
        problem=source.health.problem or (store.problem if store is not None else None),
        retry_in_s=round(source.health.retry_in_s, 3),
        failures=source.health.failures,
        reopened=source.health.reopened,
        entries=store.live if store is not None else 0,
        hits=source.hits,
        corrupt=store.corrupt if store is not None else 0,
        reads_under_way=source.progress.calls,
        lag_records=store.lag_records if store is not None else None,
        choices=store.choices if store is not None else [],
    )


def _sums(
    found: list[tuple[LongTier, StoreStats | None]],
    counters: LongCounters,
    parts: tuple[LongPaths, WriteBack, Quotas | None] | None,
    reports: list[PathStats],
    followed: list[PathStats],
) -> LongStats:
    stores = [store for _, store in found if store is not None]
    paths, write_back, quotas = parts or (None, None, None)
    admission = write_back.admission if write_back is not None else None
    written, promoted = LatencyRing(), LatencyRing()
    if paths is not None:
        written, promoted = paths.write_latency, paths.promotion_latency
    return LongStats(
        enabled=paths is not None,
        failed=paths is not None and paths.trouble is not None,
        hits=counters.hits,
        misses=counters.misses,
        evictions=sum(tier.eviction.evictions for tier, _ in found),
        reclaimed_bytes=sum(tier.eviction.reclaimed_bytes for tier, _ in found),
        corrupt=sum(store.corrupt for store in stores),
        dropped=counters.dropped,
        entries=sum(store.live for store in stores),
        capacity_slots=sum(store.capacity for store in stores),
        largest_slot_bytes=min((store.slot_bytes for store in stores), default=0),
        used_bytes=sum(_used_bytes(store) for store in stores),
        max_bytes=paths.max_bytes if paths is not None else 0,
        blocks_written=counters.blocks_written,
        bytes_written=counters.bytes_written,
        blocks_promoted=counters.blocks_promoted,
        bytes_read=counters.bytes_read,
        reads_failed=counters.reads_failed,
        promotions_no_room=counters.promotions_no_room,
        queue_blocks=write_back.queue_blocks if write_back is not None else 0,
        queue_bytes=write_back.queue_bytes if write_back is not None else 0,
        in_flight_blocks=write_back.in_flight_blocks if write_back is not None else 0,
        write_back=written.summary(),
        promotion=promoted.summary(),
        io_mode=", ".join(dict.fromkeys(store.io_mode for store in stores)),
        io_engine=", ".join(dict.fromkeys(store.io_engine for store in stores)),
        recovered_entries=sum(store.recovery.entries for store in stores),
        recovery_seconds=sum(store.recovery.seconds for store in stores),
        recovery_source=", ".join(dict.fromkeys(str(store.recovery.source) for store in stores)),
        region=", ".join(str(tier.region) for tier, _ in found),
        paths=reports,
        followed=followed,
        dropped_by=dict(counters.dropped_by),
        admitted=admission.admitted if admission is not None else 0,
        not_admitted=admission.refused if admission is not None else 0,
        scrubbed_values=counters.scrubbed_values,
        scrubbed_bytes=counters.scrubbed_bytes,
        scrub_damaged=counters.scrub_damaged,
        rejected_writes=sum(tier.ledger.rejected_writes for tier, _ in found)
        + (quotas.rejected.total() if quotas is not None else 0),
        written_never_read_bytes=sum(tier.ledger.census.never_read_bytes for tier, _ in found),
        index_bound_bytes=sum(tier.index_bound_bytes for tier, _ in found),
    )
