"""Purging one region: which entries are meant, deleting them durably, overwriting their slots."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvd.census import Census
from kvd.errors import KvdError
from kvd.namespaces import PREFIX_BYTES
from tablespace import Store

ZERO_BYTES = 1 << 20  # One write; slots side by side are joined up to this.


@dataclass(frozen=True)
class Selection:
    """Which entries a purge means.

    Attributes
    ----------
    prefixes : frozenset of bytes or None
        Of which namespaces; None for all.
    older_than_s : float or None
        Only those stored at least so long ago.
    """

    prefixes: frozenset[bytes] | None
    older_than_s: float | None = None


@dataclass(frozen=True)
class Row:
    """One entry and where its bytes lie."""

    key: bytes
    length: int
    container: int
    slot: int
    slot_bytes: int


@dataclass(frozen=True)
class Freed:
    """What a purge took away: entries, bytes of their slots, of their values, overwritten ones;
    and of which namespaces."""

    entries: int = 0
    size_bytes: int = 0
    value_bytes: int = 0
    zeroed_bytes: int = 0
    prefixes: frozenset[bytes] = frozenset()

    def __add__(self, other: Freed) -> Freed:
        return Freed(
            self.entries + other.entries,
            self.size_bytes + other.size_bytes,
            self.value_bytes + other.value_bytes,
            self.zeroed_bytes + other.zeroed_bytes,
            self.prefixes | other.prefixes,
        )


def rows_of(
    store: Store, census: Census, keys: Iterable[bytes], limit: int | None = None
) -> list[Row]:
    """Return where entries lie; with `limit` only those numbered up to it."""
    rows: list[Row] = []
    for key in keys:
        entry = store.stat(key)
        if entry is not None and (limit is None or entry.seq <= limit):
            rows.append(
                Row(key, entry.length, entry.container, entry.slot, census.slot_bytes(key))
            )
    return rows


def purge(
    store: Store, region: Path, rows: Sequence[Row], selection: Selection, *, zero: bool
) -> Freed:
    """Delete, durably, what is meant. For the thread that writes to the region.

    Parameters
    ----------
    rows : sequence of Row
        What is meant, as far as it is known.

    Raises
    ------
    TablespaceError, OSError
        As the store; what was deleted before stays deleted.
    """
    if selection.older_than_s is not None:
        return purge_rows(store, region, rows, zero=zero)
    # Clearing ends with a snapshot, so that no file of the index names what is gone.
    for prefix in selection.prefixes if selection.prefixes is not None else (b"",):
        store.clear(prefix)
    return freed(rows, zero_slots(region, rows) if zero else 0)


def purge_rows(store: Store, region: Path, rows: Sequence[Row], *, zero: bool) -> Freed:
    """Delete entries durably. For the thread that writes to the region."""
    store.delete_many([row.key for row in rows])
    return freed(rows, zero_slots(region, rows) if zero else 0)


def freed(rows: Sequence[Row], zeroed_bytes: int = 0) -> Freed:
    """Return what entries come to."""
    return Freed(
        len(rows),
        sum(row.slot_bytes for row in rows),
        sum(row.length for row in rows),
        zeroed_bytes,
        frozenset(row.key[:PREFIX_BYTES] for row in rows),
    )


def zero_slots(region: Path, rows: Sequence[Row]) -> int:
    """Overwrite slots with zeros, durably, and return how many bytes.

    They must be free, and nobody may write to the region meanwhile: one that still reads such a
    slot finds its checksum wrong, which is a miss.
    """
    by_container: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for row in rows:
        by_container[row.container].append((row.slot * row.slot_bytes, row.slot_bytes))
    total = 0
    for container, places in sorted(by_container.items()):
        # docs/format.md, containers: no header, slot i at i times the slot size.
        path = region / "containers" / f"{container:04d}.bin"
        try:
            file = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue  # Then its bytes are gone.
        try:
            for offset, size_bytes in places:
                end = min(offset + size_bytes, os.fstat(file).st_size)
                total += _zero(file, offset, end)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)
    return total


def _zero(file: int, offset: int, end: int) -> int:
    begin = offset
    while offset < end:
        written = os.pwrite(file, bytes(min(ZERO_BYTES, end - offset)), offset)
        if not written:
            raise KvdError(f"the container takes no zeros at byte {offset}")
        offset += written
    return max(0, end - begin)
