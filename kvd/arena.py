"""The daemon's side of the shared arena: its memfds, their slots, and which are populated."""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tablespace.shared import Lane, SlotIndex, store_u64

from kvd.arena_layout import (
    DATA_SEALS,
    HEADER,
    HEARTBEAT_OFFSET,
    INDEX_SEALS,
    LAYOUT_VERSION,
    MAGIC,
    PAGE_BYTES,
    RECORDS_OFFSET,
    index_bytes,
    table_offset,
)
from kvd.errors import ConfigError
from kvd.pages import Pages, map_aligned
from kvd.protocol import ArenaInfo, LaneInfo
from kvd.shared_index import open_index

logger = logging.getLogger(__name__)

# One step of population. 16 MiB take about 10 ms; slots are handed out after each.
POPULATE_BYTES = 16 << 20


@dataclass(frozen=True)
class SizeClass:
    """A run of equal slots. One for now; the seam where more sizes come in."""

    slot_bytes: int
    slot_count: int
    first_offset: int = 0

    def offset(self, slot: int) -> int:
        """Return where a slot begins in the data memfd, in bytes."""
        return self.first_offset + slot * self.slot_bytes


class Arena:
    """Memory for blocks that clients map too.

    Parameters
    ----------
    max_bytes : int
        Size of the data memfd, rounded down to whole slots.
    slot_bytes : int
        A multiple of the page size.
    hugepages : bool
        Ask for huge pages; `huge_refusal` says why there are none.

    Attributes
    ----------
    index : SlotIndex
        From key to slot, for the clients; `records` are its slots.
    lanes : list of Lane
        Every lane that some client may still read under. Whoever takes a slot out of use asks
        all of them.

    Notes
    -----
    Thread rule: all but `view` belongs to the event loop's thread. `view` may be read and
    filled by the disk threads, each only for slots it was given.
    """

    def __init__(self, max_bytes: int, slot_bytes: int, *, hugepages: bool = False) -> None:
        if slot_bytes % PAGE_BYTES:
            raise ConfigError(f"slots of {slot_bytes} bytes are not whole pages of {PAGE_BYTES}")
        slot_count = max_bytes // slot_bytes
        if slot_count < 1:
            raise ConfigError(f"{max_bytes} bytes hold no slot of {slot_bytes} bytes")
        self.size_class = SizeClass(slot_bytes, slot_count)
        self.slot_bytes = slot_bytes
        self.slot_count = slot_count
        self.data_bytes = slot_count * slot_bytes
        self.uuid = uuid.uuid4()
        self.pin_refusal: str | None = None
        self.huge_refusal: str | None = None
        self.huge_bytes = 0
        self._hugepages = hugepages
        self.populated_slots = 0
        self._stop = threading.Event()
        self._populator: threading.Thread | None = None

        self.lanes: list[Lane] = []
        self._silent = False

        self.index_fd = memfd("kvd-index", index_bytes(slot_count))
        self.data_fd = memfd("kvd-data", self.data_bytes)
        # Mapped before it is sealed: FUTURE_WRITE stops every later writable mapping, also ours.
        self._index = mmap.mmap(self.index_fd, index_bytes(slot_count))
        self._data = (
            map_aligned(self.data_fd, self.data_bytes)
            if hugepages
            else mmap.mmap(self.data_fd, self.data_bytes)
        )
        HEADER.pack_into(
            self._index,
            0,
            MAGIC,
            LAYOUT_VERSION,
            slot_count,
            slot_bytes,
            RECORDS_OFFSET,
            self.data_bytes,
            self.uuid.bytes,
            table_offset(slot_count),
            SlotIndex.entries_for(slot_count),
        )
        self.index = open_index(self._index, slot_count, writable=True)
        self.records = self.index.slots
        self.records.initialise()
        self.beat()
        fcntl.fcntl(self.index_fd, fcntl.F_ADD_SEALS, INDEX_SEALS)
        fcntl.fcntl(self.data_fd, fcntl.F_ADD_SEALS, DATA_SEALS)
        for fd in (self.index_fd, self.data_fd):
            # Memfds are born 0777: without this any user could reopen them through /proc.
            os.fchmod(fd, 0o400)
        self._pages = Pages(self._data)
        self._view = memoryview(self._data).cast("B")

    def info(self, lane: LaneInfo | None = None) -> ArenaInfo:
        """Return the geometry that clients check against, with that of a session's lane."""
        return ArenaInfo(
            uuid=self.uuid.hex,
            slot_count=self.slot_count,
            slot_bytes=self.slot_bytes,
            index_bytes=len(self._index),
            data_bytes=self.data_bytes,
            lane=lane,
        )

    def offset(self, slot: int) -> int:
        """Return where a slot begins in the data memfd."""
        return self.size_class.offset(slot)

    def view(self, slot: int, length: int) -> memoryview:
        """Return the first `length` bytes of a slot, writable."""
        offset = self.size_class.offset(slot)
        return self._view[offset : offset + length]

    def beat(self) -> None:
        """Write the heartbeat: with an old one every lookup of a client is a miss."""
        if not self._silent:
            store_u64(self._index, HEARTBEAT_OFFSET, time.monotonic_ns())

    def fall_silent(self) -> None:
        """Stop the heartbeat for good: from now on every lookup of a client is a miss."""
        self._silent = True
        store_u64(self._index, HEARTBEAT_OFFSET, 0)

    def readonly_data_fd(self) -> int:
        """Open the data memfd again, for reading only. The caller closes it."""
        return os.open(f"/proc/self/fd/{self.data_fd}", os.O_RDONLY | os.O_CLOEXEC)

    def pin(self) -> None:
        """Keep touched pages in memory where the limits allow; keeps the reason if not."""
        try:
            self._pages.pin()
        except OSError as error:
            self.pin_refusal = f"{error.strerror} (raise the memlock limit: ulimit -l)"

    def bind(self, nodes: Sequence[int] | None) -> None:
        """Take memory from these NUMA nodes, or (None) from all in turn; before populating.

        Raises
        ------
        OSError
            When the kernel refuses.
        """
        self._pages.bind(nodes)

    def populate_in_background(
        self, deliver: Callable[[int, int], None], failed: Callable[[OSError], None]
    ) -> None:
        """Populate slot after slot in a thread.

        Parameters
        ----------
        deliver : callable
            Called in that thread with (first slot, count) for every populated run.
        failed : callable
            Called in that thread once when the kernel refuses.
        """
        self._populator = threading.Thread(
            target=self._populate, args=(deliver, failed), name="kvd-populate", daemon=True
        )
        self._populator.start()

    def _populate(
        self, deliver: Callable[[int, int], None], failed: Callable[[OSError], None]
    ) -> None:
        step = max(1, POPULATE_BYTES // self.slot_bytes)
        for first in range(0, self.slot_count, step):
            if self._stop.is_set():
                return
            count = min(step, self.slot_count - first)
            try:
                self._pages.populate(self.offset(first), count * self.slot_bytes)
            except OSError as error:
                failed(error)
                return
            if self._hugepages and self.huge_refusal is None:
                self._collapse(self.offset(first), count * self.slot_bytes)
            self.populated_slots += count
            deliver(first, count)

    def _collapse(self, offset: int, size_bytes: int) -> None:
        """Make huge pages of what was populated; the first refusal is the last attempt."""
        try:
            self.huge_bytes += self._pages.collapse(offset, size_bytes)
        except OSError as error:
            self.huge_refusal = f"{error.strerror}, after {self.huge_bytes >> 20}M"
            logger.warning("no huge pages for the arena: %s", self.huge_refusal)

    def close(self) -> None:
        """Unmap and close. No disk thread may still use a view."""
        self._stop.set()
        if self._populator is not None:
            self._populator.join()
        self._pages.close()
        for lane in self.lanes:
            lane.close()
        self.index.close()
        self.records.close()
        self._view.release()
        for mapping in (self._index, self._data):
            try:
                if isinstance(mapping, mmap.mmap):
                    mapping.close()
            except BufferError:
                # A read stuck in the kernel still holds a view; the process is ending anyway.
                pass
        os.close(self.index_fd)
        os.close(self.data_fd)


def release(views: list[memoryview]) -> list[memoryview]:
    """Let views of slots go; return those that the engine still holds.

    It holds memory that a transfer may still be under way to or from, and for as long as an
    error's traceback refers to the call.
    """
    held: list[memoryview] = []
    for view in views:
        try:
            view.release()
        except BufferError:
            held.append(view)
    return held


def memfd(name: str, size_bytes: int) -> int:
    """Return a fresh memfd of a size, which may be sealed."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size_bytes)
    return fd
