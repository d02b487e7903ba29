"""Reads from a daemon's statistics the counters that a report shows."""

from __future__ import annotations

from kvd import Stats
from kvd.replay.report import DaemonCounts


def read_counts(stats: Stats) -> DaemonCounts:
    """Return the counters of a report at this moment."""
    return DaemonCounts(
        memory_evictions=stats.memory.evictions,
        long_evictions=stats.long.evictions,
        dropped=stats.memory.dropped + stats.long.dropped,
    )
