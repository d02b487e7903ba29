"""The long tier: a tablespace region, reached only from threads made for it.

The event loop never calls the store. One thread writes, in the order it was asked to, so a
delete asked for after a write is done after it; a few threads read.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from tablespace.shared import checksum_many

import tablespace
from kvd.expiry import ROUNDING_NS, boot_clock_ns, from_metadata, suits, to_metadata
from kvd.latency import LatencyRing
from kvd.refusals import region_refusal
from kvd.region_eviction import EvictionFlags, RegionEviction
from kvd.region_ledger import RegionLedger
from kvd.region_purge import Freed, Selection
from kvd.results import Cleared
from tablespace import ClosedError, TablespaceError, checksum64

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from tablespace import Store, StoreStats

READER_THREADS = 4
SHORTEN_BLOCKS = 64
SHORTEN_BYTES = 16 << 20  # Held in memory while times to live are rewritten.
REGION_DIRECTORY = "region"

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")


class Outcome(Enum):
    """How one block's write ended."""

    DURABLE = "durable"
    DROPPED = "dropped"
    CORRUPT = "corrupt"


@dataclass(frozen=True)
class WriteItem:
    """One block on its way to the medium: all that the writing thread may look at."""

    key: bytes
    view: memoryview
    checksum: int
    metadata: bytes | None
    position: int = 0


@dataclass(frozen=True)
class ReadValue:
    """One block that was read: its length and the checksum it was verified against."""

    length: int
    checksum: int
    expires_ns: int


@dataclass
class LongCounters:
    """What happened on the long tier."""

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


class LongTier:
    """One region and its threads.

    Parameters
    ----------
    directory : Path
        The long path; the region lies in `directory/region`.
    max_bytes, slot_bytes : int
        Geometry of the region.
    io_mode : str
        As tablespace's.
    evict : EvictionFlags
        Which entries leave, and when.

    Notes
    -----
    `open_region`, `write`, `read`, `contains`, `delete`, `shorten`, `clear` and `close_region`
    block and are for the threads; `on_writer`, `on_reader` and `on_index` run them there and
    are for the loop.
    """

    def __init__(
        self,
        directory: Path,
        max_bytes: int,
        slot_bytes: int,
        io_mode: str,
        *,
        evict: EvictionFlags | None = None,
    ) -> None:
        self.directory = directory
        self.max_bytes = max_bytes
        self.slot_bytes = slot_bytes
        self.counters = LongCounters()
        self.write_latency = LatencyRing()
        self.promotion_latency = LatencyRing()
        self.reads_waiting = 0
        self.failure: str | None = None
        self.resized_from: int | None = None
        self.eviction = RegionEviction(evict or EvictionFlags(), max_bytes, slot_bytes)
        self.disk_look: asyncio.Future[Any] | None = None
        self.evict_policy = self.eviction.flags.policy
        self.recover = "salvage"
        self.ledger = RegionLedger(directory, self.region)
        self._io_mode = io_mode
        self._store: Store | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="kvd-write")
        self._readers = ThreadPoolExecutor(READER_THREADS, thread_name_prefix="kvd-read")
        self._index = ThreadPoolExecutor(1, thread_name_prefix="kvd-index")

    # -- for the loop --------------------------------------------------------------------------

    def on_writer(
        self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> asyncio.Future[T]:
        """Run a call on the writing thread, after everything asked of it before."""
        return _submit(self._writer, call, *args, **kwargs)

    def on_reader(
        self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> asyncio.Future[T]:
        """Run a call on a reading thread."""
        return _submit(self._readers, call, *args, **kwargs)

    def on_index(
        self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> asyncio.Future[T]:
        """Run a call that only looks into the region's index, never behind a transfer."""
        return _submit(self._index, call, *args, **kwargs)

    def shut_down(self) -> None:
        """Stop the threads; what they are doing now is not waited for."""
        for threads in (self._writer, self._readers, self._index):
            threads.shutdown(wait=False, cancel_futures=True)

    # -- for the threads -----------------------------------------------------------------------

    @property
    def store(self) -> Store:
        """Return the open store."""
        if self._store is None:
            raise ClosedError("the region is closed: the daemon is stopping")
        return self._store

    @property
    def region(self) -> Path:
        """Return the region's directory, which `tablespace info` takes."""
        return self.directory / REGION_DIRECTORY

    def open_region(self) -> None:
        """Open or create the region.

        Raises
        ------
        RefusedError
            When another process holds it; names the holder.
        ConfigError
            When it cannot be opened as asked.
        """
        path = self.region
        try:
            path.mkdir(parents=True, exist_ok=True)
            before = _container_bytes(path)
            self._store = tablespace.open(
                os.fspath(path),
                max_bytes=self.max_bytes,
                slot_bytes=self.slot_bytes,
                io_mode=self._io_mode,
                recover=self.recover,
                on_full="evict",
                eviction=self.ledger.policy(self.eviction.reopen()),
            )
            self.ledger.opened(self._store)
            if before and before != _container_bytes(path):
                self.resized_from = before
            self._writer.submit(self.make_room)
        except (TablespaceError, ValueError, OSError) as error:
            raise region_refusal(self.directory, path, error) from error

    def write(self, items: Sequence[WriteItem], touched: Sequence[bytes]) -> list[Outcome]:
        """Make blocks durable, refreshing recency first; those already there are not written.

        The checksum given at COMMIT is compared with the bytes before, and with what the store
        recorded after: a client that scribbles in between is found out.
        """
        store = self.store
        outcomes = [Outcome.DURABLE] * len(items)
        if touched:
            store.touch_many(list(touched))
        present = store.contains_many([item.key for item in items])
        checksums = checksum_many([item.view for item in items])
        absent: list[int] = []
        for position, item in enumerate(items):
            if checksums[position] != item.checksum:
                outcomes[position] = Outcome.CORRUPT
            elif not (present[position] and self._holds(item)):
                absent.append(position)
        known = [item.key for item, there in zip(items, present, strict=True) if there]
        if known:
            store.touch_many(known)
        if not absent:
            return outcomes
        group: list[tuple[int, Buffer]] = []
        for position in absent:
            view: Buffer = items[position].view
            if present[position]:
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
                if present[position] or self.ledger.admits(item.key, len(item.view)):
                    group.append((position, view))
                else:
                    outcomes[position] = Outcome.DROPPED
        self.eviction.expect(items[position] for position, _ in group)
        written = self.ledger.put(
            store,
            [(items[position].key, view, items[position].metadata) for position, view in group],
        )
        for (position, _), kept in zip(group, written, strict=True):
            item = items[position]
            if not kept:
                outcomes[position] = Outcome.DROPPED
            elif item.key in store and not self._holds(item):
                store.delete(item.key)
                outcomes[position] = Outcome.CORRUPT
            else:
                self.counters.blocks_written += 1
                self.counters.bytes_written += len(item.view)
        self.make_room()
        return outcomes

    def make_room(self) -> None:
        """Evict a bounded number above the watermark, and the rest behind the writes that wait.

        What goes wrong here is told by the next write; this one is done.
        """
        try:
            if self.eviction.step(self.store):
                self._writer.submit(self.make_room)
        except (TablespaceError, OSError, RuntimeError) as error:
            logger.debug("no room was made above the watermark: %s", error)

    def _holds(self, item: WriteItem) -> bool:
        entry = self.store.stat(item.key)
        return (
            entry is not None
            and entry.checksum == item.checksum
            and entry.length == len(item.view)
            and suits(from_metadata(entry.metadata), from_metadata(item.metadata))
        )

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which keys the region has, not expired. A look into its index in RAM.

        What has expired is deleted later, on the writing thread.
        """
        store = self.store
        present = store.contains_many(list(keys))
        now = boot_clock_ns()
        expired: list[bytes] = []
        for position, there in enumerate(present):
            if there:
                entry = store.stat(keys[position])
                if entry is None:
                    present[position] = False
                elif 0 < from_metadata(entry.metadata) <= now:
                    present[position] = False
                    expired.append(keys[position])
        if expired:
            try:
                self._writer.submit(self.delete_expired, expired)
            except RuntimeError:
                pass  # The daemon is stopping; the next one finds them expired as well.
        return present

    def read(self, keys: Sequence[bytes], views: Sequence[memoryview]) -> list[ReadValue | None]:
        """Read blocks straight into the given memory; the store verifies each checksum."""
        store = self.store
        before = [store.stat(key) for key in keys]
        lengths = store.get_many_into(list(keys), list(views))
        values: list[ReadValue | None] = []
        for key, entry, length in zip(keys, before, lengths, strict=True):
            after = store.stat(key) if length is not None and entry is not None else None
            if length is None or entry is None or after is None or after.seq != entry.seq:
                # Replaced meanwhile: which checksum belongs to these bytes is not known.
                values.append(None)
            else:
                expires_ns = from_metadata(entry.metadata)
                values.append(ReadValue(length, entry.checksum, expires_ns))
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
        self.ledger.put(
            store,
            [
                (key, value, to_metadata(limit))
                for (key, limit), value in zip(rest, values, strict=True)
                if value is not None
            ],
        )
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
        for threads in (self._readers, self._index):
            # The store may not be closed under a call; what has not begun is not begun.
            threads.shutdown(wait=True, cancel_futures=True)
        if self._store is not None:
            self._store.close()
            self._store = None


def _submit(
    threads: ThreadPoolExecutor, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> asyncio.Future[T]:
    try:
        return asyncio.wrap_future(threads.submit(call, *args, **kwargs))
    except RuntimeError as error:
        raise ClosedError("the region is closed: the daemon is stopping") from error


def _container_bytes(region: Path) -> int:
    return sum(file.stat().st_size for file in (region / "containers").glob("*"))
