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
class StoreStats:
    """Counters and choices of a store; slots unless the name says bytes.

    ``free + reserved + live + limbo + quarantined == capacity`` always.
    """

    capacity: int
    free: int
    reserved: int
    live: int
    limbo: int
    quarantined: int
    slot_bytes: int
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
