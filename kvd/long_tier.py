"""One path of the long tier: a tablespace region, and the threads made for it.

The event loop calls the store only to look into its index, which is in memory. One thread writes,
in the order it was asked to, so a delete asked for after a write is done after it; a few threads
read. `kvd.long_paths` puts the paths together.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from tablespace.shared import checksum_many

from kvd.expiry import ROUNDING_NS, boot_clock_ns, from_metadata, suits, to_metadata
from kvd.long_values import (
    Outcome,
    PartlyWrittenError,
    ReadValue,
    WriteItem,
    read_into,
)
from kvd.path_region import PathRegion
from kvd.region_purge import Freed, Selection
from kvd.results import Cleared
from tablespace import TablespaceError, checksum64

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from tablespace import Entry, Scrubbed, StoreStats

SHORTEN_BLOCKS = 64
SHORTEN_BYTES = 16 << 20  # Held in memory while times to live are rewritten.

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")


class LongTier(PathRegion):
    """One region and its threads: one path of the long tier.

    Parameters
    ----------
    directory : Path
        The long path; the region lies in `directory/region`.
    max_bytes : int
        Budget of the region.
    slot_bytes : int, sequence of int or None
        Its slot sizes; None keeps those that it has.
    io_mode : str
        As tablespace's.
    options : RegionOptions
        The rest.
    counters : LongCounters, optional
        Shared with the other paths.
    evict : EvictionFlags, optional
        Which entries leave, and when.

    Attributes
    ----------
    failure : str or None
        Why the region takes no writes until it is opened again.
    refusal : str or None
        Why the last group of blocks was not written; None after one that was.
    names_problem : str or None
        Why the names of its namespaces are not beside it.
    hidden : HiddenKeys
        Deleted while the region could not be written: not served, and deleted when it is back.

    Notes
    -----
    `open_region`, `write`, `read`, `contains`, `delete`, `shorten`, `clear` and `close_region`
    block and are for the threads; `on_writer`, `on_reader` and `on_index` run them there and
    are for the loop.
    """

    def scrub(self, cursor: int, max_bytes: int) -> Scrubbed:
        """Read some values and drop those that are damaged."""
        return self.store.scrub(cursor, max_bytes=max_bytes)

    def write(self, items: Sequence[WriteItem], touched: Sequence[bytes]) -> list[Outcome]:
        """Make blocks durable, refreshing recency first; those already there are not written.

        The checksum given at COMMIT is compared with the bytes before, and with what the store
        recorded after: a client that scribbles in between is found out.

        Raises
        ------
        PartlyWrittenError
            The disk took some blocks and refused others.
        TablespaceError, OSError
            It took none.
        """
        store = self.store
        self.free_space.check()
        outcomes = [Outcome.DURABLE] * len(items)
        if touched:
            store.touch_many(list(touched))
        present = store.stat_many([item.key for item in items])
        checksums = checksum_many([item.view for item in items])
        absent: list[int] = []
        for position, item in enumerate(items):
            if checksums[position] != item.checksum:
                outcomes[position] = Outcome.CORRUPT
            elif not _holds(present[position], item):
                absent.append(position)
        known = [item.key for item, entry in zip(items, present, strict=True) if entry is not None]
        if known:
            store.touch_many(known)
        if not absent:
            return outcomes
        group: list[tuple[int, Buffer]] = []
        for position in absent:
            view: Buffer = items[position].view
            if present[position] is not None:
                # A good copy is about to be replaced: what a client scribbles between our check
                # and the disk's read of it must not cost that copy.
                view = bytes(view)
                if checksum64(view) != items[position].checksum:
                    outcomes[position] = Outcome.CORRUPT
                    continue
            group.append((position, view))
        if self.ledger.quotas.any:
            asked, group = group, []
            for position, view in asked:
                # A replacement takes no more than what it replaces.
                item = items[position]
                if present[position] is not None or self.ledger.admits(item.key, len(item.view)):
                    group.append((position, view))
                else:
                    outcomes[position] = Outcome.DROPPED
        self.eviction.expect(items[position] for position, _ in group)
        written, problem = self.ledger.put(
            store,
            [(items[position].key, view, items[position].metadata) for position, view in group],
            [present[position] for position, _ in group],
        )
        stored = store.stat_many([items[position].key for position, _ in group])
        for (position, _), kept, entry in zip(group, written, stored, strict=True):
            item = items[position]
            if not kept:
                outcomes[position] = Outcome.DROPPED
            elif entry is not None and not _same(entry, item):
                store.delete(item.key)
                outcomes[position] = Outcome.CORRUPT
            else:
                self.blocks_written += 1
                self.bytes_put += len(item.view)
                self.counters.blocks_written += 1
                self.counters.bytes_written += len(item.view)
        self.make_room()
        if problem is not None:
            raise PartlyWrittenError(outcomes, problem)
        return outcomes

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which keys the region has, not expired. A look into its index in RAM.

        What has expired is deleted later, on the writing thread.
        """
        store = self.store
        present = [True] * len(keys)
        self.hidden.hide(keys, present)
        now = boot_clock_ns()
        expired: list[bytes] = []
        for position, entry in enumerate(store.stat_many(keys)):
            if entry is None:
                present[position] = False
            elif entry.metadata and 0 < from_metadata(entry.metadata) <= now:
                present[position] = False
                expired.append(keys[position])
        if expired:
            try:
                self._writer.submit(self.delete_expired, expired)
            except RuntimeError:
                pass  # The daemon is stopping; the next one finds them expired as well.
        return present

    def rooms_for(self, keys: Sequence[bytes]) -> list[int]:
        """Return how many bytes each value needs in memory, from any thread; 0 for none."""
        return [self.ledger.census.room_for(key) for key in keys]

    def read(self, keys: Sequence[bytes], views: Sequence[memoryview]) -> list[ReadValue | None]:
        """Read blocks straight into the given memory; the store verifies each checksum."""
        values = read_into(self.store, keys, views)
        self.ledger.read(key for key, value in zip(keys, values, strict=True) if value is not None)
        return values

    def touch(self, keys: Sequence[bytes]) -> None:
        """Refresh recency."""
        self.store.touch_many(list(keys))

    def delete(self, keys: Sequence[bytes]) -> list[bool]:
        """Delete keys durably and return which were there."""
        store = self.store
        present = store.contains_many(list(keys))
        store.delete_many([key for key, there in zip(keys, present, strict=True) if there])
        return present

    def delete_expired(self, keys: Sequence[bytes]) -> None:
        """Delete those of the keys that have expired by now.

        On the writing thread a key cannot be written anew between the look and the deletion.
        """
        store = self.store
        now = boot_clock_ns()
        old = []
        for key in keys:
            entry = store.stat(key)
            if entry is not None and 0 < from_metadata(entry.metadata) <= now:
                old.append(key)
        if old:
            store.delete_many(old)

    def shorten(self, limits: Sequence[tuple[bytes, int]]) -> list[bool]:
        """Make copies of blocks expire no later than at their limits.

        Parameters
        ----------
        limits : sequence of (key, expiry)
            The expiry on the boot clock, never 0.

        Returns
        -------
        list of bool
            Per key, whether no copy lasts longer now. On the writing thread no write comes
            between the look and the change.
        """
        done = [True] * len(limits)
        late = [
            position for position, (key, limit) in enumerate(limits) if self._outlasts(key, limit)
        ]
        size = max(1, min(SHORTEN_BLOCKS, SHORTEN_BYTES // self.slot_bytes))
        for first in range(0, len(late), size):
            part = late[first : first + size]
            try:
                self._shorten([limits[position] for position in part])
            except (TablespaceError, OSError) as error:
                logger.debug("%d blocks keep a longer time to live: %s", len(part), error)
            for position in part:
                done[position] = not self._outlasts(*limits[position])
        return done

    def _outlasts(self, key: bytes, limit_ns: int) -> bool:
        entry = self.store.stat(key)
        if entry is None:
            return False
        expires_ns = from_metadata(entry.metadata)
        return not expires_ns or expires_ns > limit_ns + ROUNDING_NS

    def _shorten(self, limits: Sequence[tuple[bytes, int]]) -> None:
        store = self.store
        now = boot_clock_ns()
        over = [key for key, limit in limits if limit <= now]
        rest = [(key, limit) for key, limit in limits if limit > now]
        values = store.get_many([key for key, _ in rest])
        again = [
            (key, value, to_metadata(limit))
            for (key, limit), value in zip(rest, values, strict=True)
            if value is not None
        ]
        _, problem = self.ledger.put(store, again, store.stat_many([key for key, _, _ in again]))
        if problem is not None:
            raise problem
        if over:
            store.delete_many(over)

    def clear(self, prefix: bytes, counted: frozenset[bytes]) -> Cleared:
        """Delete everything under a prefix durably; keys in `counted` are not counted again."""
        store = self.store
        keys = [key for key in store if key.startswith(prefix)]
        entries = 0
        size_bytes = 0
        for key in keys:
            if key not in counted:
                entry = store.stat(key)
                entries += 1
                size_bytes += entry.length if entry is not None else 0
        if keys:
            store.clear(prefix)
        return Cleared(entries, size_bytes)

    @property
    def tiers(self) -> list[LongTier]:
        """Return every path: this one."""
        return [self]

    def select(self, selection: Selection) -> list[bytes]:
        """Return the keys that a purge means; a look into the index in RAM."""
        return self.ledger.select(self.store, selection)

    def purge(self, selection: Selection, *, dry_run: bool = False, zero: bool = False) -> Freed:
        """Delete, durably, what a purge means; with `zero` also overwrite it."""
        return self.ledger.purge(self.store, selection, dry_run=dry_run, zero=zero)

    def purge_keys(self, keys: Sequence[bytes], *, zero: bool = False) -> Freed:
        """Delete keys durably; with `zero` also overwrite their slots."""
        return self.ledger.purge_keys(self.store, keys, zero=zero)

    def stats(self) -> StoreStats:
        """Return the store's own statistics."""
        return self.store.stats()

    def close_region(self) -> None:
        """Write the snapshot and release the region, once nobody reads any more."""
        self._closed = True
        for threads in (self._readers, self._index, self._scrubbing):
            # The store may not be closed under a call; what has not begun is not begun.
            threads.shutdown(wait=True, cancel_futures=True)
        if self._store is not None:
            self.ledger.ages.save()
            self._store.close()
            self._store = None


def _holds(entry: Entry | None, item: WriteItem) -> bool:
    """Return whether an entry does for an item, its expiry too."""
    return (
        entry is not None
        and _same(entry, item)
        and suits(from_metadata(entry.metadata), from_metadata(item.metadata))
    )


def _same(entry: Entry, item: WriteItem) -> bool:
    """Return whether an entry has an item's bytes; when it expires is another question."""
    return entry.checksum == item.checksum and entry.length == len(item.view)
