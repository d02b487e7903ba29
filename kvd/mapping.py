"""A client's mapping of the arena: checked before it is used, bounds-checked while it is."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import time

from tablespace.shared import MAX_TOUCHES, ArenaReader, Lane, SlotIndex, copy_in, load_u64

from kvd.arena_layout import (
    HEADER,
    HEARTBEAT_OFFSET,
    LAYOUT_VERSION,
    MAGIC,
    RECORDS_OFFSET,
    REQUIRED_SEALS,
    index_bytes,
    lane_bytes,
    lane_leases,
    table_offset,
)
from kvd.errors import ProtocolError
from kvd.protocol import ArenaInfo, Grant, Hit, LaneInfo
from kvd.shared_index import open_index

HEARTBEAT_S = 2.0  # The daemon writes one every half second.
# So often a lookup makes sure that the daemon did not leave, by a system call.
CHECK_S = 0.01


class ArenaMapping:
    """The index (read-only), the data (writable) and a lane of one daemon's arena.

    Parameters
    ----------
    info : ArenaInfo
        What HELLO_ACK said.
    index_fd, data_fd, lane_fd : int
        Descriptors that came with ARENA. The caller closes them. Without a lane (None)
        nothing can be leased.

    Attributes
    ----------
    reader : ArenaReader
        Looks keys up without asking the daemon.

    Raises
    ------
    ProtocolError
        `bad_arena`: a seal is missing, or sizes and header do not agree with `info`.

    Notes
    -----
    Safe from any thread. The memory is unmapped when the last reference goes.
    """

    def __init__(
        self, info: ArenaInfo, index_fd: int, data_fd: int, lane_fd: int | None = None
    ) -> None:
        _check_file("index", index_fd, info.index_bytes)
        _check_file("data", data_fd, info.data_bytes)
        if (
            not 1 <= info.slab_bytes <= info.data_bytes
            or not 1 <= info.slots_per_slab <= info.slab_bytes
            or info.slot_count != info.slots_per_slab * -(-info.data_bytes // info.slab_bytes)
            or info.index_bytes < index_bytes(info.slot_count)
        ):
            raise ProtocolError("bad_arena", f"the geometry contradicts itself: {info}")
        self._geometry = info
        self._index = mmap.mmap(index_fd, info.index_bytes, access=mmap.ACCESS_READ)
        found = HEADER.unpack_from(self._index, 0)
        expected = (
            MAGIC,
            LAYOUT_VERSION,
            info.slot_count,
            info.slab_bytes,
            RECORDS_OFFSET,
            info.data_bytes,
            bytes.fromhex(info.uuid),
            table_offset(info.slot_count),
            SlotIndex.entries_for(info.slot_count),
            info.slots_per_slab,
        )
        if found != expected:
            raise ProtocolError("bad_arena", f"the index says {found}, HELLO_ACK {expected}")
        index = open_index(self._index, info.slot_count)
        self._slots = index.slots
        self._data = mmap.mmap(data_fd, info.data_bytes)
        self._data_view = memoryview(self._data).toreadonly()
        lane = None
        if info.lane is not None and lane_fd is not None:
            lane = _map_lane(info.lane, lane_fd, info.slot_count)
        self.reader = ArenaReader(
            index,
            self._data,
            lane=lane,
            heartbeat=memoryview(self._index)[HEARTBEAT_OFFSET : HEARTBEAT_OFFSET + 8],
            stale_ns=int(HEARTBEAT_S * 1e9),
            unchecked_ns=int(CHECK_S * 1e9),
        )

    def heartbeat_age_s(self) -> float:
        """Return how long ago the daemon last said that it lives."""
        return (time.monotonic_ns() - load_u64(self._index, HEARTBEAT_OFFSET)) / 1e9

    def view(self, offset: int, length: int) -> memoryview:
        """Return a read-only view of a value; whoever asks holds a lease on it."""
        return self._data_view[offset : offset + length]

    def lease_hit(self, hit: Hit, places: list[int]) -> memoryview | None:
        """Lease a block that the daemon found; None when it changed or no lease is free."""
        self._check(hit.slot, hit.offset, hit.length)
        if not self.reader.lease_slot(hit.slot, hit.version, places):
            return None
        return self.view(hit.offset, hit.length)

    def copy_out(self, hit: Hit, buffer: bytearray | memoryview) -> int:
        """Copy a found block into a buffer; -1 when it changed meanwhile.

        Raises
        ------
        ValueError
            When the buffer is shorter than the block.
        """
        self._check(hit.slot, hit.offset, hit.length)
        return self._slots.copy_out(hit.slot, hit.version, self._data, hit.offset, buffer)

    def copy_bytes(self, hit: Hit) -> bytes | None:
        """Copy a found block; None when it changed meanwhile."""
        self._check(hit.slot, hit.offset, hit.length)
        return self._slots.copy_bytes(hit.slot, hit.version, self._data, hit.offset)

    def write(self, grant: Grant, value: memoryview) -> None:
        """Copy a value into a reserved slot."""
        self._check(grant.slot, grant.offset, value.nbytes)
        copy_in(self._data, grant.offset, value)

    def slot_view(self, grant: Grant, length: int) -> memoryview:
        """Return the start of a reserved slot, writable.

        Its `obj` lives as long as anything made of the view: an array, a slice, a tensor.
        """
        self._check(grant.slot, grant.offset, length)
        return memoryview((ctypes.c_char * length).from_buffer(self._data, grant.offset)).cast("B")

    def _check(self, slot: int, offset: int, length: int) -> None:
        """Refuse what would lie outside the slab that the slot is in, whoever named it."""
        info = self._geometry
        start = slot // info.slots_per_slab * info.slab_bytes
        end = min(start + info.slab_bytes, info.data_bytes)
        if not 0 <= slot < info.slot_count or length < 0 or not start <= offset <= end - length:
            raise ProtocolError(
                "bad_arena", f"slot {slot} at {offset} with {length} bytes is outside the arena"
            )


def _map_lane(info: LaneInfo, fd: int, slot_count: int) -> Lane:
    if (
        not 1 <= info.leases <= lane_leases(slot_count)
        or info.bytes != lane_bytes(info.leases, info.touches)
        or not 1 <= info.touches <= MAX_TOUCHES
        or info.touches & (info.touches - 1)
    ):
        raise ProtocolError("bad_arena", f"the lane's geometry contradicts itself: {info}")
    _check_file("lane", fd, info.bytes)
    return Lane(mmap.mmap(fd, info.bytes), leases=info.leases, touches=info.touches)


def _check_file(name: str, fd: int, size_bytes: int) -> None:
    seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    if seals & REQUIRED_SEALS != REQUIRED_SEALS:
        raise ProtocolError("bad_arena", f"the {name} could be resized: its seals are {seals:#x}")
    found = os.fstat(fd).st_size
    if found != size_bytes:
        raise ProtocolError("bad_arena", f"the {name} has {found} bytes, not {size_bytes}")
