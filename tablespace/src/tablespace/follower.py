"""A store that only reads, and follows what a writer in another process or host does."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

from tablespace.compression import Codec
from tablespace.context_pool import ContextPool
from tablespace.errors import CorruptionError, ReadOnlyError, TablespaceError
from tablespace.eviction import Eviction
from tablespace.index_view import IndexView, load_view, may_pass
from tablespace.io import fork
from tablespace.io.directory import Directory
from tablespace.io.open import IoChoice, choose_io
from tablespace.io.read_batch import ReadBatch
from tablespace.io.read_only import ReadOnlyDirectory
from tablespace.journal_tail import MovedError
from tablespace.layout import container_name, index_bound_bytes
from tablespace.reading import SCRUB_BYTES
from tablespace.region import read_region
from tablespace.resize import CONTAINERS
from tablespace.stats import Counts, FollowerStats, PoolStats, Scrubbed, slot_counts
from tablespace.store import Store
from tablespace.unfinished import cut_short, is_cut_short
from tablespace.write_queue import always_empty

logger = logging.getLogger("tablespace")

DEFAULT_REFRESH_INTERVAL_MS = 50


class Follower(Store):
    """A region open for reading, while another process may be writing it.

    Made by ``tablespace.open(path, read_only=True)``.  It takes no lock and writes nothing.  It
    sees what the writer has appended to the journal as of its last look; `refresh` looks now.

    Notes
    -----
    Methods may be called from any thread.  A read returns bytes that were once stored under the
    key, or a miss; never anything else, since every value's checksum is verified.  A value found
    changed under the index is looked for once more after a refresh.  Calls that would change the
    region raise ReadOnlyError.
    """

    def __init__(
        self,
        directory: Directory,
        view: IndexView,
        choice: IoChoice,
        *,
        refresh_interval_ms: float | None = DEFAULT_REFRESH_INTERVAL_MS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._choice = choice
        self._direct = choice.direct
        self._clock = clock
        self._interval_s = None if refresh_interval_ms is None else refresh_interval_ms / 1000
        self._readers = ContextPool(
            directory,
            choice.engine,
            view.region.geometry.slot_bytes,
            self._say,
            concurrency=choice.concurrency,
        )
        self._queue = always_empty(directory.path)
        # One thread looks at the journal at a time; others go on with the index as it is.
        self._looking = threading.Lock()
        self._looked_at = self._refreshed_at = clock()
        self._refreshes = self._reloads = self._moved = 0
        self._problem = view.tail.waiting
        self._closed: str | None = None
        self._closing = threading.Lock()
        self._counts = Counts()
        self._show(view)
        self._eviction = Eviction(view.index, "lru", directory.path)
        self._start_async()
        fork.watch(self)

    def _show(self, view: IndexView) -> None:
        """Answer from another view from now on; transfers under way keep the files they need."""
        self._readers.enlarge(view.region.geometry.slot_bytes)
        self._view = view
        self._index = view.index
        self._slot_bytes = view.region.geometry.slot_bytes
        self._codec = Codec(None, self._slot_bytes)
        self._recovery = view.report

    def _say(self, note: str) -> None:
        """Add a choice that was made after the opening; nothing is recorded in the region."""
        self._choice.reasons.append(note)
        logger.warning("%s: %s", self._directory.path, note)

    # Following.

    def refresh(self) -> int:
        """Look at the journal now; return how many of its records were new.

        After the index had to be loaded anew, that is the number of records it went on by.

        Raises
        ------
        FileNotFoundError
            The region is gone.
        CorruptionError, FormatVersionError, OSError
            It cannot be read; what was read before is still served.
        """
        super()._check_open()
        with self._looking:
            super()._check_open()
            return self._refresh()

    def _refresh(self, moved: Iterable[bytes] = ()) -> int:
        self._looked_at = self._clock()
        before = self._view.seq
        try:
            self._follow()
            for path in self._replaced(moved):
                self._load(MovedError(f"{path} is another file"))
                break
        except BaseException as error:
            self._problem = f"{type(error).__name__}: {error}"
            raise
        self._refreshed_at = self._looked_at
        self._problem = self._view.tail.waiting
        self._refreshes += self._view.seq != before
        return max(0, self._view.seq - before)

    def _follow(self) -> None:
        try:
            self._view.tail.refresh()
        except (MovedError, CorruptionError, OSError) as error:
            if not may_pass(error):
                raise
            self._load(error)

    def _replaced(self, keys: Iterable[bytes]) -> Iterator[str]:
        """Yield containers of these keys that are not the files under their names any more."""
        view = self._view
        entries = [view.index.get(key) for key in keys]
        for number in sorted({entry[0] for entry in entries if entry is not None}):
            name = f"{CONTAINERS}/{container_name(number)}"
            if not self._directory.same_file(view.devices[number], name):
                yield view.devices[number].path

    def _load(self, reason: Exception) -> None:
        logger.info("%s: the index is loaded anew: %s", self._directory.path, reason)
        old = self._view
        view = load_view(self._directory, self._choice)
        if view.region.uuid != old.region.uuid:
            logger.warning(
                "%s: another region than before is here now: %s, not %s",
                self._directory.path,
                view.region.uuid,
                old.region.uuid,
            )
        self._show(view)
        self._reloads += 1
        # Its containers go with the last transfer that uses them.
        old.tail.close()

    def _look(self, moved: Iterable[bytes] = ()) -> None:
        """Refresh, where a failure leaves what was known; said once, and shown by `stats`."""
        before = self._problem
        try:
            self._refresh(moved)
        except (OSError, TablespaceError):
            if self._problem != before:
                logger.warning("%s: not refreshed: %s", self._directory.path, self._problem)

    def _check_open(self) -> None:
        """Begin a reading call: look at the journal when the last look is too long ago."""
        super()._check_open()
        if self._interval_s is None or self._clock() - self._looked_at < self._interval_s:
            return
        if self._looking.acquire(blocking=False):
            try:
                if self._closed is None:
                    self._look()
            finally:
                self._looking.release()

    # Reading.

    def _batch(self) -> ReadBatch:
        view = self._view
        slot_bytes = view.region.geometry.slot_bytes
        return ReadBatch(view.index, view.devices, slot_bytes, verify=True, pin=False)

    def _read_window(
        self, keys: list[bytes], buffers: list[Any] | None, describe: bool
    ) -> list[Any]:
        out, suspects = self._read_once(keys, buffers, describe)
        if not suspects:
            return out
        # The writer may have used these slots for other values: look where theirs are now.
        moved = {key for key, _ in suspects}
        with self._looking:
            if self._closed is None:
                self._look(moved)
        self._drop_cached(moved)
        again = [at for at, key in enumerate(keys) if out[at] is None and key in moved]
        part = [keys[at] for at in again]
        into = None if buffers is None else [buffers[at] for at in again]
        found, left = self._read_once(part, into, describe)
        for at, value in zip(again, found, strict=True):
            out[at] = value
        with self._counts.lock:
            self._counts.gets -= len(again)
            self._counts.corrupt += len(left)
            self._moved += len(again)
        return out

    def _drop_cached(self, keys: Iterable[bytes]) -> None:
        """Let the page cache forget these values: on a network file system it may be stale."""
        view = self._view
        allocator = view.index.allocator
        pools = allocator.pool_stats()
        for key in keys:
            entry = view.index.get(key)
            if entry is None or view.devices[entry[0]].direct:
                continue
            slot_bytes = pools[allocator.pool_of_container(entry[0])][0]
            view.devices[entry[0]].drop_cached(entry[1] * slot_bytes, slot_bytes)

    @property
    def uuid(self) -> str:
        """The uuid of the region that is followed now."""
        return self._view.region.uuid

    def __len__(self) -> int:
        if self._closed is None:
            self._check_open()
        return super().__len__()

    def stats(self) -> FollowerStats:
        """Return counters, slot accounting, the choices made, and how far behind this is.

        The journal is read for that, but nothing is applied.
        """
        super()._check_open()
        counts = self._counts
        lag_records, lag_bytes, problem = self._lag()
        view = self._view
        return FollowerStats(
            **slot_counts(view.index),
            slot_bytes=view.region.geometry.slot_bytes,
            pools=[PoolStats(*each) for each in view.index.allocator.pool_stats()],
            puts=0,
            gets=counts.gets,
            hits=counts.hits,
            misses=counts.gets - counts.hits,
            evictions=0,
            corrupt=counts.corrupt,
            read_errors=counts.read_errors,
            bytes_written=0,
            bytes_read=counts.bytes_read,
            groups=0,
            held_blocks=0,
            held_bytes=0,
            queue_blocks=0,
            queue_bytes=0,
            queue_dropped=0,
            compactions=0,
            journal_bytes=view.tail.size_bytes,
            snapshot_bytes=view.snapshot_bytes,
            index_bytes=view.index.memory_bytes(),
            io_mode="direct" if all(device.direct for device in view.devices) else "buffered",
            io_engine=self._choice.engine,
            failed=None,
            recovery=view.report,
            choices=list(self._choice.reasons),
            index_bound_bytes=index_bound_bytes(view.region.geometry),
            slack_bytes=view.index.live_slot_bytes - view.index.stored_bytes,
            seq=view.seq,
            lag_records=lag_records,
            lag_bytes=lag_bytes,
            refreshed_s=self._clock() - self._refreshed_at,
            refreshes=self._refreshes,
            reloads=self._reloads,
            moved=self._moved,
            problem=problem or self._problem,
        )

    def _lag(self) -> tuple[int | None, int | None, str | None]:
        try:
            with self._looking:
                lag = self._view.tail.lag()
        except (OSError, TablespaceError) as error:
            return None, None, f"{type(error).__name__}: {error}"
        return lag.records, lag.size_bytes, None

    # Ending.

    def close(self) -> None:
        """Free everything; calling again does nothing.

        Reads under way in other threads are finished first; later calls raise ClosedError.
        """
        with self._closing:
            if self._closed is not None:
                return
            self._closed = "the store is closed"
        self._async.close(self._closed)
        self._readers.close(self._closed)
        with self._looking:
            self._view.close()

    def after_fork_in_child(self) -> None:
        """Leave everything to the parent."""
        self._closed = "the store was opened by the parent of this forked process; open it anew"
        # Another thread may have held it at the fork, and is not here to let it go.
        self._closing = threading.Lock()

    def __enter__(self) -> Follower:
        return self

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._index)} entries, seq {self._view.seq}"
        return f"<tablespace.Follower {os.fspath(self._directory.path)!r}: {state}>"

    # What a follower does not do.

    def put(
        self,
        key: bytes,
        value: Any,
        *,
        metadata: bytes | None = None,
        durability: str | None = None,
    ) -> None:
        """Raise ReadOnlyError."""
        self._refuse("put")

    def put_many(
        self, items: Iterable[Sequence[Any]], *, durability: str | None = None
    ) -> list[bool]:
        """Raise ReadOnlyError."""
        self._refuse("put_many")

    def delete(self, key: bytes) -> bool:
        """Raise ReadOnlyError."""
        self._refuse("delete")

    def delete_many(self, keys: Iterable[bytes]) -> int:
        """Raise ReadOnlyError."""
        self._refuse("delete_many")

    def evict_many(self, keys: Iterable[bytes]) -> int:
        """Raise ReadOnlyError."""
        self._refuse("evict_many")

    def clear(self, prefix: bytes = b"") -> int:
        """Raise ReadOnlyError."""
        self._refuse("clear")

    def flush(self) -> None:
        """Raise ReadOnlyError."""
        self._refuse("flush")

    def snapshot(self) -> None:
        """Raise ReadOnlyError."""
        self._refuse("snapshot")

    def scrub(self, cursor: int = 0, *, max_bytes: int = SCRUB_BYTES) -> Scrubbed:
        """Raise ReadOnlyError."""
        self._refuse("scrub")

    async def _aput(self, items: list[Sequence[Any]], durability: str | None) -> list[bool]:
        self._refuse("aput")

    async def _adelete(self, keys: list[bytes]) -> list[bool]:
        self._refuse("adelete")

    async def aflush(self) -> None:
        """Raise ReadOnlyError."""
        self._refuse("aflush")

    def announce(self) -> None:
        """Raise ReadOnlyError."""
        self._refuse("announce")

    def start_prewriting(self, reason_against: str | None) -> None:
        """Raise ReadOnlyError."""
        self._refuse("start_prewriting")

    def _refuse(self, call: str) -> NoReturn:
        super()._check_open()
        raise ReadOnlyError(call, self._directory.path)


def check_refresh_interval(interval_ms: object) -> None:
    """Raise ValueError unless this is None or a number of milliseconds, 0 or more."""
    if interval_ms is None:
        return
    if isinstance(interval_ms, bool) or not (
        isinstance(interval_ms, (int, float)) and interval_ms >= 0
    ):
        raise ValueError(
            f"refresh_interval_ms is {interval_ms!r}. Remedy: 0 to look at each call, a "
            "number of milliseconds, or None to look only when refresh() is called"
        )


def open_follower(
    directory: Directory,
    *,
    io_mode: str = "auto",
    io_engine: str = "auto",
    refresh_interval_ms: float | None = DEFAULT_REFRESH_INTERVAL_MS,
    clock: Callable[[], float] = time.monotonic,
) -> Follower:
    """Open a region for reading over any `Directory`; nothing is written through it.

    Raises
    ------
    FileNotFoundError
        No region is there, or only what a creation left that was cut short.
    CorruptionError, FormatVersionError
    ValueError
        For a negative `refresh_interval_ms`.
    """
    check_refresh_interval(refresh_interval_ms)
    readable = ReadOnlyDirectory(directory)
    if is_cut_short(readable):
        raise cut_short(readable)  # Not damage: nothing was ever stored here.
    read_region(readable)
    choice = choose_io(readable, io_mode, io_engine, read_only=True)
    if not choice.direct:
        choice.reasons.append("pages of a value found changed are dropped before it is read again")
    view = load_view(readable, choice)
    follower = Follower(
        readable, view, choice, refresh_interval_ms=refresh_interval_ms, clock=clock
    )
    logger.info(
        "%s: followed, %s; %d entries from %s and %d journal records in %.3f s; %s",
        readable.path,
        view.region.geometry,
        view.report.entries,
        view.report.source,
        view.report.journal_records,
        view.report.seconds,
        "; ".join(choice.reasons),
    )
    for warning in [*choice.warnings, *view.report.notes]:
        logger.warning("%s: %s", readable.path, warning)
    return follower
