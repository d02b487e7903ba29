"""What the long tier's parts hand to each other, and how blocks are read out of a store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from kvd.expiry import from_metadata

if TYPE_CHECKING:
    from tablespace import Store


class Outcome(Enum):
    """How one block's write ended."""

    DURABLE = "durable"
    DROPPED = "dropped"
    CORRUPT = "corrupt"


class PartlyWrittenError(Exception):
    """A group of which the disk took some blocks and refused others.

    Attributes
    ----------
    outcomes : list of Outcome
        Per block.
    cause : Exception
        What the disk said of those that are missing.
    """

    def __init__(self, outcomes: list[Outcome], cause: Exception) -> None:
        super().__init__(str(cause))
        self.outcomes = outcomes
        self.cause = cause


@dataclass(frozen=True)
class RegionOptions:
    """How a region is opened and used; the flags of the same names say what each means."""

    recover: str = "salvage"
    container_bytes: int | None = None
    workers: int = 8
    free_floor_bytes: int = 0


@dataclass(frozen=True)
class WriteItem:
    """One block on its way to the medium: all that the writing thread may look at."""

    key: bytes
    view: memoryview
    checksum: int
    metadata: bytes | None
    position: int = 0


class ReadValue(NamedTuple):
    """One block that was read: its length and the checksum it was verified against."""

    length: int
    checksum: int
    expires_ns: int


@dataclass
class LongCounters:
    """What happened on the long tier, all its paths together.

    `dropped_by` splits `dropped` by reason.
    """

    hits: int = 0
    misses: int = 0
    dropped: int = 0
    corrupt: int = 0
    blocks_written: int = 0
    bytes_written: int = 0
    blocks_promoted: int = 0
    bytes_read: int = 0
    reads_failed: int = 0
    promotions_no_room: int = 0
    dropped_by: Counter[str] = field(default_factory=Counter)
    scrubbed_values: int = 0
    scrubbed_bytes: int = 0
    scrub_damaged: int = 0

    def drop(self, reason: str, count: int = 1) -> None:
        """Count blocks that do not get to the long tier."""
        self.dropped += count
        self.dropped_by[reason] += count


def read_into(
    store: Store, keys: Sequence[bytes], views: Sequence[memoryview]
) -> list[ReadValue | None]:
    """Read blocks of a store into the given memory; the store verifies each checksum."""
    return [
        None
        if entry is None
        else ReadValue(entry.length, entry.checksum, from_metadata(entry.metadata))
        for entry in store.get_entries_into(keys, views)
    ]
