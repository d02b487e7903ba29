"""The sessions' lanes, as the daemon reads them: leases, touches, hits it was not asked for."""

from __future__ import annotations

import fcntl
import itertools
import logging
import mmap
import os
from collections.abc import Iterable

from tablespace.shared import Lane, drain_lanes

from kvd.arena import memfd
from kvd.arena_layout import DATA_SEALS, LANE_TOUCHES, lane_bytes, lane_leases
from kvd.cache import Cache
from kvd.errors import ProtocolError
from kvd.process import Process
from kvd.protocol import LaneInfo
from kvd.session import Session

MAX_LANES = 16  # Of one session: a client that works gives those of old connections back.
# Lanes that one process may leave behind with sessions that nobody resumes: 64 KiB each.
MAX_ORPHANS = 64

logger = logging.getLogger(__name__)


class Lanes:
    """Every lane. Event loop only.

    Parameters
    ----------
    cache : Cache
        Whose recency and counters the lanes' contents go to.

    Notes
    -----
    A session has a lane for each connection that mapped the arena. It lives until the client
    says (RELEASE) that it holds no lease there, the session ends, or its process does: a closed
    socket is not a dead process, and what reads under a lease reads on. A client that closed
    its end leases nothing more there, so such a lane ends with its last lease.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._memory = cache.memory
        self._arena = cache.memory.arena
        self._lanes: dict[int, Lane] = {}
        self._ids = itertools.count(1)
        self._final: dict[int, Session] = {}
        self._any_hit = False
        cache.memory.before_evict = self.fold_touches

    def open(self, session: Session, slot_bytes: int = 0) -> tuple[LaneInfo, int]:
        """Make a lane for a session's connection; return what HELLO_ACK says of it, and its memfd.

        The caller passes the memfd on and closes it. It has leases for a share of the arena, in
        slots of `slot_bytes`, by default those of the default class.

        Raises
        ------
        ProtocolError
            `limit`, when the process left too many lanes behind, or there is no room.
        """
        self.end_final()
        if len(session.lanes) >= MAX_LANES or len(session.process.orphan_lanes) >= MAX_ORPHANS:
            raise ProtocolError(
                "limit",
                f"process {session.process.pid} left {MAX_LANES} lanes of a session behind, or "
                f"{MAX_ORPHANS} in all; end its leases, and name their lanes in RELEASE",
            )
        arena = self._arena
        slots = arena.geometry.slots_in_all(slot_bytes or arena.slot_bytes)
        leases = lane_leases(slots)
        identity = next(self._ids)
        info = LaneInfo(identity, lane_bytes(leases, LANE_TOUCHES), leases, LANE_TOUCHES)
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
        self._lanes[identity] = lane
        session.lanes.append(identity)
        return info, fd

    def release(self, session: Session, lanes: Iterable[int]) -> int:
        """Close lanes of a session in which no lease is held; return how many it had."""
        count = 0
        for identity in set(lanes).intersection(session.lanes):
            session.lanes.remove(identity)
            self._close(identity)
            count += 1
        return count

    def client_closed(self, session: Session, identity: int) -> None:
        """Note that a client closed the connection that a lane came by: no lease is added."""
        if identity in self._lanes:
            self._final[identity] = session

    def end_final(self) -> None:
        """Close the lanes that get no more leases and hold none."""
        for identity, session in list(self._final.items()):
            if self._lanes[identity].leases(self._arena.geometry.slot_numbers):
                continue
            for kept in (session.lanes, session.process.orphan_lanes):
                if identity in kept:
                    kept.remove(identity)
            self._close(identity)

    def end(self, session: Session) -> None:
        """Close all lanes of a session: it promised to hold no lease, or its process is gone."""
        self.release(session, list(session.lanes))

    def orphan(self, session: Session) -> None:
        """Keep a session's lanes until its process ends; nobody resumes it."""
        session.process.orphan_lanes += session.lanes
        session.lanes.clear()

    def free_orphans(self, process: Process) -> None:
        """Close the lanes that a process which ended left behind."""
        lanes, process.orphan_lanes = process.orphan_lanes, []
        for identity in lanes:
            self._close(identity)

    def tick(self) -> None:
        """Take in what the clients did, and close what they are done with."""
        self.fold()
        self.end_final()

    def fold(self) -> None:
        """Take in what the clients did since: counters and touches."""
        self.fold_touches()
        for lane in self._lanes.values():
            self._count(lane)

    def fold_touches(self) -> None:
        """Make what the clients used since the most recent, in both tiers."""
        write_back = self._cache.write_back
        for slot in drain_lanes(self._arena.lanes, self._arena.geometry.slot_numbers):
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

    def close(self) -> None:
        """Take in what there is and let all lanes go: the daemon ends."""
        self.fold()
        for lane in self._lanes.values():
            self._arena.lanes.remove(lane)
            lane.close()
        self._lanes.clear()
        self._final.clear()

    def _count(self, lane: Lane) -> None:
        hits, size_bytes = lane.take_counts()
        counters = self._cache.counters
        counters.gets += hits
        counters.hits += hits
        self._memory.counters.hits += hits
        self._memory.counters.bytes_out += size_bytes

    def _close(self, identity: int) -> None:
        lane = self._lanes.pop(identity, None)
        if lane is None:
            return  # Closed already: the daemon ends.
        self._final.pop(identity, None)
        self.fold_touches()
        self._count(lane)
        self._arena.lanes.remove(lane)
        lane.close()
