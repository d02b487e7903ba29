"""Sessions: opened, left, resumed, ended. A closed socket is not a dead process.

A session ends by BYE, by RELEASE from its own process, or when that process ends. Until then
its reservations stand, and a new connection of the same process may resume it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Iterator

from kvd.lanes import Lanes
from kvd.process import Process
from kvd.reservations import Reservations
from kvd.session import Carrier, Session

MAX_SESSIONS = 1024
MAX_LEFT = 8  # Sessions of one process that it may still resume; one client has one.
GRACE_S = 60.0  # Where nothing can tell that a client's process ended.

logger = logging.getLogger(__name__)


class Sessions:
    """All sessions. Event loop only.

    Parameters
    ----------
    reservations : Reservations
        Where an ended session's slots go.
    lanes : Lanes
        What an ended session's leases were in.
    max_processes : int
        How many may be watched at once: each costs a descriptor.
    """

    def __init__(
        self, reservations: Reservations, lanes: Lanes, max_processes: int = MAX_SESSIONS
    ) -> None:
        self._reservations = reservations
        self._lanes = lanes
        self._max_processes = max_processes
        self._by_id: dict[int, Session] = {}
        self._processes: dict[int, Process] = {}
        # Random start: a session id from before a restart must not name a new session.
        base = int.from_bytes(os.urandom(5), "big") << 20
        self._ids = itertools.count(base + 1)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_id.values()))

    def open_ones(self) -> list[Session]:
        """Return the sessions with a connection."""
        return [session for session in self._by_id.values() if session.connection is not None]

    def open(
        self, connection: Carrier, client: str, engine: str | None, pid: int, pidfd: int
    ) -> Session:
        """Return a new session of the process that `pidfd` watches, which is taken over."""
        process = self._process(pid, pidfd)
        session = Session(next(self._ids), client, engine, process, connection)
        process.sessions[session.id] = session
        self._by_id[session.id] = session
        return session

    def connection_of(self, session_id: int) -> Carrier | None:
        """Return the connection a session is used by, if it has one."""
        session = self._by_id.get(session_id)
        return None if session is None else session.connection

    def resume(self, connection: Carrier, session_id: int, pid: int) -> Session | None:
        """Return the session if it is this process's, now with another connection."""
        session = self._by_id.get(session_id)
        # Without a pid nobody knows whose session it is.
        if session is None or not pid or session.process.pid != pid or session.process.has_ended:
            return None
        session.connection = connection
        return session

    def leave(self, session: Session) -> None:
        """Note that a session lost its connection: it waits to be resumed."""
        process = session.process
        session.connection = None
        session.end_barriers()
        if not process.pid and not session.holds_something:
            self._forget(session)  # Nobody can resume it.
            return
        if process.pidfd < 0:
            asyncio.get_running_loop().call_later(GRACE_S, self._end_if_left, session)
        left = [other for other in process.sessions.values() if other.connection is None]
        for other in left[:-MAX_LEFT]:
            self._reservations.orphan(other)
            self._lanes.orphan(other)
            self._forget(other)

    def end(self, session: Session) -> None:
        """End a session whose process said that it neither writes nor reads in its slots."""
        session.end_barriers()
        self._reservations.end(session)
        self._lanes.end(session)
        self._forget(session)

    def release(self, session_id: int, pid: int) -> int:
        """End an earlier session of a process, which said so; return how many slots it held."""
        session = self._by_id.get(session_id)
        if session is None or not pid or session.process.pid != pid:
            return 0
        count = session.held_slots
        if session.connection is not None:
            session.connection.leave_session()
        self.end(session)
        return count

    # -- processes -----------------------------------------------------------------------------

    def _process(self, pid: int, pidfd: int) -> Process:
        known = self._processes.get(pid)
        if known is not None and known.has_ended:
            self._ended(known)  # The number went to another process before we looked.
            known = None
        if known is not None:
            if pidfd >= 0:
                os.close(pidfd)
            return known
        if pidfd >= 0 and len(self._processes) >= self._max_processes and not self._make_room():
            os.close(pidfd)
            pidfd = -1
        process = Process(pid, pidfd)
        if pidfd >= 0 and pid:
            self._processes[pid] = process
        if pidfd >= 0:
            asyncio.get_running_loop().add_reader(pidfd, self._ended, process)
        return process

    def _make_room(self) -> bool:
        """Forget the sessions of one process that left and holds nothing."""
        for process in self._processes.values():
            if process.is_idle:
                for session in list(process.sessions.values()):
                    self._forget(session)
                return True
        return False

    def _ended(self, process: Process) -> None:
        """Give back whatever a process held that can neither write nor read any more."""
        for session in list(process.sessions.values()):
            if session.connection is not None:
                # A forked child may keep the socket open. It opens one of its own.
                session.connection.leave_session()
            self.end(session)
        self._reservations.free_orphans(process)
        self._lanes.free_orphans(process)
        self._close(process)

    def _end_if_left(self, session: Session) -> None:
        if session.connection is None and session.id in self._by_id:
            self.end(session)

    def _forget(self, session: Session) -> None:
        self._by_id.pop(session.id, None)
        session.connection = None  # Which may know of the session.
        process = session.process
        process.sessions.pop(session.id, None)
        if not (process.sessions or process.orphans or process.orphan_lanes):
            self._close(process)

    def _close(self, process: Process) -> None:
        """Stop watching a process of which nothing is left to give back."""
        if self._processes.get(process.pid) is process:
            del self._processes[process.pid]
        if process.pidfd >= 0:
            asyncio.get_running_loop().remove_reader(process.pidfd)
            os.close(process.pidfd)
            process.pidfd = -1
