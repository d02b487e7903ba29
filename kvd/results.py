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


class TierPurged(msgspec.Struct, frozen=True):
    """What a purge took from one tier: blocks, bytes of their slots, bytes of their values."""

    entries: int = 0
    bytes: int = 0
    value_bytes: int = 0


class Purged(msgspec.Struct, frozen=True):
    """What a purge took away, or (`dry_run`) would take."""

    memory: TierPurged
    long: TierPurged
    namespaces: list[str]
    dry_run: bool = False
    zeroed_bytes: int = 0
    tmp_files: int = 0
    tmp_files_bytes: int = 0
    tmp_files_kept: int = 0


class NamespaceUse(msgspec.Struct, frozen=True):
    """What a namespace has on the long tier: entries, and bytes of their slots."""

    entries: int
    bytes: int


class TierUse(msgspec.Struct, frozen=True):
    """How a tier was used since the start: latency is that of reads that it served.

    `max_bytes` is its size, 0 where that is not known: of memory when no daemon runs.
    """

    hits: int
    misses: int
    entries: int
    used_bytes: int
    latency: Latency
    max_bytes: int = 0


class ClassUse(msgspec.Struct, frozen=True):
    """One size class of the memory tier: its slots, and what lies in them."""

    slot_bytes: int
    slabs: int
    slots: int
    slots_free: int
    entries: int
    used_bytes: int
    value_bytes: int
    evictions: int


class PathHealth(msgspec.Struct, frozen=True):
    """How one directory of the long tier fares: `ok`, `failed` or `stopped`, and why."""

    path: str
    state: str
    detail: str


class Choices(msgspec.Struct, frozen=True):
    """What was chosen, by whom it may be asked for, and why."""

    io_mode: str
    io_engine: str
    evict_policy: str
    recover: str
    recovery_source: str
    recovered_entries: int
    recovery_seconds: float
    reasons: list[str]


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The long tier's budget and how it fares; what `kvd status --json` prints.

    `bytes` of a namespace and `used_bytes` are those of slots, `value_bytes` those of what lies
    in them; `allocated_bytes` is what the directory takes on its disk. Counters are those of the
    daemon that runs, 0 for a stopped region.
    """

    state: str
    version: str
    used_bytes: int
    free_bytes: int
    max_bytes: int
    usage_fraction: float
    soft_pressure: bool
    value_bytes: int
    allocated_bytes: int
    index_bound_bytes: int
    per_namespace_bytes: dict[str, int]
    per_namespace_value_bytes: dict[str, int]
    namespaces: dict[str, NamespaceUse]
    quotas: dict[str, int]
    evictions: int
    reclaimed_bytes: int
    rejected_writes: int
    rejected_by_namespace: dict[str, int]
    dropped: int
    tmp_files: int
    tmp_files_bytes: int
    written_blocks: int
    written_bytes: int
    written_never_read_blocks: int
    written_never_read_bytes: int
    read_blocks: int
    corrupt: int
    tiers: dict[str, TierUse]
    health: list[PathHealth]
    choices: Choices
    notes: list[str]
    pid: int | None = None
    uptime_s: float | None = None
    memory_classes: list[ClassUse] = []

    def to_dict(self) -> dict[str, Any]:
        """Return the same as plain nested dicts, for JSON."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain


class MemoryStats(msgspec.Struct, frozen=True):
    """Counters and sizes of the memory tier.

    `slot_bytes` is the default size class's. Slots are counted whatever their size; a slab that
    no class has counts as slots of the default class. `used_bytes` are those of slots that hold
    a block, `free_bytes` those of free slots and of slabs that hold nothing.
    `slots_leased` are under a client's lease; `slots_held` are those whose blocks left while they
    were leased, or written to the long tier, and which wait for that to end. Of the populated
    slots each is free, or has an entry, or is reserved, quarantined or held.
    """

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
    slots_leased: int
    slots_held: int
    bytes_in: int
    bytes_out: int
    pinned: bool
    used_bytes: int = 0
    free_bytes: int = 0
    data_bytes: int = 0
    slab_bytes: int = 0
    slabs: int = 0
    slabs_spare: int = 0
    slabs_taken: int = 0
    huge_bytes: int = 0
    classes: list[ClassUse] = []


class SlotCounts(msgspec.Struct, frozen=True):
    """The slots of a region: `free + live + limbo + reserved + quarantined` is `capacity`.

    `limbo` are those whose entry is gone and which a reader still holds, or which wait for a test;
    `quarantined` failed it.
    """

    capacity: int = 0
    free: int = 0
    live: int = 0
    limbo: int = 0
    reserved: int = 0
    quarantined: int = 0


class PathStats(msgspec.Struct, frozen=True):
    """One path of the long tier, or one followed region.

    Attributes
    ----------
    state : str
        "up"; "read_only" (it failed and is still read); "away" (it is not open); "stuck" (its
        reads do not end); "followed".
    problem : str or None
        Why it is not up; `retry_in_s` when it is opened again.
    deletions_owed : int
        Keys and namespaces that were deleted while it took no writes: hidden until it does.
    """

    path: str
    state: str
    problem: str | None = None
    retry_in_s: float = 0.0
    failures: int = 0
    reopened: int = 0
    uuid: str | None = None
    entries: int = 0
    used_bytes: int = 0
    max_bytes: int = 0
    index_bound_bytes: int = 0
    free_bytes: int = 0
    slot_sizes: list[int] = []
    blocks_written: int = 0
    hits: int = 0
    evictions: int = 0
    corrupt: int = 0
    reads_under_way: int = 0
    queue_blocks: int = 0
    queue_bytes: int = 0
    lag_records: int | None = None
    choices: list[str] = []
    slots: SlotCounts = SlotCounts()
    deletions_owed: int = 0


class LongStats(msgspec.Struct, frozen=True):
    """Counters and sizes of the long tier; `enabled` is False without one.

    With several paths the sizes are their sums, and `failed` is True when none takes writes.
    `largest_slot_bytes` is what the longest block may have that every path takes.
    """

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
    paths: list[PathStats] = []
    followed: list[PathStats] = []
    dropped_by: dict[str, int] = {}
    admitted: int = 0
    not_admitted: int = 0
    scrubbed_values: int = 0
    scrubbed_bytes: int = 0
    scrub_damaged: int = 0
    index_bound_bytes: int = 0
    reclaimed_bytes: int = 0
    rejected_writes: int = 0
    written_never_read_bytes: int = 0
    largest_slot_bytes: int = 0


class Stats(msgspec.Struct, frozen=True):
    """Everything the daemon counts.

    `gets_total` counts keys looked up (not requests), `hits_total` and `misses_total` split
    it; `sets_total` counts blocks offered, `sets_stored`, `sets_refreshed` and `sets_refused`
    split that. `inline_total` counts blocks that went through the socket instead of the arena.
    `curve` is hits of blocks against capacity, sampled, of the memory tier's
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
    inline_total: int
    memory: MemoryStats
    long: LongStats
    notes: list[str]
    curve: list[Row] = []

    def to_dict(self) -> dict[str, Any]:
        """Return the same as plain nested dicts, for JSON and for tables."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain
