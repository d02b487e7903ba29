"""Status: how full the long tier is and how it fares, of a running daemon or a stopped region."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvd import temp_guard
from kvd.cache import Cache
from kvd.census import Census, Usage, in_our_words
from kvd.class_reports import class_use
from kvd.latency import LatencyRing
from kvd.long_tier import LongTier
from kvd.path_region import REGION_DIRECTORY
from kvd.purging import label_of
from kvd.quotas import Limits
from kvd.results import Choices, ClassUse, NamespaceUse, PathHealth, Status, TierUse
from kvd.version import __version__
from tablespace import StoreStats, TablespaceError

DISK_TIMEOUT_S = 5.0
SOFT_PRESSURE = 0.9  # --watermark's default: where background eviction begins.


def used_bytes(store: StoreStats) -> int:
    """Return the bytes of all slots that are not free."""
    return sum((pool.slots - pool.free) * pool.slot_bytes for pool in store.pools)


def allocated_bytes(directory: Path) -> int:
    """Return what a directory takes on its disk, as du(1) counts."""
    total = 0
    for parent, _, files in os.walk(directory):
        for name in [".", *files]:
            try:
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512
            except OSError:
                continue  # It went while we looked.
    return total


def region_bytes(region: Path) -> int:
    """Return the bytes of a region's containers: what its slots may take."""
    try:
        return sum(file.stat().st_size for file in (region / "containers").glob("*.bin"))
    except OSError:
        return 0


def named(usage: Mapping[bytes, Usage], names: Mapping[bytes, str]) -> dict[str, Usage]:
    """Return what each namespace has, by its name or what stands for it."""
    found = {label_of(prefix, names.get(prefix)): each for prefix, each in usage.items()}
    return dict(sorted(found.items()))


@dataclass(frozen=True)
class Disk:
    """What only the disk can tell of a long path."""

    tmp_files: int = 0
    tmp_files_bytes: int = 0
    allocated_bytes: int = 0
    max_bytes: int = 0

    def __add__(self, other: Disk) -> Disk:
        return Disk(
            self.tmp_files + other.tmp_files,
            self.tmp_files_bytes + other.tmp_files_bytes,
            self.allocated_bytes + other.allocated_bytes,
            self.max_bytes + other.max_bytes,
        )


def look_at_disk(directory: Path) -> Disk:
    """Look at a long path. For a thread that may wait."""
    temporary = temp_guard.find(directory)
    return Disk(
        len(temporary),
        sum(each.size_bytes for each in temporary),
        allocated_bytes(directory),
        region_bytes(directory / REGION_DIRECTORY),
    )


@dataclass(frozen=True)
class PathLook:
    """What one path told, as far as it did."""

    store: StoreStats | None
    usage: dict[bytes, Usage]
    disk: Disk
    health: PathHealth


async def status_of_daemon(cache: Cache, *, pid: int, uptime_s: float, notes: list[str]) -> Status:
    """Return the status of a running daemon. Event loop only."""
    names = {space.prefix: space.name for space in cache.namespaces.with_blocks()}
    long_tier = cache.long
    memory = cache.memory
    tiers = {
        "memory": TierUse(
            memory.counters.hits,
            memory.counters.misses,
            memory.entries,
            memory.slabs.used_bytes,
            LatencyRing().summary(),
            memory.arena.data_bytes,
        )
    }
    if long_tier is None or cache.quotas is None:
        return _status(
            [],
            names,
            {},
            state="running",
            pid=pid,
            uptime_s=uptime_s,
            tiers=tiers,
            notes=notes,
            dropped=memory.counters.dropped,
            memory_classes=class_use(memory),
        )
    looks = await asyncio.gather(*(_look(tier) for tier in cache.tiers))
    stores = [each.store for each in looks if each.store is not None]
    counters = long_tier.counters
    disk = sum((each.disk for each in looks), Disk())
    tiers["long"] = TierUse(
        counters.hits,
        counters.misses,
        sum(store.live for store in stores),
        sum(used_bytes(store) for store in stores),
        long_tier.promotion_latency.summary(),
        disk.max_bytes,
    )
    ledgers = [tier.ledger for tier in cache.tiers]
    rejected = cache.quotas.rejected
    return _status(
        stores,
        names,
        total_usage(each.usage for each in looks),
        state="running",
        pid=pid,
        uptime_s=uptime_s,
        tiers=tiers,
        notes=notes,
        disk=disk,
        quotas=cache.quotas.limits,
        dropped=memory.counters.dropped + counters.dropped,
        rejected=dict(rejected),
        rejected_writes=rejected.total() + sum(ledger.rejected_writes for ledger in ledgers),
        written_blocks=sum(ledger.census.written_blocks for ledger in ledgers),
        written_bytes=sum(ledger.census.written_bytes for ledger in ledgers),
        never_read_blocks=sum(ledger.census.never_read_blocks for ledger in ledgers),
        never_read_bytes=sum(ledger.census.never_read_bytes for ledger in ledgers),
        read_blocks=sum(ledger.census.read_blocks for ledger in ledgers),
        health=[each.health for each in looks],
        evictions=sum(tier.eviction.evictions for tier in cache.tiers),
        reclaimed_bytes=sum(tier.eviction.reclaimed_bytes for tier in cache.tiers),
        watermark=cache.tiers[0].eviction.flags.watermark,
        policy=cache.tiers[0].evict_policy,
        recover=cache.tiers[0].recover,
        memory_classes=class_use(memory),
    )


async def _look(tier: LongTier) -> PathLook:
    """Ask one path, and its disk. One look at a time: those that hang would take all readers."""
    store, usage, problem = None, dict[bytes, Usage](), tier.failure or tier.refusal or ""
    try:
        store, usage = await tier.on_index(_books, tier)
        problem = problem or store.failed or ""
        look = tier.disk_look
        if look is None or look.done():
            look = tier.disk_look = tier.on_reader(look_at_disk, tier.directory)
        # The one waited for, not whichever another question has begun since.
        done, _ = await asyncio.wait([look], timeout=DISK_TIMEOUT_S)
        disk = look.result() if done else Disk(max_bytes=tier.max_bytes)
        if not done:
            problem = problem or f"the disk did not answer within {DISK_TIMEOUT_S:g} s"
    except (TablespaceError, OSError) as error:
        problem, disk = problem or str(error), Disk(max_bytes=tier.max_bytes)
    state = "failed" if problem else "ok"
    if tier.names_problem is not None:
        problem = problem or f"the names of namespaces are not written: {tier.names_problem}"
    health = PathHealth(str(tier.directory), state, problem)
    return PathLook(store, usage, disk, health)


def _books(tier: LongTier) -> tuple[StoreStats, dict[bytes, Usage]]:
    """Return what the region counts and what the census does, at the same moment."""
    return tier.stats(), tier.ledger.census.usage()


def total_usage(usages: Iterable[Mapping[bytes, Usage]]) -> dict[bytes, Usage]:
    """Return what each prefix has in all regions together."""
    total: dict[bytes, Usage] = {}
    for usage in usages:
        for prefix, each in usage.items():
            sums = total.setdefault(prefix, Usage())
            sums.entries += each.entries
            sums.bytes += each.bytes
            sums.value_bytes += each.value_bytes
    return total


def status_of_regions(
    regions: Iterable[tuple[StoreStats, Census]],
    names: Mapping[bytes, str],
    quotas: Limits,
    disk: Disk,
    health: Sequence[PathHealth],
) -> Status:
    """Return the status of regions that no daemon serves."""
    regions = list(regions)
    usage = total_usage(census.usage() for _, census in regions)
    stores = [store for store, _ in regions]
    nothing = LatencyRing().summary()
    entries = sum(store.live for store in stores)
    used = sum(used_bytes(store) for store in stores)
    return _status(
        stores,
        names,
        usage,
        state="stopped" if all(each.state == "stopped" for each in health) else "in use",
        tiers={
            "memory": TierUse(0, 0, 0, 0, nothing),
            "long": TierUse(0, 0, entries, used, nothing, disk.max_bytes),
        },
        disk=disk,
        quotas=quotas,
        health=health,
    )


def _status(
    stores: Sequence[StoreStats],
    names: Mapping[bytes, str],
    usage: Mapping[bytes, Usage],
    *,
    state: str,
    tiers: dict[str, TierUse],
    disk: Disk | None = None,
    pid: int | None = None,
    uptime_s: float | None = None,
    notes: Sequence[str] = (),
    quotas: Limits | None = None,
    rejected: dict[str, int] | None = None,
    rejected_writes: int = 0,
    dropped: int = 0,
    written_blocks: int = 0,
    written_bytes: int = 0,
    never_read_blocks: int = 0,
    never_read_bytes: int = 0,
    read_blocks: int = 0,
    health: Sequence[PathHealth] = (),
    evictions: int = 0,
    reclaimed_bytes: int = 0,
    watermark: float = SOFT_PRESSURE,
    policy: str = "",
    recover: str = "",
    memory_classes: Sequence[ClassUse] = (),
) -> Status:
    used = sum(used_bytes(store) for store in stores)
    disk = disk or Disk()
    max_bytes = max(disk.max_bytes, used)
    fraction = used / max_bytes if max_bytes else 0.0
    by_name = named(usage, names)
    return Status(
        state=state,
        version=__version__,
        pid=pid,
        uptime_s=uptime_s,
        used_bytes=used,
        free_bytes=max_bytes - used,
        max_bytes=max_bytes,
        usage_fraction=round(fraction, 6),
        soft_pressure=fraction >= min(watermark, SOFT_PRESSURE),
        value_bytes=sum(each.value_bytes for each in usage.values()),
        allocated_bytes=disk.allocated_bytes,
        index_bound_bytes=sum(store.index_bound_bytes for store in stores),
        per_namespace_bytes={name: each.bytes for name, each in by_name.items()},
        per_namespace_value_bytes={name: each.value_bytes for name, each in by_name.items()},
        namespaces={
            name: NamespaceUse(each.entries, each.bytes) for name, each in by_name.items()
        },
        quotas=dict(quotas or {}),
        evictions=evictions,
        reclaimed_bytes=reclaimed_bytes,
        rejected_writes=rejected_writes,
        rejected_by_namespace=rejected or {},
        dropped=dropped,
        tmp_files=disk.tmp_files,
        tmp_files_bytes=disk.tmp_files_bytes,
        written_blocks=written_blocks,
        written_bytes=written_bytes,
        written_never_read_blocks=never_read_blocks,
        written_never_read_bytes=never_read_bytes,
        read_blocks=read_blocks,
        corrupt=sum(store.corrupt for store in stores),
        tiers=tiers,
        health=list(health),
        choices=Choices(
            io_mode=_joined(store.io_mode for store in stores),
            io_engine=_joined(store.io_engine for store in stores),
            evict_policy=policy,
            recover=recover,
            recovery_source=_joined(str(store.recovery.source) for store in stores),
            recovered_entries=sum(store.recovery.entries for store in stores),
            recovery_seconds=round(sum(store.recovery.seconds for store in stores), 6),
            reasons=[reason for store in stores for reason in in_our_words(store.choices, policy)],
        ),
        notes=list(notes),
        memory_classes=list(memory_classes),
    )


def _joined(words: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(words))
