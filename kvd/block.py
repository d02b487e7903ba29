"""A block in memory, and the retention classes."""

from __future__ import annotations

import time
from enum import IntEnum
from typing import TYPE_CHECKING

from tablespace.policy import Ranked

if TYPE_CHECKING:
    from kvd.namespaces import Namespace
    from kvd.session import Session
    from kvd.size_class import Slab


class Retention(IntEnum):
    """How long a block is worth keeping; ordered, a refresh never lowers it."""

    NONE = 0  # Not stored at all.
    EPHEMERAL = 1  # Memory only.
    SHORT = 2  # Written to the long tier when it leaves memory.
    LONG = 3  # Written to the long tier at once.


RETENTION_BY_NAME = {kind.name.lower(): kind for kind in Retention}


class Block(Ranked):
    """One value in one slot.

    Attributes
    ----------
    slot_bytes, offset : int
        Of its slot, and where that begins in the data memfd.
    version : int
        The even sequence its slot was published under.
    expires_ns : int
        Boot clock; 0 means never.
    durable : bool
        True when the long tier had it the last time that was known.
    admitted : bool
        False while it is not to be written: admission keeps it off the long tier, or its path
        is away. Nothing is owed for it then.
    identity, position, fill, rank, reuses, used_at
        See `tablespace.policy.Ranked`.
    queue : EvictionQueue or None
        The eviction list it stands in; None while it may not be evicted (queued for or in
        flight to the long tier).
    slab : Slab or None
        Where its slot lies, as long as it is in memory.
    writing : bool
        Queued or in flight to the long tier.
    gone : bool
        Deleted or cleared meanwhile: whatever lands for it is thrown away.
    watched_ns : int
        When the sweep will look at it; 0 for never. Not later than it expires.
    watchers : list of (session, ticket)
        Who waits to hear that it is durable.
    since_s : float
        Monotonic clock; when it came into memory.
    """

    __slots__ = (
        "admitted",
        "checksum",
        "durable",
        "expires_ns",
        "gone",
        "key",
        "length",
        "namespace",
        "offset",
        "retention",
        "since_s",
        "slab",
        "slot",
        "slot_bytes",
        "version",
        "watched_ns",
        "watchers",
        "writing",
    )

    def __init__(
        self,
        namespace: Namespace,
        key: bytes,
        slot: int,
        length: int,
        checksum: int,
        retention: Retention,
        expires_ns: int,
        position: int = 0,
    ) -> None:
        super().__init__(hash((namespace.id, key)), position)
        self.namespace = namespace
        self.key = key
        self.slot = slot
        self.length = length
        self.checksum = checksum
        self.retention = retention
        self.expires_ns = expires_ns
        self.slab: Slab | None = None
        self.slot_bytes = 0
        self.offset = 0
        self.version = 0
        self.watched_ns = 0
        self.durable = False
        self.admitted = True
        self.writing = False
        self.gone = False
        self.watchers: list[tuple[Session, int]] = []
        self.since_s = time.monotonic()

    @property
    def disk_key(self) -> bytes:
        """Return the key on the long tier: the same on every host and after every restart."""
        return self.namespace.prefix + self.key

    def resolve(self, durable: bool | None) -> None:
        """Tell the watching sessions: durable, dropped, or (None) removed by request."""
        watchers, self.watchers = self.watchers, []
        for session, ticket in watchers:
            session.resolve(ticket, durable)
