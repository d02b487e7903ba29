"""One path's region: opening it, again after it failed, and the threads that may call it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import tablespace
from kvd.back_off import BackOff
from kvd.free_space import BelowFloorError, FreeSpace
from kvd.hidden_keys import MAX_OWED_KEYS, HiddenKeys
from kvd.latency import LatencyRing
from kvd.long_values import (
    LongCounters,
    RegionOptions,
)
from kvd.read_progress import ReadProgress
from kvd.refusals import region_refusal
from kvd.region_eviction import EvictionFlags, RegionEviction
from kvd.region_ledger import RegionLedger
from tablespace import ClosedError, FailedError, GeometryError, TablespaceError

if TYPE_CHECKING:
    from tablespace import Store

REGION_DIRECTORY = "region"
START_S = 1.0  # A machine this short of threads starts the rest when they are needed.

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")


class PathRegion:
    """One region, its threads and its health; `LongTier` adds what is done with it.

    Parameters and attributes are those of `LongTier`.
    """

    def __init__(
        self,
        directory: Path,
        max_bytes: int,
        slot_bytes: int | Sequence[int] | None,
        io_mode: str,
        *,
        options: RegionOptions | None = None,
        counters: LongCounters | None = None,
        evict: EvictionFlags | None = None,
    ) -> None:
        self.directory = directory
        self.max_bytes = max_bytes
        self.options = options or RegionOptions()
        self.counters = counters or LongCounters()
        self.write_latency = LatencyRing()
        self.health = BackOff()
        self.progress = ReadProgress(self.options.workers)
        self.hidden = HiddenKeys(MAX_OWED_KEYS)
        self.free_space = FreeSpace(directory, self.options.free_floor_bytes)
        self.uuid: str | None = None
        self.index_bound_bytes = 0
        self.blocks_written = 0
        self.bytes_put = 0
        self.failure: str | None = None
        self.refusal: str | None = None
        self.names_problem: str | None = None
        self.resized_from: int | None = None
        self.slot_sizes = (slot_bytes,) if isinstance(slot_bytes, int) else tuple(slot_bytes or ())
        self.disk_look: asyncio.Future[Any] | None = None
        self.eviction = RegionEviction(evict or EvictionFlags(), max_bytes)
        self.evict_policy = self.eviction.flags.policy
        self.ledger = RegionLedger(directory, self.region)
        self._io_mode = io_mode
        self._made: list[Path] = []
        self._store: Store | None = None
        self._closed = False
        self._follows = False
        self._changing = False
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="kvd-write")
        self._readers = ThreadPoolExecutor(self.options.workers, thread_name_prefix="kvd-read")
        self._index = ThreadPoolExecutor(1, thread_name_prefix="kvd-index")
        self._scrubbing = ThreadPoolExecutor(1, thread_name_prefix="kvd-scrub")

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
        return self.progress.watch(_submit(self._readers, call, *args, **kwargs))

    def on_index(
        self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> asyncio.Future[T]:
        """Run a call that only looks into the region's index, never behind a transfer."""
        return _submit(self._index, call, *args, **kwargs)

    def on_scrubber(
        self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> asyncio.Future[T]:
        """Run a call on the scrubbing thread."""
        return _submit(self._scrubbing, call, *args, **kwargs)

    def shut_down(self) -> None:
        """Stop the threads; what they are doing now is not waited for."""
        for threads in (self._writer, self._readers, self._index, self._scrubbing):
            threads.shutdown(wait=False, cancel_futures=True)

    @property
    def is_open(self) -> bool:
        """Return whether there is a region to read from."""
        return self._store is not None

    @property
    def is_up(self) -> bool:
        """Return whether the region takes writes, now or in a moment."""
        return self.failure is None and (self._store is not None or self._changing)

    @property
    def recover(self) -> str:
        """Return what damage means when the region is opened at start."""
        return self.options.recover

    @property
    def slot_bytes(self) -> int:
        """Return the largest slot: the largest value."""
        return self.slot_sizes[-1] if self.slot_sizes else 0

    def fail(self, error: Exception) -> None:
        """Note that the region takes no more writes, until it was opened again."""
        if self.failure is not None:
            return
        self.failure = f"{type(error).__name__}: {error}"
        self.health.failed(self.failure)
        logger.error(
            "the long tier in %s failed and takes no more blocks until it is opened again, in "
            "%.0f s: %s. What it holds is still served",
            self.directory,
            self.health.retry_in_s,
            self.failure,
        )

    # -- for the threads -----------------------------------------------------------------------

    @property
    def store(self) -> Store:
        """Return the open store."""
        if self._store is None:
            why = "the daemon is stopping" if self._closed else "it is being opened again"
            raise ClosedError(f"the region is closed: {why}")
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
        self._start_readers()
        self._made = _absent(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            before = _container_bytes(path)
            self._use(self._open(self.options.recover))
            if before and before != _container_bytes(path):
                self.resized_from = before
        except (TablespaceError, ValueError, OSError) as error:
            raise region_refusal(self.directory, path, error) from error

    def unmake(self) -> None:
        """Remove the directories that `open_region` made, as far as they are empty."""
        with contextlib.suppress(OSError):
            for each in self._made:
                each.rmdir()

    def _start_readers(self) -> None:
        """Start all reading threads: what each holds is held from the start, not after hours."""
        count = self.options.workers
        together = threading.Barrier(count)
        for _ in range(count):
            self._readers.submit(_meet, together)

    def _open(self, recover: str, slot_sizes: Sequence[int] | None = None) -> Store:
        max_bytes: int | None = self.max_bytes
        before = _container_bytes(self.region)
        try:
            self.free_space.check_growth(self.max_bytes - before)
        except BelowFloorError as error:
            if not before:
                raise
            logger.warning("%s does not grow: %s", self.region, error)
            max_bytes = None
        sizes = list(slot_sizes or self.slot_sizes)
        return tablespace.open(
            os.fspath(self.region),
            max_bytes=max_bytes,
            container_bytes=self.options.container_bytes,
            slot_bytes=sizes or None,
            io_mode=self._io_mode,
            recover=recover,
            on_full="evict",
            eviction=self.ledger.policy(self.eviction.reopen(sizes)),
        )

    def allocated_bytes(self) -> int:
        """Return the space that the containers take on the disk now. Disk call."""
        files = (self.region / "containers").glob("*")
        return sum(file.stat().st_blocks * 512 for file in files)

    def _use(self, store: Store) -> None:
        # What they read with too: memory that comes with traffic comes for hours.
        store.prepare_reads(self.options.workers)
        self.ledger.opened(store)
        self._store = store
        self.uuid = store.uuid
        stats = store.stats()
        self.index_bound_bytes = stats.index_bound_bytes
        self.slot_sizes = tuple(sorted(pool.slot_bytes for pool in stats.pools))
        # A region that did not grow, for the floor, is smaller than its budget.
        self.eviction.max_bytes = min(self.max_bytes, _container_bytes(self.region))
        self._follows = False
        self._make_room_later()

    def make_room(self) -> None:
        """Evict a bounded number above the watermark, and the rest behind the writes that wait.

        What goes wrong here is told by the next write; this one is done.
        """
        if self._follows:
            return
        try:
            if self.eviction.step(self.store):
                self._make_room_later()
        except (TablespaceError, OSError) as error:
            logger.debug("no room was made above the watermark: %s", error)

    def _make_room_later(self) -> None:
        with contextlib.suppress(RuntimeError):  # The daemon is stopping.
            self._writer.submit(self.make_room)

    def reopen_region(self) -> None:
        """Open a region again that failed, or could not be opened before.

        Where that fails, what there is of it is read, if that is possible.

        Raises
        ------
        TablespaceError, OSError, ValueError
            Why it takes no writes still.
        """
        store, self._store = self._store, None
        if store is not None:
            _close(store, self.directory)
        if self._closed:
            raise ClosedError("the daemon is stopping")
        path = self.region
        try:
            path.mkdir(parents=True, exist_ok=True)
            # Not "empty": what is left is what is served.
            self._use(self._open("strict" if self.options.recover == "strict" else "salvage"))
        except (TablespaceError, OSError, ValueError):
            self._read_only()
            raise

    def _read_only(self) -> None:
        """Read a region that cannot be opened for writing, if that is possible."""
        self._follows = True
        try:
            self._store = tablespace.open(os.fspath(self.region), read_only=True)
        except (TablespaceError, OSError, ValueError) as error:
            logger.debug("%s cannot be read either: %s", self.region, error)

    def delete_hidden(self) -> None:
        """Delete what was asked to be deleted while the region took no writes."""
        store = self.store
        prefixes, keys = self.hidden.content()
        for prefix in prefixes:
            store.clear(prefix)
        if keys:
            store.delete_many(keys)
        self.hidden.discard(prefixes, keys)

    def add_slot_size(self, slot_bytes: int) -> bool:
        """Open the region again with one more slot size; False where it takes none.

        What is asked of the writer meanwhile is done afterwards; lookups miss.
        """
        if not self.is_up or slot_bytes in self.slot_sizes:
            return slot_bytes in self.slot_sizes
        self._changing = True
        try:
            store, self._store = self.store, None
            _close(store, self.directory)
            try:
                self._use(self._open("salvage", sorted({*self.slot_sizes, slot_bytes})))
            except GeometryError as error:
                logger.warning("%s takes no slots of %d bytes: %s", self.region, slot_bytes, error)
                self._use(self._open("salvage"))
        finally:
            self._changing = False
        return slot_bytes in self.slot_sizes


def _meet(together: threading.Barrier) -> None:
    with contextlib.suppress(threading.BrokenBarrierError):
        together.wait(START_S)


def _close(store: Store, directory: Path) -> None:
    """Close a store to open it again; what it cannot save is in the journal or lost already."""
    try:
        store.close()
    except (TablespaceError, OSError) as error:
        level = logging.DEBUG if isinstance(error, FailedError) else logging.WARNING
        logger.log(level, "closing the region in %s: %s", directory, error)


def _submit(
    threads: ThreadPoolExecutor, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> asyncio.Future[T]:
    try:
        return asyncio.wrap_future(threads.submit(call, *args, **kwargs))
    except RuntimeError as error:
        raise ClosedError("the region is closed: the daemon is stopping") from error


def _absent(path: Path) -> list[Path]:
    """Return which of a path and those above it are not there, the path first."""
    return [each for each in (path, *path.parents) if not os.path.lexists(each)]


def _container_bytes(region: Path) -> int:
    return sum(file.stat().st_size for file in (region / "containers").glob("*"))
