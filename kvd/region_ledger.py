"""The ledger of one path: what its region holds for whom, how old it is, what a quota allows.

The path tells it of each opening, write and read; whoever counts, purges or bounds asks it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvd import region_purge
from kvd.ages import Ages
from kvd.census import Census
from kvd.namespaces import PREFIX_BYTES
from kvd.quotas import Quotas
from kvd.region_purge import Freed, Selection
from tablespace import BatchEvictionPolicy, ClosedError, FailedError, Store, TablespaceError

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from tablespace import Entry


class RegionLedger:
    """The books of one path. For its threads; the census may be asked from anywhere.

    Parameters
    ----------
    directory : Path
        The long path.
    region : Path
        Its region.

    Attributes
    ----------
    ages : Ages
        Of its entries.
    quotas : Quotas
        Those of the whole long tier, once there is a cache.
    rejected_writes : int
        Writes that a quota, or a region in which nothing might be evicted, refused.
    """

    def __init__(self, directory: Path, region: Path) -> None:
        self.census = Census()
        self.quotas = Quotas([self])
        self.rejected_writes = 0
        self.ages = Ages(directory)
        self._region = region

    # -- what the path tells -------------------------------------------------------------------

    def policy(self, chooser: BatchEvictionPolicy | None = None) -> Census:
        """Return the eviction policy for a region about to be opened: it counts for `chooser`."""
        self.census.begin(chooser)
        return self.census

    def opened(self, store: Store) -> None:
        """Take over what a region just opened for writing has."""
        self.ages.begin(self.census.measure(store))

    def admits(self, key: bytes, length: int) -> bool:
        """Return whether a new value may be written under its quota; if so it counts from now."""
        prefix = key[:PREFIX_BYTES]
        limit = self.quotas.limit_of(prefix)
        if limit is not None:
            held = self.quotas.held_bytes(prefix, coming=True)
            if held + self.census.slot_for(length) > limit:
                self.rejected_writes += 1
                return False
        self.census.expect({key: length})
        return True

    def put(
        self,
        store: Store,
        values: Sequence[tuple[bytes, Buffer, bytes | None]],
        before: Sequence[Entry | None],
    ) -> tuple[list[bool], Exception | None]:
        """Write values and enter them; `before` is what the region had under each key.

        Returns
        -------
        tuple of (list of bool, Exception or None)
            Per value whether it was written, and what the disk said of those it refused.

        Raises
        ------
        TablespaceError, OSError
            Nothing was written.
        """
        if not values:
            return [], None
        keys = [key for key, _, _ in values]
        lengths = [memoryview(view).nbytes for _, view, _ in values]
        self.census.expect(dict(zip(keys, lengths, strict=True)))
        written = [False] * len(values)
        problem: Exception | None = None
        try:
            written = store.put_many(values)
            self.rejected_writes += len(written) - sum(written)
        except (TablespaceError, OSError) as error:
            if isinstance(error, FailedError | ClosedError):
                raise
            # One bad block is not its neighbours': they are there, and must not be counted lost.
            after = store.stat_many(keys)
            written = [
                new is not None and new != old for old, new in zip(before, after, strict=True)
            ]
            if not any(written):
                raise
            problem = error
        finally:
            self.census.wrote(keys, written, lengths)
        last = store.stat(keys[-1])
        if last is not None:
            self.ages.seen(last.seq)
        return written, problem

    def read(self, keys: Iterable[bytes]) -> None:
        """Note that values were read from the region."""
        self.census.read(keys)

    # -- purging -------------------------------------------------------------------------------

    def select(self, store: Store, selection: Selection) -> list[bytes]:
        """Return the keys that a purge means."""
        return [row.key for row in self._rows(store, selection)]

    def purge(
        self, store: Store, selection: Selection, *, dry_run: bool = False, zero: bool = False
    ) -> Freed:
        """Delete, durably, what a purge means; with `zero` also overwrite it.

        For the thread that writes to the region.
        """
        rows = self._rows(store, selection)
        if dry_run:
            return region_purge.freed(rows)
        return region_purge.purge(store, self._region, rows, selection, zero=zero)

    def purge_keys(self, store: Store, keys: Iterable[bytes], *, zero: bool = False) -> Freed:
        """Delete keys durably; with `zero` also overwrite their slots."""
        rows = region_purge.rows_of(store, self.census, keys)
        return region_purge.purge_rows(store, self._region, rows, zero=zero)

    def _rows(self, store: Store, selection: Selection) -> list[region_purge.Row]:
        limit = None
        if selection.older_than_s is not None:
            limit = self.ages.older_than(selection.older_than_s)
        keys = self.census.keys(selection.prefixes)
        return region_purge.rows_of(store, self.census, keys, limit)
