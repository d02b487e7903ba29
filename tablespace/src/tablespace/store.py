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
from tablespace._core.key_index import check_key
from tablespace.commit import Committer, DeleteRequest
from tablespace.compaction import Compactor
from tablespace.context_pool import ContextPool
from tablespace.errors import ClosedError, FullError, TablespaceError
from tablespace.io import fork
from tablespace.io.device import Device, IoContext
from tablespace.io.directory import Directory
from tablespace.io.open import IoChoice
from tablespace.io.put_request import PutRequest
from tablespace.io.read_batch import ReadBatch
from tablespace.layout import MAX_GROUP_BLOCKS
from tablespace.recovery import Recovered
from tablespace.region import REGION_NAME, Region, RegionLock
from tablespace.stats import Counts, Entry, PoolStats, StoreStats, entry_array, slot_counts

if TYPE_CHECKING:
    import numpy

logger = logging.getLogger("tablespace")

WRITE_DEPTH = 64
STAGING_BYTES = 8 << 20
# Keys pinned at once by one call; more are read in turns.
READ_WINDOW = 4096
# Records of deletes in one append: about half a MiB of journal.
DELETE_GROUP = 4096


class Store:
    """A region open for reading and writing; made by `tablespace.open`.

    Notes
    -----
    Every method may be called from any thread.  `put`, `put_many`, `delete` and `delete_many`
    return when their effect is durable: it survives a crash of the process, the kernel or the
    power.  Calls from several threads share commits.  The GIL is released around disk transfers,
    syncs and copies.  After a fork the child's copy raises ClosedError; the parent's works on.
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
    ) -> None:
        self._directory = directory
        self._region = region
        self._lock = lock
        self._devices = devices
        self._choice = choice
        self._verify = verify
        self._recovery = recovered.report
        self._index = recovered.index
        slot_bytes = region.geometry.slot_bytes
        self._slot_bytes = slot_bytes
        staging = max(2 * slot_bytes, min(WRITE_DEPTH * slot_bytes, STAGING_BYTES))
        context = IoContext(directory.queue(choice.engine, WRITE_DEPTH), AlignedBuffer(staging))
        self._write_context = context
        self._committer = Committer(
            recovered.index,
            devices,
            recovered.journal,
            context,
            recovered.seq,
            evict,
            self._left_direct,
        )
        self._compactor = Compactor(
            directory, region, self._committer, recovered.snapshot_bytes, self._still_ours
        )
        self._readers = ContextPool(directory, choice.engine, slot_bytes)
        self._closed: str | None = None
        self._closing = threading.Lock()
        self._counting = threading.Lock()
        self._counts = Counts()
        fork.watch(self)

    # Writing.

    def put(self, key: bytes, value: Any, *, metadata: bytes | None = None) -> None:
        """Store a value under a key, replacing what was there; durable on return.

        Parameters
        ----------
        key : bytes
            1..255 bytes.
        value : contiguous buffer
            At most `slot_bytes` long; must not change during the call. One whose address and
            length are multiples of 4096 is written without a copy.
        metadata : bytes, optional
            At most 255 bytes kept with the key (`stat`).

        Raises
        ------
        ValueTooLargeError
            The value is larger than a slot.
        FullError
            No slot is free and `on_full` is "reject" (or nothing may be evicted).
        FailedError
            A sync failed, now or earlier.
        OSError
            The write failed; nothing was stored.
        """
        self._check_open()
        if not self._put_group([(key, value, metadata)])[0]:
            raise FullError(
                f"region {self._directory.path} is full: {self._index.live_count} live of "
                f"{self._index.allocator.capacity} slots, none free for a value of this size. "
                "Remedy: delete keys, open with on_full='evict', or grow the region"
            )

    def put_many(self, items: Iterable[Sequence[Any]]) -> list[bool]:
        """Store many values, in commits of at most 256 blocks; durable on return.

        Parameters
        ----------
        items : iterable of (key, value) or (key, value, metadata)

        Returns
        -------
        list of bool
            One an item; False only where no slot was free.

        Raises
        ------
        ValueTooLargeError, ValueError, TypeError
            For the first bad item; items of earlier groups are stored, none of its own group is.
        FailedError, OSError
            As for `put`.
        """
        self._check_open()
        out: list[bool] = []
        batch: list[Sequence[Any]] = []
        for item in items:
            batch.append(item)
            if len(batch) == MAX_GROUP_BLOCKS:
                out += self._put_group(batch)
                batch = []
        if batch:
            out += self._put_group(batch)
        return out

    def _put_group(self, batch: list[Sequence[Any]]) -> list[bool]:
        out = self._commit(self._request(batch))
        # Where some found no room and others were stored, slots have been overwritten or may be
        # evicted since: try again as long as that gets on.
        if self._committer.evict and not any(out):
            # Others of the same commit took what was made free; alone there is room.
            request = self._request(batch)
            request.joins = False
            out = self._commit(request)
        if any(out) and not all(out):
            newest = {item[0]: at for at, item in enumerate(batch) if out[at]}
            left = []
            for at, stored in enumerate(out):
                if not stored and newest.get(batch[at][0], -1) > at:
                    out[at] = True  # A later value of the same key has taken its place already.
                elif not stored:
                    left.append(at)
            again = self._put_group([batch[at] for at in left]) if left else []
            for at, stored in zip(left, again, strict=True):
                out[at] = stored
        return out

    def _request(self, batch: list[Sequence[Any]]) -> PutRequest:
        request = PutRequest(self._slot_bytes, len(batch))
        try:
            for item in batch:
                request.add(*item)
        except BaseException:
            request.release()
            raise
        return request

    def _commit(self, request: PutRequest) -> list[bool]:
        try:
            self._committer.run(request)
        finally:
            request.release()
        self._compactor.consider()
        out = request.outcome()
        with self._counting:
            self._counts.puts += sum(out)
        return out

    def delete(self, key: bytes) -> bool:
        """Delete a key, durably; return whether it was there."""
        return self.delete_many([key]) == 1

    def delete_many(self, keys: Iterable[bytes]) -> int:
        """Delete keys, durably, 4096 to a commit; return how many were there."""
        wanted = list(keys)
        self._check_open()
        for key in wanted:
            check_key(key)
        removed = 0
        for start in range(0, len(wanted), DELETE_GROUP):
            request = DeleteRequest(wanted[start : start + DELETE_GROUP])
            self._committer.run(request)
            self._compactor.consider()
            removed += sum(request.removed)
        return removed

    def clear(self, prefix: bytes = b"") -> int:
        """Delete every key that begins with `prefix`, durably; return how many there were.

        Keys stored while this runs may stay.  It ends with a snapshot, a fresh journal, and
        without the older copies of both, so that no file names what was cleared.
        """
        self._check_open()
        if not isinstance(prefix, bytes):
            raise TypeError(f"a prefix is bytes, not {type(prefix).__name__}")
        removed = self.delete_many(self._index.keys_with_prefix(prefix))
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

    def _read(self, keys: list[bytes], buffers: list[Any] | None) -> list[Any]:
        self._check_open()
        out: list[Any] = []
        for start in range(0, len(keys), READ_WINDOW):
            part = keys[start : start + READ_WINDOW]
            into = None if buffers is None else buffers[start : start + READ_WINDOW]
            out += self._read_window(part, into)
        return out

    def _read_window(self, keys: list[bytes], buffers: list[Any] | None) -> list[Any]:
        batch = ReadBatch(self._index, self._devices, self._slot_bytes, self._verify)
        batch.start(keys, buffers)
        context = None
        try:
            context = self._readers.take()
            batch.run(context)
        except BaseException:
            if context is None:
                batch.finish()
            elif context.queue.in_flight == 0:
                self._readers.give(context)
                batch.finish()
            else:
                # The kernel may still write into this memory: it is never used again, nor freed.
                batch.abandon()
                self._readers.bury(context, batch)
            raise
        self._readers.give(context)
        out, suspects, error = batch.finish()
        with self._counting:
            self._counts.gets += len(keys)
            self._counts.hits += batch.hits
            self._counts.bytes_read += batch.bytes_read
            first_error = error and not self._counts.read_errors
            self._counts.read_errors += bool(error)
        if first_error:
            logger.warning(
                "%s: a read failed (%s) and was a miss; said once, counted in read_errors",
                self._directory.path,
                os.strerror(error),
            )
        for key, seq in suspects:
            self._drop(key, seq)
        return out

    def _drop(self, key: bytes, seq: int) -> None:
        """Forget a damaged value; its record follows in the next commit, its slot rests."""
        with self._counting:
            self._counts.corrupt += 1
        where = self._index.drop_corrupt(key, seq)
        if where is not None:
            self._committer.dropped.append((key, *where))
            logger.warning(
                "%s: the value of key %s failed its checksum or could not be read; dropped, slot "
                "%d of container %d taken out of use",
                self._directory.path,
                key.hex(),
                where[1],
                where[0],
            )

    # Looking.

    def contains_many(self, keys: Iterable[bytes]) -> list[bool]:
        """Say for each key whether it is present; memory only."""
        self._check_open()
        found: list[bool] = self._index.contains_many(keys)
        return found

    def match_prefix(self, keys: Iterable[bytes]) -> int:
        """Return how many leading keys are present; memory only."""
        self._check_open()
        found: int = self._index.match_prefix(keys)
        return found

    def touch_many(self, keys: Iterable[bytes]) -> int:
        """Make keys the most recently used, in the order given; return how many are present.

        For callers that serve a value from a cache above this one: an entry used there should
        not look unused here.  Memory only.
        """
        self._check_open()
        found: int = self._index.touch_many(keys)
        return found

    def stat(self, key: bytes) -> Entry | None:
        """Return what the index knows of a key, or None."""
        self._check_open()
        found = self._index.get(key)
        if found is None:
            return None
        container, slot, length, checksum, seq, metadata = found
        return Entry(length, checksum, seq, container, slot, metadata)

    def entries(self) -> numpy.ndarray[Any, Any]:
        """Return what the index knows of every entry, least recently used first.

        Returns
        -------
        numpy structured array
            Fields ``key`` (object, bytes), ``container`` and ``slot`` (uint32), ``length`` and
            ``slot_bytes`` (uint32, bytes), ``checksum`` and ``seq`` (uint64).
        """
        self._check_open()
        return entry_array(self._index)

    def __contains__(self, key: bytes) -> bool:
        self._check_open()
        return key in self._index

    def __len__(self) -> int:
        return len(self._index)

    def __iter__(self) -> Iterator[bytes]:
        """Iterate over a copy of the keys, least recently used first."""
        self._check_open()
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
            failed=None if failed is None else str(failed),
            recovery=self._recovery,
            choices=self._choices(),
        )

    def _io_mode(self) -> str:
        return "direct" if all(device.direct for device in self._devices) else "buffered"

    def _choices(self) -> list[str]:
        return self._choice.reasons + ([self._lock.note] if self._lock.note else [])

    def _still_ours(self) -> bool:
        """Say whether region.json still is the file whose lock this store holds."""
        device = self._lock.device
        return device is not None and self._directory.same_file(device, REGION_NAME)

    def _left_direct(self, device: Device) -> None:
        """Say once that a file system took O_DIRECT back after the trial at open."""
        note = "mode buffered: O_DIRECT was refused at a later write (EINVAL), page cache used"
        self._choice.reasons.append(note)
        logger.warning("%s: %s", device.path, note)
        self.announce()

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
        """Make everything durable that is not yet: records of dropped values, if any.

        Puts and deletes are durable when they return.
        """
        self._check_open()
        self._committer.run(DeleteRequest([]))

    def snapshot(self) -> None:
        """Write a snapshot of the index and start a new journal."""
        self._check_open()
        self._compactor.compact()

    def close(self) -> None:
        """Write a snapshot, release the lock and free everything; calling again does nothing.

        Calls under way in other threads are finished first; later ones raise ClosedError.  After
        a failed sync nothing is written.
        """
        with self._closing:
            if self._closed is not None:
                return
            self._closed = "the store is closed"
        try:
            self._compactor.wait()
            if self._committer.failed is None:
                self._committer.run(DeleteRequest([]))
                self._compactor.compact()
        except (OSError, TablespaceError) as error:
            # The journal holds everything, so the next open only takes longer.
            logger.warning("%s: no snapshot at close: %s", self._directory.path, error)
        finally:
            self._committer.close(self._closed)
            self._readers.close(self._closed)
            self._committer.journal.close(tidy=self._committer.failed is None)
            for device in self._devices:
                device.close()
            if not self._committer.stuck:
                self._write_context.close()
            self._lock.close()

    def after_fork_in_child(self) -> None:
        """Leave everything to the parent: the child only closes its copy of the lock's file."""
        self._closed = "the store was opened by the parent of this forked process; open it anew"
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
