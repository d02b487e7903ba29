"""Regions of other hosts on a shared mount: read as they are written there, never written."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import tablespace
from kvd.back_off import BackOff
from kvd.expiry import boot_clock_ns, from_metadata
from kvd.hidden_keys import HiddenKeys
from kvd.long_values import ReadValue, read_into
from kvd.path_region import REGION_DIRECTORY
from kvd.read_progress import ReadProgress
from tablespace import ClosedError, TablespaceError

if TYPE_CHECKING:
    from tablespace import Follower, FollowerStats

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger(__name__)


class Followed:
    """One region that another host's daemon writes.

    Parameters
    ----------
    directory : Path
        That daemon's long path, or the region in it.
    io_mode : str
        As tablespace's.
    threads : int
        Reads under way at once.

    Attributes
    ----------
    hidden : HiddenKeys
        Deleted here: what the other host has of them does not count while this daemon runs.

    Notes
    -----
    `open_region`, `contains`, `read` and `close_region` block and are for the threads.
    """

    def __init__(self, directory: Path, io_mode: str, threads: int) -> None:
        self.directory = directory
        self.health = BackOff()
        self.progress = ReadProgress(threads)
        self.looks = ReadProgress(1)
        self.hidden = HiddenKeys()
        self.hits = 0
        self._io_mode = io_mode
        self._store: Follower | None = None
        self._threads = threads
        self._readers = ThreadPoolExecutor(threads, thread_name_prefix="kvd-follow")
        # A look at the journal may wait for the network, so each region has its own.
        self._index = ThreadPoolExecutor(1, thread_name_prefix="kvd-follow-index")

    @property
    def is_open(self) -> bool:
        """Return whether there is a region to read from."""
        return self._store is not None

    def on_reader(
        self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> asyncio.Future[T]:
        """Run a call on a reading thread."""
        found = asyncio.wrap_future(self._readers.submit(call, *args, **kwargs))
        return self.progress.watch(found)

    def on_index(
        self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> asyncio.Future[T]:
        """Run a call that looks into the index, and at the other host's journal."""
        return self.looks.watch(asyncio.wrap_future(self._index.submit(call, *args, **kwargs)))

    @property
    def store(self) -> Follower:
        """Return the open follower."""
        if self._store is None:
            raise ClosedError("the region is not there")
        return self._store

    @property
    def region(self) -> Path:
        """Return the region's directory."""
        inside = self.directory / REGION_DIRECTORY
        return inside if inside.is_dir() else self.directory

    def open_region(self) -> None:
        """Begin to follow.

        Raises
        ------
        TablespaceError, OSError, ValueError
            No region is there, or it cannot be read.
        """
        store = tablespace.open(os.fspath(self.region), read_only=True, io_mode=self._io_mode)
        store.prepare_reads(self._threads)
        self._store = store

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which keys the region has, not expired and not deleted here."""
        store = self.store
        present = [True] * len(keys)
        self.hidden.hide(keys, present)
        now = boot_clock_ns()
        for position, entry in enumerate(store.stat_many(keys)):
            if entry is None or 0 < from_metadata(entry.metadata) <= now:
                present[position] = False
        return present

    def rooms_for(self, keys: Sequence[bytes]) -> list[int]:
        """Return how many bytes each value needs in memory; 0 for none. May look at the disk."""
        return [0 if entry is None else entry.length for entry in self.store.stat_many(keys)]

    def read(self, keys: Sequence[bytes], views: Sequence[memoryview]) -> list[ReadValue | None]:
        """Read blocks straight into the given memory; each checksum is verified."""
        return read_into(self.store, keys, views)

    def stats(self) -> FollowerStats:
        """Return the follower's own statistics."""
        return self.store.stats()

    def shut_down(self) -> None:
        """Stop the threads; what they are doing now is not waited for."""
        for threads in (self._readers, self._index):
            threads.shutdown(wait=False, cancel_futures=True)

    def close_region(self) -> None:
        """Stop following."""
        if self._store is not None:
            try:
                self._store.close()
            except (TablespaceError, OSError) as error:
                logger.debug("closing %s: %s", self.region, error)
            self._store = None
