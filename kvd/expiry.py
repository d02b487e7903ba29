"""Expiry across tiers: boot clock in memory, wall clock in the metadata on disk."""

from __future__ import annotations

import struct
import time

# Metadata of a block on disk: a format byte and the expiry, milliseconds since the epoch.
METADATA = struct.Struct("<BQ")
FORMAT = 1
# A refresh rewrites a block only if its copy on disk would expire this much too early.
TOLERANCE_MS = 60_000


def boot_clock_ns() -> int:
    """Return the clock that expiry in memory is measured by: it counts suspended time too."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def to_metadata(expires_ns: int) -> bytes | None:
    """Return what to keep on disk for an expiry of the boot clock; 0 is never."""
    if not expires_ns:
        return None
    left_ms = (expires_ns - boot_clock_ns()) // 1_000_000
    return METADATA.pack(FORMAT, max(0, time.time_ns() // 1_000_000 + left_ms))


def from_metadata(metadata: bytes | None) -> int:
    """Return the expiry on the boot clock that metadata says; 0 is never.

    What cannot be read counts as expired long ago: a value too old is worse than a miss.
    """
    if not metadata:
        return 0
    if len(metadata) != METADATA.size or metadata[0] != FORMAT:
        return 1
    _, expires_ms = METADATA.unpack(metadata)
    left_ms = expires_ms - time.time_ns() // 1_000_000
    return int(max(1, boot_clock_ns() + left_ms * 1_000_000))


def outlives(on_disk: bytes | None, wanted: bytes | None) -> bool:
    """Return whether a copy on disk lasts about as long as is wanted now."""
    if not on_disk:
        return True
    if not wanted or len(on_disk) != METADATA.size:
        return False
    return bool(METADATA.unpack(on_disk)[1] + TOLERANCE_MS >= METADATA.unpack(wanted)[1])
