"""The store: a region's public face.

Long because the surface is: one short method a call, most of it what the call promises.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tablespace._core.aligned_buffer import AlignedBuffer
from tablespace.async_store import AsyncCalls
from tablespace.commit import Committer
from tablespace.compaction import Compactor
from tablespace.compression import Codec
from tablespace.context_pool import ContextPool
from tablespace.durability import Durability
from tablespace.errors import ClosedError, FailedError, FullError, TablespaceError
from tablespace.eviction import Eviction, EvictionPolicy
from tablespace.io import fork
from tablespace.io.deadline import timeout_ns
from tablespace.io.device import Device, IoContext
from tablespace.io.directory import Directory
from tablespace.io.open import IoChoice, open_queue
from tablespace.layout import index_bound_bytes
from tablespace.prewrite import Prewriter
from tablespace.reading import SCRUB_BYTES, Reads
from tablespace.recovery import Recovered
from tablespace.region import REGION_NAME, Region, RegionLock
from tablespace.requests import DeleteRequest
from tablespace.reserve import Reserve
from tablespace.stats import (
    Counts,
    Entry,
    PoolStats,
    Scrubbed,
    StoreStats,
    entry_array,
    slot_counts,
)
from tablespace.writing import Writer

if TYPE_CHECKING:
    import numpy

logger = logging.getLogger("tablespace")

WRITE_DEPTH = 64
STAGING_BYTES = 8 << 20


class Store(Reads, AsyncCalls):
    """A region open for reading and writing; made by `tablespace.open`.

    Notes
    -----
    Every method may be called from any thread.  `delete` and `delete_many`, and with durability
    "sync" `put` and `put_many`, return when their effect is durable: it survives a crash of the
    process, the kernel or the power.  Calls from several threads share commits.  The GIL is
    released around disk transfers, syncs and copies.  After a fork the child's copy raises
    ClosedError; the parent's works on.
    """

    def __init__(
        self,
        directory: Directory,
        region: Region,
        lock: RegionLock,
        devices: list[Device],
        recovered: Recovered,
        choice: IoChoice,
        *,
        verify: bool,
        evict: bool,
        reserve: Reserve,
        durability: Durability,
        eviction: str | EvictionPolicy = "lru",
        compression: str | None = None,
        io_timeout_s: float | None = None,
    ) -> None:
        self._directory = directory
        self._region = region
        self._lock = lock
        self._devices = devices
        self._choice = choice
        self._direct = choice.direct
        self._verify = verify
        self._recovery = recovered.report
        self._index = recovered.index
        slot_bytes = region.geometry.slot_bytes
        self._slot_bytes = slot_bytes
        self._codec = Codec(compression, slot_bytes)
        self._eviction = Eviction(recovered.index, eviction, directory.path)
        staging = max(2 * slot_bytes, min(WRITE_DEPTH * slot_bytes, STAGING_BYTES))
        context = IoContext(
            open_queue(directory, choice, min(WRITE_DEPTH, choice.concurrency)),
            AlignedBuffer(staging),
        )
        context.queue.timeout_ns = timeout_ns(io_timeout_s)
        if io_timeout_s is not None:
            choice.reasons.append(f"io timeout {io_timeout_s:g} s: asked for")
        self._write_context = context
        self._committer = Committer(
            recovered.index,
            devices,
            recovered.journal,
            context,
            recovered.seq,
            evict,
            self._eviction,
            self._left_direct,
        )
        self._compactor = Compactor(
            directory,
            region,
            self._committer,
            recovered.snapshot_bytes,
            self._still_ours,
            reserve,
        )
        self._reserve = reserve
        self._committer.make_room = self._compactor.make_room
        self._committer.admits = lambda blocks: reserve.admits(recovered.index, blocks)
        self._counts = Counts()
        self._writer = Writer(
            directory.path,
            recovered.index,
            slot_bytes,
            self._committer,
            self._compactor,
            self._eviction,
            self._codec,
            durability,
            self._counts,
        )
        self._queue = self._writer.queue
        self._readers = ContextPool(
            directory,
            choice.engine,
            slot_bytes,
            self._say,
            concurrency=choice.concurrency,
            timeout_ns=context.queue.timeout_ns,
        )
        self._closed: str | None = None
        self._close_interrupted = False
        self._closing = threading.Lock()
        self._start_async()
        self._prewriter: Prewriter | None = None
        self._prewriting = "no prewriting: not asked for"
        fork.watch(self)

    # Writing.

    def put(
        self,
        key: bytes,
        value: Any,
        *,
        metadata: bytes | None = None,
        durability: str | None = None,
    ) -> None:
        """Store a value under a key, replacing what was there; by default durable on return.

        Parameters
        ----------
        key : bytes
            1..255 bytes.
        value : contiguous buffer
            At most `slot_bytes` long; must not change during the call. One whose address and
            length are multiples of 4096 is written without a copy.
        metadata : bytes, optional
            At most 255 bytes kept with the key (`stat`).
        durability : {"sync", "interval", "none"}, optional
            When to return: durable; or copied, and committed by a thread within the store's
            `flush_interval_ms`; or written, and durable after `flush`. The store's own mode by
            default.

        Raises
        ------
        ValueTooLargeError
            The value is larger than a slot.
        FullError
            No slot is free and `on_full` is "reject" (or nothing may be evicted). With durability
            "interval" the next `flush` raises this and other errors of the commit.
        FailedError
            A sync failed, now or earlier.
        OSError
            The write failed; nothing was stored.
        """
        self._check_open()
        if not self._writer.put_many(((key, value, metadata),), durability)[0]:
            raise self._no_room()

    def _no_room(self) -> FullError:
        return FullError(
            f"region {self._directory.path} is full: {self._index.live_count} live of "
            f"{self._index.allocator.capacity} slots, none free for a value of this size. "
            "Remedy: delete keys, open with on_full='evict', or grow the region"
        )

    def put_many(
        self, items: Iterable[Sequence[Any]], *, durability: str | None = None
    ) -> list[bool]:
        """Store many values, in commits of at most 256 blocks; by default durable on return.

        Parameters
        ----------
        items : iterable of (key, value) or (key, value, metadata)
        durability : {"sync", "interval", "none"}, optional
            As for `put`.

        Returns
        -------
        list of bool
            One an item; False only where no slot was free. With durability "interval" all True:
            the next `flush` tells of those that found no room.

        Raises
        ------
        ValueTooLargeError, ValueError, TypeError
            For the first bad item; items of earlier groups are stored, none of its own group is.
        FailedError, OSError
            As for `put`.
        """
        self._check_open()
        return self._writer.put_many(items, durability)

    def delete(self, key: bytes) -> bool:
        """Delete a key, durably; return whether it was there."""
        return self.delete_many([key]) == 1

    def delete_many(self, keys: Iterable[bytes]) -> int:
        """Delete keys, durably, 4096 to a commit; return how many were there."""
        return sum(self._delete(list(keys)))

    def evict_many(self, keys: Iterable[bytes]) -> int:
        """Evict keys of the caller's choice, durably; return how many were there.

        As `delete_many`, but the journal and `stats().evictions` tell evictions: room made ahead
        of need, not values somebody asked to be gone.
        """
        return sum(self._delete(list(keys), evicts=True))

    def _delete(self, wanted: list[bytes], evicts: bool = False) -> list[bool]:
        self._check_open()
        return self._writer.delete(wanted, evicts)

    def clear(self, prefix: bytes = b"") -> int:
        """Delete every key that begins with `prefix`, durably; return how many there were.

        Keys stored while this runs may stay.  It ends with a snapshot, a fresh journal, and
        without the older copies of both, so that no file names what was cleared.
        """
        self._check_open()
        if not isinstance(prefix, bytes):
            raise TypeError(f"a prefix is bytes, not {type(prefix).__name__}")
        self._queue.step()
        removed = self.delete_many(self._index.keys_with_prefix(prefix))
        # Records of damaged values name their keys: now, rather than in the fresh journal.
        self._committer.run(DeleteRequest([]))
        self._compactor.compact(keep_old=False)
        return removed

    # Reading.

    def get(self, key: bytes) -> bytes | None:
        """Return the value of a key, or None."""
        found: bytes | None = self._read([key], None)[0]
        return found

    def get_into(self, key: bytes, buffer: Any) -> int | None:
        """Read a value into a writable buffer; return its length, or None for a miss.

        Parameters
        ----------
        buffer : writable contiguous buffer
            At least as long as the value. Read without a copy where its address is a multiple of
            512 and the value's length, rounded up to 4096, fits.

        Raises
        ------
        ValueError
            The buffer is shorter than the value; both sizes are named.
        """
        found: int | None = self._read([key], [buffer])[0]
        return found

    def get_many(self, keys: Iterable[bytes]) -> list[bytes | None]:
        """Return the values of many keys, None where absent, many reads in flight at once."""
        return self._read(list(keys), None)

    def get_many_into(self, keys: Iterable[bytes], buffers: Iterable[Any]) -> list[int | None]:
        """Read many values into buffers, one a key; return lengths, None where absent."""
        wanted, targets = list(keys), list(buffers)
        if len(wanted) != len(targets):
            raise ValueError(f"{len(wanted)} keys, but {len(targets)} buffers")
        return self._read(wanted, targets)

    def get_entries_into(
        self, keys: Iterable[bytes], buffers: Iterable[Any]
    ) -> list[Entry | None]:
        """Read many values into buffers; return what `stat` tells of each value read.

        As `get_many_into`, for callers who need the checksum, the metadata or the number of the
        very bytes they got: a `stat` before or after may be of another value. What is queued is
        committed first.
        """
        wanted, targets = list(keys), list(buffers)
        if len(wanted) != len(targets):
            raise ValueError(f"{len(wanted)} keys, but {len(targets)} buffers")
        self._check_open()
        if self._queue.busy and any(self._queue.find_many(wanted)):
            self._queue.step()
        rows = self._read_slots(wanted, targets, describe=True)
        return [None if row is None else Entry(*row) for row in rows]

    def _read(self, keys: list[bytes], buffers: list[Any] | None) -> list[Any]:
        self._check_open()
        return self._find(keys, buffers)

    def prepare_reads(self, calls: int) -> None:
        """Make now what so many reading calls at once need, with its memory resident.

        Otherwise it is made when so many come together for the first time: in a process that
        runs for long memory then grows in steps, hours after its start.

        Parameters
        ----------
        calls : int
            At once; each a ring and staging of 32 slots, at most 4 MiB (or 2 slots). There are
            8 at most.
        """
        self._check_open()
        self._readers.prepare(calls)

    def scrub(self, cursor: int = 0, *, max_bytes: int = SCRUB_BYTES) -> Scrubbed:
        """Read some values to see whether they are sound, and drop those that are not.

        Nothing is used by that: the order of eviction stays as it is.

        Parameters
        ----------
        cursor : int
            0 to begin, then what the call before returned.
        max_bytes : int
            About how much to read: whole values, at least one.

        Returns
        -------
        Scrubbed
            Its cursor is 0 when all has been read.
        """
        self._check_open()
        return self._scrub(cursor, max_bytes)

    # Looking.

    def contains_many(self, keys: Iterable[bytes]) -> list[bool]:
        """Say for each key whether it is present; memory only."""
        self._check_open()
        if not self._queue.busy:
            return self._index.contains_many(keys)
        wanted = list(keys)
        queued = self._queue.find_many(wanted)
        found = self._index.contains_many(wanted)
        return [there or each is not None for there, each in zip(found, queued, strict=True)]

    def match_prefix(self, keys: Iterable[bytes]) -> int:
        """Return how many leading keys are present; memory only."""
        self._check_open()
        if not self._queue.busy:
            return self._index.match_prefix(keys)
        found = self.contains_many(keys)
        return found.index(False) if False in found else len(found)

    def touch_many(self, keys: Iterable[bytes]) -> int:
        """Make keys the most recently used, in the order given; return how many are present.

        For callers that serve a value from a cache above this one: an entry used there should
        not look unused here.  Memory only.
        """
        self._check_open()
        if self._queue.busy:
            wanted = list(keys)
            found = sum(self.contains_many(wanted))
            self._index.touch_many(wanted)
        else:
            found = self._index.touch_many(keys)
        self._eviction.tell()
        return found

    def stat(self, key: bytes) -> Entry | None:
        """Return what the index knows of a key, or None; a queued one is committed first."""
        return self.stat_many([key])[0]

    def stat_many(self, keys: Iterable[bytes]) -> list[Entry | None]:
        """Return what `stat` does for each key; memory only, unless one is queued."""
        self._check_open()
        wanted = list(keys)
        if self._queue.busy and any(self._queue.find_many(wanted)):
            self._queue.step()
        return [None if row is None else Entry(*row) for row in self._index.rows(wanted)]

    def entries(self) -> numpy.ndarray[Any, Any]:
        """Return what the index knows of every entry, least recently used first.

        What is queued is committed first.

        Returns
        -------
        numpy structured array
            Fields ``key`` (object, bytes), ``container`` and ``slot`` (uint32), ``length``,
            ``stored_length`` and ``slot_bytes`` (uint32, bytes), ``checksum`` and ``seq``
            (uint64).
        """
        self._check_open()
        self._queue.step()
        return entry_array(self._index)

    def __contains__(self, key: bytes) -> bool:
        self._check_open()
        if self._queue.busy and self._queue.find(key) is not None:
            return True
        return key in self._index

    def __len__(self) -> int:
        if self._queue.busy:
            return len(self._all_keys())
        return len(self._index)

    def _all_keys(self) -> dict[bytes, None]:
        # The queue first: what leaves it meanwhile is in the index already.
        queued = self._queue.keys()
        return dict.fromkeys([*self._index.keys(), *queued])

    def __iter__(self) -> Iterator[bytes]:
        """Iterate over a copy of the keys, least recently used first."""
        self._check_open()
        if self._queue.busy:
            return iter(self._all_keys())
        return iter(self._index.keys())

    def __getitem__(self, key: bytes) -> bytes:
        value = self.get(key)
        if value is None:
            raise KeyError(key)
        return value

    def __setitem__(self, key: bytes, value: Any) -> None:
        self.put(key, value)

    def __delitem__(self, key: bytes) -> None:
        if not self.delete(key):
            raise KeyError(key)

    @property
    def uuid(self) -> str:
        """The region's own name, 32 hex digits; never that of another region."""
        return self._region.uuid

    def stats(self) -> StoreStats:
        """Return counters, slot accounting and the choices made at open."""
        counts = self._counts
        failed = self._committer.failed
        return StoreStats(
            **slot_counts(self._index),
            slot_bytes=self._slot_bytes,
            pools=[PoolStats(*each) for each in self._index.allocator.pool_stats()],
            puts=counts.puts,
            gets=counts.gets,
            hits=counts.hits,
            misses=counts.gets - counts.hits,
            evictions=self._committer.evictions,
            corrupt=counts.corrupt,
            read_errors=counts.read_errors,
            bytes_written=self._committer.bytes_written,
            bytes_read=counts.bytes_read,
            groups=self._committer.groups,
            compactions=self._compactor.compactions,
            journal_bytes=self._committer.journal.appended_bytes,
            snapshot_bytes=self._compactor.snapshot_bytes,
            index_bytes=self._index.memory_bytes(),
            io_mode=self._io_mode(),
            io_engine=self._choice.engine,
            held_blocks=self._committer.held.blocks,
            held_bytes=self._committer.held.value_bytes,
            queue_blocks=self._queue.blocks,
            queue_bytes=self._queue.size_bytes,
            queue_dropped=self._queue.dropped,
            failed=None if failed is None else str(failed),
            recovery=self._recovery,
            choices=self._choices(),
            index_bound_bytes=index_bound_bytes(self._region.geometry),
            slack_bytes=self._index.live_slot_bytes - self._index.stored_bytes,
        )

    def _io_mode(self) -> str:
        return "direct" if all(device.direct for device in self._devices) else "buffered"

    def _choices(self) -> list[str]:
        notes = [self._reserve.describe(), self._prewriting]
        if self._prewriter is not None:
            notes[1] = self._prewriting = self._prewriter.describe()
        if self._lock.note:
            notes.append(self._lock.note)
        return self._choice.reasons + self._eviction.reasons + self._codec.reasons + notes

    def start_prewriting(self, reason_against: str | None) -> None:
        """Write containers ahead of their first use, unless there is a reason against it."""
        if reason_against is not None:
            self._prewriting = f"no prewriting: {reason_against}"
            return
        self._prewriter = Prewriter(self._directory.path, self._devices, self._committer)
        self._prewriter.start()

    def _still_ours(self) -> bool:
        """Say whether region.json still is the file whose lock this store holds."""
        device = self._lock.device
        return device is not None and self._directory.same_file(device, REGION_NAME)

    def _left_direct(self, device: Device) -> None:
        self._tell_of_cache("write")

    def _say(self, note: str) -> None:
        """Add a choice that was made after the opening."""
        self._choice.reasons.append(note)
        logger.warning("%s: %s", self._directory.path, note)
        try:
            self.announce()
        except OSError as error:
            # Advice only: what was asked of the store has been done.
            logger.warning("%s: not recorded: %s", self._directory.path, error)

    def announce(self) -> None:
        """Record in region.json who writes and what was chosen (`tablespace info` shows it)."""
        self._lock.announce(
            {
                "io_mode": self._io_mode(),
                "io_engine": self._choice.engine,
                "choices": self._choices(),
            }
        )

    # Ending.

    def flush(self) -> None:
        """Make everything durable that is not yet.

        That is every put with durability "interval" or "none" that returned before this call
        began, and records of dropped values, whose slots are tested, unless a reader still holds
        them. Other puts, and deletes, are durable on return.

        Raises
        ------
        FullError, OSError
            Queued blocks ("interval") could not be stored and are gone: each thread that puts is
            told once. Or the journal could not be written: blocks put with "none" are readable and
            not durable yet; flush again.
        FailedError
            A sync failed, now or earlier: what was not durable before will be gone when the store
            is reopened.
        """
        self._check_open()
        self._queue.step()
        self._committer.flush()
        self._queue.report()

    def snapshot(self) -> None:
        """Write a snapshot of the index and start a new journal."""
        self._check_open()
        self._queue.step()
        self._compactor.compact()

    def close(self) -> None:
        """Write a snapshot, release the lock and free everything; calling again does nothing.

        Calls under way in other threads are finished first; later ones raise ClosedError.  What
        was acknowledged is made durable.  After a failed sync nothing is written.  One that a
        signal's exception interrupted is finished by calling it again.

        Raises
        ------
        FailedError
            Puts acknowledged with durability "interval" or "none" could not be made durable, and
            no `flush` told of it.  The store is closed all the same.
        """
        with self._closing:
            if self._closed is not None and not self._close_interrupted:
                return
            self._closed = "the store is closed"
            self._close_interrupted = False
        try:
            problem = self._close()
        except BaseException:
            self._close_interrupted = True
            raise
        self._tell_of_losses(problem)

    def _close(self) -> BaseException | None:
        """Do what `close` says; return why held puts could not be made durable."""
        reason = self._closed or ""
        self._async.close(reason)
        problem: BaseException | None = None
        try:
            self._queue.close(reason)
            if self._prewriter is not None:
                self._prewriter.stop()
            self._compactor.wait()
            if self._committer.failed is None:
                self._committer.flush()
                self._compactor.compact()
        except (OSError, TablespaceError) as error:
            # The journal holds everything durable, so the next open only takes longer.
            logger.warning("%s: no snapshot at close: %s", self._directory.path, error)
        finally:
            try:
                self._committer.close(reason)
            except (OSError, TablespaceError, MemoryError) as error:
                problem = error
            # One that another thread began goes on with its files, which are another writer's
            # as soon as the lock is free.
            self._compactor.finish()
            self._readers.close(reason)
            sound = self._committer.failed is None
            self._committer.journal.close(
                tidy=sound and self._reserve.is_roomy(), keep_bytes=self._reserve.journal_bytes
            )
            for device in self._devices:
                device.close()
            if not self._committer.stuck:
                self._write_context.close()
            self._lock.close()
        return problem

    def _tell_of_losses(self, problem: BaseException | None) -> None:
        """Raise where puts acknowledged before they were durable did not become so."""
        problem = problem or self._queue.untold() or self._committer.failed
        held = self._committer.held.blocks
        if held or self._queue.untold():
            raise FailedError(
                f"{self._directory.path} was closed with acknowledged puts that are not durable "
                f"({held} of durability none): {problem}. They are gone when it is opened again"
            ) from problem

    def after_fork_in_child(self) -> None:
        """Leave everything to the parent: the child only closes its copy of the lock's file."""
        self._closed = "the store was opened by the parent of this forked process; open it anew"
        self._close_interrupted = False
        # Another thread may have held it at the fork, and is not here to let it go.
        self._closing = threading.Lock()
        self._lock.close()

    def _check_open(self) -> None:
        if self._closed is not None:
            raise ClosedError(self._closed)

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._index)} entries"
        return f"<tablespace.Store {os.fspath(self._directory.path)!r}: {state}>"
