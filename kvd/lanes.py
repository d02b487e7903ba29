"""The sessions' lanes, as the daemon reads them: leases, touches, hits it was not asked for."""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
from collections import Counter

from tablespace.shared import Lane, drain_lanes

from kvd.arena import memfd
from kvd.arena_layout import DATA_SEALS, LANE_TOUCHES, lane_bytes, lane_leases
from kvd.cache import Cache
from kvd.errors import ProtocolError
from kvd.protocol import LaneInfo

# Lanes of closed sessions that one process may leave behind: 64 KiB each. A client that works
# names such sessions in its next HELLO, or its process ends.
MAX_ORPHANS = 64

logger = logging.getLogger(__name__)


class Lanes:
    """Every lane, by session. Event loop only.

    Parameters
    ----------
    cache : Cache
        Whose recency and counters the lanes' contents go to.

    Notes
    -----
    A lane lives until its session says BYE or is named in a HELLO's `released`, or its process
    ends: a closed socket is not a dead process, and what reads under a lease reads on.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._memory = cache.memory
        self._arena = cache.memory.arena
        self._lanes: dict[int, tuple[Lane, int]] = {}
        self._orphans: dict[int, int] = {}
        self._orphaned: Counter[int] = Counter()
        self._any_hit = False
        cache.memory.before_evict = self.fold_touches

    def open(self, session_id: int, pid: int) -> tuple[LaneInfo, int]:
        """Make a session's lane; return what HELLO_ACK says of it and its memfd to pass on.

        The caller closes the memfd.

        Raises
        ------
        ProtocolError
            `limit`, when the process left too many lanes behind, or there is no room.
        """
        if self._orphaned[pid] >= MAX_ORPHANS:
            raise ProtocolError(
                "limit",
                f"process {pid} closed {MAX_ORPHANS} sessions without ending their leases; "
                "name them in HELLO's `released`",
            )
        leases = lane_leases(self._arena.slot_count)
        info = LaneInfo(lane_bytes(leases, LANE_TOUCHES), leases, LANE_TOUCHES)
        try:
            fd = memfd("kvd-lane", info.bytes)
        except OSError as error:
            raise ProtocolError("limit", f"no lane can be made: {error}") from error
        try:
            # All pages now: one that is missing when it is first read would end the daemon.
            os.posix_fallocate(fd, 0, info.bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, DATA_SEALS)
            os.fchmod(fd, 0o400)
            lane = Lane(mmap.mmap(fd, info.bytes), leases=leases, touches=LANE_TOUCHES)
        except OSError as error:
            os.close(fd)
            raise ProtocolError("limit", f"no lane can be made: {error}") from error
        self._arena.lanes.append(lane)
        self._lanes[session_id] = (lane, pid)
        return info, fd

    def end(self, session_id: int, *, done: bool) -> bool:
        """Note that a session closed; True when its lane stays.

        `done` says that the client promised to hold no lease (BYE, or `released` before).
        """
        if session_id not in self._lanes:
            return False
        if done:
            self._close(session_id)
            return False
        pid = self._lanes[session_id][1]
        self._orphans[session_id] = pid
        self._orphaned[pid] += 1
        return True

    def release(self, session_id: int, pid: int | None = None) -> None:
        """Close a closed session's lane: its process is gone or said that it holds no lease.

        With `pid` only if the session was that process's: one client cannot end another's.
        """
        owner = self._orphans.get(session_id)
        if owner is None or (pid is not None and pid != owner):
            return
        del self._orphans[session_id]
        self._orphaned[owner] -= 1
        if not self._orphaned[owner]:
            del self._orphaned[owner]
        self._close(session_id)

    def leased_slots(self) -> int:
        """Return how many slots are under some lease now."""
        leased: set[int] = set()
        for lane, _ in self._lanes.values():
            leased |= lane.leases(self._arena.slot_count)
        return len(leased)

    def fold(self) -> None:
        """Take in what the clients did since: counters and touches."""
        self.fold_touches()
        for lane, _ in self._lanes.values():
            self._count(lane)

    def fold_touches(self) -> None:
        """Make what the clients used since the most recent, in both tiers."""
        write_back = self._cache.write_back
        for slot in drain_lanes(self._arena.lanes, self._arena.slot_count):
            block = self._memory.block_at(slot)
            if block is None:
                continue
            self._memory.touch(block)
            if write_back is not None:
                write_back.touch(block.disk_key)
            if not self._any_hit and not self._cache.counters.hits:
                name = block.namespace.name
                logger.info("first hit: a block of %r served from memory", name)
            self._any_hit = True

    def _count(self, lane: Lane) -> None:
        hits, size_bytes = lane.take_counts()
        counters = self._cache.counters
        counters.gets += hits
        counters.hits += hits
        self._memory.counters.hits += hits
        self._memory.counters.bytes_out += size_bytes

    def _close(self, session_id: int) -> None:
        lane, _ = self._lanes.pop(session_id)
        self.fold_touches()
        self._count(lane)
        self._arena.lanes.remove(lane)
        lane.close()
