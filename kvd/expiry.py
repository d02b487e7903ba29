"""Expiry across tiers: boot clock in memory, wall clock in the metadata on disk."""

from __future__ import annotations

import struct
import time

# Metadata of a block on disk: a format byte and the expiry, milliseconds since the epoch.
METADATA = struct.Struct("<BQ")
FORMAT = 1
# A refresh rewrites a block only if its copy on disk would expire this much too early.
TOLERANCE_NS = 60_000_000_000
CLOCK_TRIES = 8
CLOCK_QUICK_NS = 100_000
ROUNDING_NS = 2_000_000  # Two stamps of one moment, made of two clocks in whole milliseconds.


def boot_clock_ns() -> int:
    """Return the clock that expiry in memory is measured by: it counts suspended time too."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def to_metadata(expires_ns: int) -> bytes | None:
    """Return what to keep on disk for an expiry of the boot clock; 0 is never."""
    if not expires_ns:
        return None
    return METADATA.pack(FORMAT, max(0, expires_ns + _wall_ahead_ns()) // 1_000_000)


def from_metadata(metadata: bytes | None) -> int:
    """Return the expiry on the boot clock that metadata says; 0 is never.

    What cannot be read counts as expired long ago: a value too old is worse than a miss.
    """
    if not metadata:
        return 0
    if len(metadata) != METADATA.size or metadata[0] != FORMAT:
        return 1
    _, expires_ms = METADATA.unpack(metadata)
    return int(max(1, expires_ms * 1_000_000 - _wall_ahead_ns()))


def _wall_ahead_ns() -> int:
    """Return how far the wall clock is ahead of the boot clock.

    A thread may be held up for milliseconds between two clocks: of some tries the quickest counts.
    """
    quickest = ahead = 0
    for attempt in range(CLOCK_TRIES):
        before = boot_clock_ns()
        wall = time.time_ns()
        took = boot_clock_ns() - before
        if not attempt or took < quickest:
            quickest, ahead = took, wall - before - took // 2
        if quickest <= CLOCK_QUICK_NS:
            break
    return ahead


def suits(kept_ns: int, wanted_ns: int) -> bool:
    """Return whether a copy that expires at `kept_ns` does for a block that is to at `wanted_ns`.

    It may go somewhat too early, which is a miss, but not outlast what was asked for.
    """
    if not kept_ns or not wanted_ns:
        return kept_ns == wanted_ns
    return wanted_ns - TOLERANCE_NS <= kept_ns <= wanted_ns + ROUNDING_NS


def earlier(one_ns: int, other_ns: int) -> int:
    """Return the earlier of two expiries; 0 is never."""
    return min(one_ns, other_ns) if one_ns and other_ns else one_ns or other_ns
