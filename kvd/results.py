"""What the client's calls return: small immutable structs, the same ones that travel."""

from typing import Any

import msgspec

from kvd.policy.simulation import Row


class Flushed(msgspec.Struct, frozen=True):
    """The answer of `Client.flush`, about every `long` block this session stored before.

    Attributes
    ----------
    durable : int
        Blocks that are on the long tier's medium, or were there already.
    dropped : int
        Blocks that will not get there: no long tier, no room, damaged, or lost with a daemon
        that left before it could confirm them.
    pending : int
        Blocks still waiting when the timeout came; 0 otherwise.
    """

    durable: int
    dropped: int
    pending: int


class Location(msgspec.Struct, frozen=True, array_like=True):
    """Where a block is: in memory, on the long tier, and whether a crash would keep it."""

    memory: bool
    long: bool
    durable: bool


class Cleared(msgspec.Struct, frozen=True):
    """What clearing a namespace removed: distinct blocks over all tiers, and their bytes."""

    entries: int
    bytes: int


class Latency(msgspec.Struct, frozen=True):
    """Percentiles over the last samples, in microseconds."""

    samples: int
    p50_us: float
    p99_us: float


class MemoryStats(msgspec.Struct, frozen=True):
    """Counters and sizes of the memory tier."""

    hits: int
    misses: int
    evictions: int
    expired: int
    no_room: int
    corrupt: int
    dropped: int
    entries: int
    value_bytes: int
    slot_bytes: int
    slots: int
    slots_populated: int
    slots_free: int
    slots_reserved: int
    slots_quarantined: int
    bytes_in: int
    bytes_out: int
    pinned: bool


class LongStats(msgspec.Struct, frozen=True):
    """Counters and sizes of the long tier; `enabled` is False without one."""

    enabled: bool
    failed: bool
    hits: int
    misses: int
    evictions: int
    corrupt: int
    dropped: int
    entries: int
    capacity_slots: int
    used_bytes: int
    max_bytes: int
    blocks_written: int
    bytes_written: int
    blocks_promoted: int
    bytes_read: int
    reads_failed: int
    promotions_no_room: int
    queue_blocks: int
    queue_bytes: int
    in_flight_blocks: int
    write_back: Latency
    promotion: Latency
    io_mode: str
    io_engine: str
    recovered_entries: int
    recovery_seconds: float
    recovery_source: str
    region: str = ""
    reclaimed_bytes: int = 0


class Stats(msgspec.Struct, frozen=True):
    """Everything the daemon counts.

    `gets_total` counts keys looked up (not requests), `hits_total` and `misses_total` split
    it; `sets_total` counts blocks offered, `sets_stored`, `sets_refreshed` and `sets_refused`
    split that. `curve` is hits of blocks against capacity, sampled, of the memory tier's
    policy.
    """

    version: str
    pid: int
    uptime_s: float
    sessions: int
    engines: int
    namespaces: int
    sets_total: int
    sets_stored: int
    sets_refreshed: int
    sets_refused: int
    refused: dict[str, int]
    gets_total: int
    hits_total: int
    misses_total: int
    deletes_total: int
    errors_total: int
    memory: MemoryStats
    long: LongStats
    notes: list[str]
    curve: list[Row] = []

    def to_dict(self) -> dict[str, Any]:
        """Return the same as plain nested dicts, for JSON and for tables."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain
