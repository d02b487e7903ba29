"""What a store tells about itself."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from tablespace._core.key_index import KeyIndex
from tablespace.recovery_report import RecoveryReport

if TYPE_CHECKING:
    import numpy


class Entry(NamedTuple):
    """One stored value, as the index knows it.

    Attributes
    ----------
    length : int
        Bytes of the value.
    checksum : int
        XXH3-64 of the stored bytes: of the value itself, unless it is compressed.
    seq : int
        Number of the journal record that stored it; grows with every change of the region.
    container, slot : int
        Where it lies.
    metadata : bytes or None
    stored_length : int
        Bytes in the slot: fewer than `length` where the value is compressed.
    """

    length: int
    checksum: int
    seq: int
    container: int
    slot: int
    metadata: bytes | None
    stored_length: int


@dataclass(frozen=True)
class PoolStats:
    """One pool: the containers that have slots of this size now."""

    slot_bytes: int
    containers: int
    slots: int
    free: int


@dataclass(frozen=True)
class Scrubbed:
    """What one call of `Store.scrub` did.

    Attributes
    ----------
    cursor : int
        Where to go on; 0 when all has been read.
    values, damaged : int
        Values read, and those of them that were not sound and are gone.
    bytes_read : int
    """

    cursor: int
    values: int
    damaged: int
    bytes_read: int


@dataclass(frozen=True)
class StoreStats:
    """Counters and choices of a store; slots unless the name says bytes.

    ``free + reserved + live + limbo + quarantined == capacity`` always.  A container that belongs
    to no pool counts as free slots of the smallest size, so with several slot sizes `capacity`
    changes as containers find their pools.  `slot_bytes` is the largest slot size.

    `held_...` are puts of durability "none", written and not durable yet; `queue_...` those of
    "interval" that wait, and `queue_dropped` those that could not be stored after all.
    `limbo` counts slots whose entry is gone but which cannot be used yet: a reader still holds
    them, or their value failed and they wait for their test.  `quarantined` counts those that
    failed it: out of use, also after reopening, until ``check(path, repair=True)`` finds them
    good.  `index_bound_bytes` is what journals and snapshots take on disk at most.
    `slack_bytes` is what the slots of all entries have beyond what lies in them: smaller slot
    sizes make it less.
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
    held_blocks: int
    held_bytes: int
    queue_blocks: int
    queue_bytes: int
    queue_dropped: int
    io_mode: str
    io_engine: str
    failed: str | None
    recovery: RecoveryReport
    choices: list[str] = field(default_factory=list)
    index_bound_bytes: int = 0
    slack_bytes: int = 0


@dataclass(frozen=True)
class FollowerStats(StoreStats):
    """What a follower tells besides: how far behind the writer it is.

    Attributes
    ----------
    seq : int
        Number of the last journal record applied.
    lag_records, lag_bytes : int or None
        What the journal had beyond that when the stats were asked for; None where it could not
        be read (`problem` says why).
    refreshed_s : float
        Seconds since the journal was last looked at with success.
    refreshes, reloads : int
        Looks that found something new; loads of the whole index after the first.
    moved : int
        Reads that found other bytes than the index told of, and were tried once more.
    problem : str or None
        Why the last look failed, or why it stopped before the journal's end.
    """

    seq: int = 0
    lag_records: int | None = 0
    lag_bytes: int | None = 0
    refreshed_s: float = 0.0
    refreshes: int = 0
    reloads: int = 0
    moved: int = 0
    problem: str | None = None


@dataclass
class Counts:
    """What callers asked of a store; added to under `lock`."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    puts: int = 0
    gets: int = 0
    hits: int = 0
    corrupt: int = 0
    read_errors: int = 0
    bytes_read: int = 0


def slot_counts(index: KeyIndex) -> dict[str, int]:
    """Return the accounting of a region's slots."""
    allocator = index.allocator
    capacity = allocator.capacity
    counts = {
        "free": allocator.free_count,
        "live": index.live_count,
        "limbo": index.limbo_count,
        "quarantined": allocator.quarantined_count,
    }
    # A slot in none of these states is reserved by a commit under way.
    return {**counts, "capacity": capacity, "reserved": capacity - sum(counts.values())}


def entry_array(index: KeyIndex) -> numpy.ndarray[Any, Any]:
    """Return an index's entries as a structured array, see `Store.entries`."""
    import numpy

    keys, containers, slots, lengths, checks, seqs, sizes, stored = index.columns()
    columns: list[tuple[str, Any, list[Any]]] = [
        ("key", object, list(keys)),
        ("container", "u4", list(containers)),
        ("slot", "u4", list(slots)),
        ("length", "u4", list(lengths)),
        ("stored_length", "u4", list(stored)),
        ("slot_bytes", "u4", list(sizes)),
        ("checksum", "u8", list(checks)),
        ("seq", "u8", list(seqs)),
    ]
    out = numpy.empty(len(keys), dtype=[(name, kind) for name, kind, _ in columns])
    for name, _, column in columns:
        out[name] = column
    return out
