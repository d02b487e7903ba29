"""The daemon's side of the shared arena: its memfds, their slabs, and which are populated."""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence

from tablespace.shared import Lane, SlotIndex, store_u64

from kvd.arena_layout import (
    DATA_SEALS,
    HEADER,
    HEARTBEAT_OFFSET,
    INDEX_SEALS,
    LAYOUT_VERSION,
    MAGIC,
    RECORDS_OFFSET,
    index_bytes,
    table_offset,
)
from kvd.pages import Pages, huge_memfd, map_aligned
from kvd.protocol import ArenaInfo, LaneInfo
from kvd.shared_index import open_index
from kvd.slab_geometry import HUGE_PAGE_BYTES, SlabGeometry

logger = logging.getLogger(__name__)

# One step of population, in whole slabs. 16 MiB take about 10 ms; slots are handed out after
# each.
POPULATE_BYTES = 16 << 20
# How long a caller who needs room waits for the slab that the thread is at.
LAST_SLAB_S = 0.005


class Arena:
    """Memory for blocks that clients map too.

    Parameters
    ----------
    max_bytes : int
        Size of the data memfd, rounded down to whole slots of the default class.
    slot_bytes : int
        Of the default class: a multiple of the page size.
    more_sizes : sequence of int
        Other slots that a slab must be able to hold.
    hugepages : bool
        Ask for huge pages: reserved ones (MFD_HUGETLB), else by MADV_COLLAPSE. `reserve_refusal`
        and `huge_refusal` say why there are none.

    Attributes
    ----------
    slot_count : int
        How many slots of the default class it holds.
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

    def __init__(
        self,
        max_bytes: int,
        slot_bytes: int,
        *,
        more_sizes: Sequence[int] = (),
        hugepages: bool = False,
    ) -> None:
        self.geometry = SlabGeometry.choose(max_bytes, slot_bytes, more_sizes)
        self.uuid = uuid.uuid4()
        self.pin_refusal: str | None = None
        self.reserve_refusal: str | None = None
        self.huge_refusal: str | None = None
        self.huge_bytes = 0
        self._collapses = hugepages
        self.populated_slabs = 0
        # Slabs before this one are populated, or being so.
        self._claimed_slabs = 0
        # So many at a time, for huge pages to be whole.
        self._unit_slabs = max(1, HUGE_PAGE_BYTES // self.geometry.slab_bytes) if hugepages else 1
        # Runs of slabs, (first, count), that are populated and that nobody took yet; and how many
        # slabs were there or taken at once.
        self._ready: deque[tuple[int, int]] = deque()
        self._handed_slabs = 0
        # Held while these are changed; told when a run is ready.
        self._claiming = threading.Condition()
        self._is_refused = False
        # (offset, bytes) populated ahead of the thread, that are to be huge pages.
        self._ahead: list[tuple[int, int]] = []
        self._stop = threading.Event()
        self._populator: threading.Thread | None = None

        self.lanes: list[Lane] = []
        self._silent = False

        self._data: mmap.mmap | ctypes.Array[ctypes.c_char]
        if not (hugepages and self._take_reserved(max_bytes, slot_bytes, more_sizes)):
            self.data_fd = memfd("kvd-data", self.geometry.data_bytes)
            self._data = (
                map_aligned(self.data_fd, self.geometry.data_bytes)
                if hugepages
                else mmap.mmap(self.data_fd, self.geometry.data_bytes)
            )
        geometry = self.geometry
        self.slot_bytes = slot_bytes
        self.slot_count = geometry.slots_in_all(slot_bytes)
        self.data_bytes = geometry.data_bytes
        # The size of each slab's slots, 0 while it has none, and how many numbers were in use.
        self._slot_bytes = [0] * geometry.slab_count
        self._numbered = [0] * geometry.slab_count
        numbers = geometry.slot_numbers
        self.index_fd = memfd("kvd-index", index_bytes(numbers))
        # Mapped before it is sealed: FUTURE_WRITE stops every later writable mapping, also ours.
        self._index = mmap.mmap(self.index_fd, index_bytes(numbers))
        HEADER.pack_into(
            self._index,
            0,
            MAGIC,
            LAYOUT_VERSION,
            numbers,
            geometry.slab_bytes,
            RECORDS_OFFSET,
            self.data_bytes,
            self.uuid.bytes,
            table_offset(numbers),
            SlotIndex.entries_for(numbers),
            geometry.slots_per_slab,
        )
        self.index = open_index(self._index, numbers, writable=True)
        self.records = self.index.slots
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
            slot_count=self.geometry.slot_numbers,
            slab_bytes=self.geometry.slab_bytes,
            slots_per_slab=self.geometry.slots_per_slab,
            index_bytes=len(self._index),
            data_bytes=self.data_bytes,
            lane=lane,
        )

    def _take_reserved(self, max_bytes: int, slot_bytes: int, more_sizes: Sequence[int]) -> bool:
        """Make the data memfd of reserved huge pages; False where there are too few."""
        geometry = SlabGeometry.choose(
            max_bytes, slot_bytes, more_sizes, unit_bytes=HUGE_PAGE_BYTES
        )
        try:
            fd = huge_memfd("kvd-data", geometry.data_bytes)
        except OSError as error:
            self.reserve_refusal = str(error.strerror)
            return False
        try:
            self._data = mmap.mmap(fd, geometry.data_bytes)
        except OSError as error:
            os.close(fd)
            self.reserve_refusal = (
                f"{error.strerror}; reserve {geometry.data_bytes // HUGE_PAGE_BYTES} of 2M in "
                "vm.nr_hugepages"
            )
            logger.info("no reserved huge pages for the arena: %s", self.reserve_refusal)
            return False
        self.geometry = geometry
        self.data_fd = fd
        self.huge_bytes = geometry.data_bytes
        self._collapses = False
        return True

    # -- slots ---------------------------------------------------------------------------------

    def cut(self, slab: int, slot_bytes: int) -> int:
        """Give a slab's slots a size, and return how many it has.

        No slot of it is in use: every one that was has an odd sequence, and the next value in
        it is published with the place that it has then.
        """
        count = self.geometry.slots_in(slab, slot_bytes)
        numbered = self._numbered[slab]
        if count > numbered:
            self.records.initialise(self.first_slot(slab) + numbered, count - numbered)
            self._numbered[slab] = count
        self._slot_bytes[slab] = slot_bytes
        return count

    def first_slot(self, slab: int) -> int:
        """Return the number of a slab's first slot."""
        return slab * self.geometry.slots_per_slab

    def slab_of(self, slot: int) -> int:
        """Return the number of the slab that a slot lies in."""
        return slot // self.geometry.slots_per_slab

    def slot_bytes_of(self, slot: int) -> int:
        """Return the size of a slot."""
        return self._slot_bytes[slot // self.geometry.slots_per_slab]

    def offset(self, slot: int) -> int:
        """Return where a slot begins in the data memfd."""
        slab, position = divmod(slot, self.geometry.slots_per_slab)
        return slab * self.geometry.slab_bytes + position * self._slot_bytes[slab]

    def view(self, slot: int, length: int) -> memoryview:
        """Return the first `length` bytes of a slot, writable."""
        return self.view_at(self.offset(slot), length)

    def view_at(self, offset: int, length: int) -> memoryview:
        """Return bytes of the data memfd, writable."""
        return self._view[offset : offset + length]

    @property
    def populated_slots(self) -> int:
        """Return how many slots of the default class have their pages."""
        slots = self.geometry.slots_in(0, self.slot_bytes)
        return min(self.slot_count, self.populated_slabs * slots)

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
        self, deliver: Callable[[], None], failed: Callable[[OSError], None]
    ) -> None:
        """Populate slab after slab in a thread; `take_ready` hands them out.

        Parameters
        ----------
        deliver : callable
            Called in that thread when more is ready.
        failed : callable
            Called in that thread once when the kernel refuses.
        """
        self._populator = threading.Thread(
            target=self._populate, args=(deliver, failed), name="kvd-populate", daemon=True
        )
        self._populator.start()

    def take_ready(self) -> tuple[int, int] | None:
        """Return (first slab, count) of a populated run, each once, or None."""
        return self._ready.popleft() if self._ready else None

    def populate_now(self) -> tuple[int, int] | None:
        """Return a populated run as `take_ready`, for a caller that would find no room.

        Where none is ready some is populated ahead of the thread, in about a millisecond.

        Returns
        -------
        (first slab, count) or None
            None where each slab was taken, or the kernel refuses.
        """
        if (ready := self.take_ready()) is not None or self._is_refused:
            return ready
        if self._handed_slabs == self.geometry.slab_count:
            # As ever after: this is asked before each eviction.
            return self.take_ready()
        first, count = self._claim(self._unit_slabs)
        if count:
            try:
                self._ahead.append(self._give_pages(first, count))
            except OSError as error:
                # The thread may be through already, and says nothing of slabs that it never had.
                logger.error("the kernel gave no memory for slab %d: %s", first, error)
                return None
            with self._claiming:
                self._handed_slabs += count
            return first, count
        with self._claiming:
            # The thread may be at the last one.
            self._claiming.wait_for(
                lambda: self._ready or self._handed_slabs == self.geometry.slab_count,
                LAST_SLAB_S,
            )
        return self.take_ready()

    def _populate(self, deliver: Callable[[], None], failed: Callable[[OSError], None]) -> None:
        step = max(self._unit_slabs, POPULATE_BYTES // self.geometry.slab_bytes)
        while not self._stop.is_set():
            first, count = self._claim(step)
            if not count:
                break
            try:
                offset, size_bytes = self._give_pages(first, count)
            except OSError as error:
                failed(error)
                return
            self._collapse(offset, size_bytes)
            with self._claiming:
                self._ready.append((first, count))
                self._handed_slabs += count
                self._claiming.notify_all()
            deliver()
            self._collapse_ahead()
        self._collapse_ahead()

    def _claim(self, count: int) -> tuple[int, int]:
        """Return (first slab, count) of slabs that are the caller's to populate."""
        with self._claiming:
            first = self._claimed_slabs
            left = self.geometry.slab_count - first
            # Less and less at a time towards the end: who needs the last ones waits for few.
            few = -(-left // (4 * self._unit_slabs)) * self._unit_slabs
            count = min(count, few, left)
            self._claimed_slabs += count
            return first, count

    def _give_pages(self, first: int, count: int) -> tuple[int, int]:
        """Populate claimed slabs; return their (offset, bytes)."""
        offset = first * self.geometry.slab_bytes
        size_bytes = min(count * self.geometry.slab_bytes, self.data_bytes - offset)
        try:
            self._pages.populate(offset, size_bytes)
        except OSError:
            self._is_refused = True
            raise
        with self._claiming:
            self.populated_slabs += count
        return offset, size_bytes

    def _collapse_ahead(self) -> None:
        while self._ahead:
            self._collapse(*self._ahead.pop())

    def _collapse(self, offset: int, size_bytes: int) -> None:
        """Make huge pages of what was populated; the first refusal is the last attempt."""
        if not self._collapses or self.huge_refusal is not None:
            return
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
