"""What a store tells about itself."""

from __future__ import annotations

from dataclasses import dataclass, field

from tablespace.recovery import RecoveryReport


@dataclass(frozen=True)
class Entry:
    """One stored value, as the index knows it.

    Attributes
    ----------
    length : int
        Bytes of the value.
    checksum : int
        XXH3-64 of the value.
    seq : int
        Number of the journal record that stored it; grows with every change of the region.
    container, slot : int
        Where it lies.
    metadata : bytes or None
    """

    length: int
    checksum: int
    seq: int
    container: int
    slot: int
    metadata: bytes | None


@dataclass(frozen=True)
class PoolStats:
    """One pool: the containers that have slots of this size now."""

    slot_bytes: int
    containers: int
    slots: int
    free: int


@dataclass(frozen=True)
class StoreStats:
    """Counters and choices of a store; slots unless the name says bytes.

    ``free + reserved + live + limbo + quarantined == capacity`` always.  A container that belongs
    to no pool counts as free slots of the smallest size, so with several slot sizes `capacity`
    changes as containers find their pools.  `slot_bytes` is the largest slot size.
    """

    capacity: int
    free: int
    reserved: int
    live: int
    limbo: int
    quarantined: int
    slot_bytes: int
    pools: list[PoolStats]
    puts: int
    gets: int
    hits: int
    misses: int
    evictions: int
    corrupt: int
    read_errors: int
    bytes_written: int
    bytes_read: int
    groups: int
    compactions: int
    journal_bytes: int
    snapshot_bytes: int
    index_bytes: int
    io_mode: str
    io_engine: str
    failed: str | None
    recovery: RecoveryReport
    choices: list[str] = field(default_factory=list)
