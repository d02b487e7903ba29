"""Opening the long tier at start: every path that can be, and what to say about the rest."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

from kvd.admission import SecondHit
from kvd.config import Config
from kvd.errors import KvdError, RefusedError
from kvd.followed import Followed
from kvd.free_space import BelowFloorError
from kvd.long_paths import LongPaths
from kvd.long_tier import LongTier
from kvd.long_values import LongCounters, RegionOptions
from kvd.region_eviction import EvictionFlags
from tablespace import FormatVersionError, GeometryError, format_size

logger = logging.getLogger(__name__)


def make_paths(flags: Config) -> LongPaths | None:
    """Return the long tier that the flags ask for, nothing of it open yet; None for none."""
    if not flags.paths:
        return None
    options = RegionOptions(
        recover=flags.recover,
        container_bytes=flags.container_bytes,
        workers=flags.long_workers,
        free_floor_bytes=flags.free_floor,
    )
    counters = LongCounters()
    evict = EvictionFlags(flags.evict_policy, flags.watermark, flags.evict_ratio)
    # With "auto" a region keeps the sizes it has; a new one begins with the default.
    sizes = None if flags.slots.auto else flags.slots.sizes
    tiers = [
        LongTier(
            path,
            flags.path_bytes,
            sizes,
            flags.io_mode,
            options=options,
            counters=counters,
            evict=evict,
        )
        for path in flags.paths
    ]
    followed = [Followed(path, flags.io_mode, flags.long_workers) for path in flags.follow or ()]
    return LongPaths(
        tiers,
        followed,
        timeout_s=flags.long_timeout_ms / 1000,
        auto_slots=flags.slots.auto,
    )


async def opened(opening: asyncio.Future[None], region: Path, every_s: float = 5.0) -> None:
    """Wait for a region to be open, and say now and then that it takes its time."""
    started = time.monotonic()
    while not (await asyncio.wait([opening], timeout=every_s))[0]:
        logger.info(
            "still opening %s: %.0f s; clients are served after that",
            region,
            time.monotonic() - started,
        )
    opening.result()


async def open_paths(paths: LongPaths) -> list[str]:
    """Open all regions at once and return what to say about those that are not.

    Raises
    ------
    RefusedError, ConfigError
        Another process holds a region; or the flags do not fit one; or there is only one path
        and it cannot be opened, unless for want of free space.
    """
    try:
        notes = await _open_all(paths)
    except Exception:
        # A start that is refused leaves nothing that it made.
        for tier in paths.tiers:
            tier.unmake()
        raise
    notes += await paths.owed.load()
    for source in paths.followed:
        try:
            await source.on_index(source.open_region)
        except Exception as error:
            source.health.failed(f"{type(error).__name__}: {error}")
            notes.append(f"--follow {source.directory} is not there and is tried again: {error}")
    for note in notes:
        logger.warning("%s", note)
    return notes + _room(paths)


async def _open_all(paths: LongPaths) -> list[str]:
    """Open the own regions, all at once; see `open_paths`."""
    results = await asyncio.gather(
        *(opened(tier.on_writer(tier.open_region), tier.region) for tier in paths.tiers),
        return_exceptions=True,
    )
    notes: list[str] = []
    for tier, problem in zip(paths.tiers, results, strict=True):
        if problem is None:
            continue
        cause = problem.__cause__
        # What trying again cannot mend is refused, however many paths there are.
        hopeless = isinstance(cause, GeometryError | FormatVersionError | ValueError)
        alone = len(paths.tiers) == 1 and not isinstance(cause, BelowFloorError)
        if not isinstance(problem, KvdError) or isinstance(problem, RefusedError):
            raise problem
        if hopeless or alone:
            raise problem
        # It takes writes once what was deleted meanwhile is deleted there, not before.
        tier.failure = str(problem)
        tier.health.failed(tier.failure)
        notes.append(f"{tier.directory} is away and is tried again: {problem}")
    if all(not tier.is_open for tier in paths.tiers):
        only_room = all(
            isinstance(problem, BaseException) and isinstance(problem.__cause__, BelowFloorError)
            for problem in results
        )
        if not only_room:
            raise next(problem for problem in results if isinstance(problem, BaseException))
    return notes


def _room(paths: LongPaths) -> list[str]:
    """Return warnings where a budget does not fit its file system above the floor.

    Without a floor `kvd.preflight` has said it.
    """
    notes = []
    for tier in paths.tiers:
        if not tier.options.free_floor_bytes:
            continue
        try:
            missing = tier.free_space.missing_for(tier.max_bytes - tier.allocated_bytes())
        except OSError:
            continue
        if missing > 0:
            notes.append(
                f"warning: {tier.directory} has {format_size(missing)} too little free for its "
                f"share of --long-bytes, {format_size(tier.max_bytes)}, above the floor of "
                f"{format_size(tier.options.free_floor_bytes)}; lower --long-bytes or "
                "--free-floor, or make room"
            )
    return notes


def make_admission(flags: Config) -> SecondHit | None:
    """Return what the flags ask for: as many keys known as the long tier has slots, twice."""
    if flags.admission == "all":
        return None
    return SecondHit(2 * flags.long_bytes // flags.slots.sizes[0])


def lines(paths: LongPaths) -> list[str]:
    """Return the banner's lines about the paths. Disk-free, but for what was asked at open."""
    out = []
    for tier in paths.tiers:
        if not tier.is_open:
            out.append(f"  disk     {tier.region}: AWAY, {tier.health.problem}")
            continue
        stats = tier.stats()
        out.append(
            f"  disk     {format_size(tier.max_bytes)} in {tier.region}, {stats.capacity} slots, "
            f"io {stats.io_mode} by {stats.io_engine}"
        )
        out.append(
            f"  index    at most {format_size(tier.index_bound_bytes)} "
            f"({tier.index_bound_bytes} bytes) beside that"
        )
        if tier.resized_from is not None:
            out.append(
                f"  resized  from {format_size(tier.resized_from)}; a larger one keeps every "
                "block, a smaller one those that lie in what is left"
            )
        out.append(
            f"  reopened {stats.recovery.entries} blocks in {stats.recovery.seconds:.3f} s "
            f"from {stats.recovery.source}"
        )
    out += [f"  follow   {source.region}" for source in paths.followed]
    return out
