"""A client's process: what its sessions have in common, and how its end is noticed."""

from __future__ import annotations

import os
import select
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvd.session import Session

SO_PEERPIDFD = 77  # asm-generic/socket.h; Linux 6.5. Python does not name it.


@dataclass(eq=False)
class Process:
    """One process with sessions here. Event loop only.

    Attributes
    ----------
    pid : int
        As this daemon sees it; 0 where it cannot (another pid namespace).
    pidfd : int
        Readable once the process ended; -1 where there is none.
    sessions : dict
        Its sessions by id, oldest first; open ones and those that may be resumed.
    orphans, orphan_bytes
        Slots of sessions that nobody can resume any more, and their bytes. It may still write
        into them.
    orphan_lanes : list of int
        Such sessions' lanes. It may still read under a lease.
    """

    pid: int = 0
    pidfd: int = -1
    sessions: dict[int, Session] = field(default_factory=dict)
    orphans: list[int] = field(default_factory=list)
    orphan_bytes: int = 0
    orphan_lanes: list[int] = field(default_factory=list)

    @property
    def left_bytes(self) -> int:
        """Return the bytes of the slots it holds by sessions without a connection."""
        left = [session for session in self.sessions.values() if session.connection is None]
        return self.orphan_bytes + sum(session.held_bytes for session in left)

    @property
    def is_idle(self) -> bool:
        """Return whether it has no connection and holds nothing."""
        return not (self.orphans or self.orphan_lanes) and all(
            session.connection is None and not session.holds_something
            for session in self.sessions.values()
        )

    @property
    def has_ended(self) -> bool:
        """Return whether the process is known to have ended."""
        if self.pidfd < 0:
            return False
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))


def peer_pidfd(connected: socket.socket, pid: int) -> int:
    """Return a descriptor that tells when the process at the other end has ended, or -1.

    SO_PEERPIDFD names the very process that connected; pidfd_open(2) one with its number now.
    """
    try:
        fd: int = connected.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError:
        try:
            fd = os.pidfd_open(pid) if pid > 0 else -1
        except OSError:
            return -1
    if fd >= 0:
        os.set_inheritable(fd, False)
    return fd
