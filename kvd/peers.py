"""Peers: who is at the other end of a connection, and whether they may be."""

from __future__ import annotations

import array
import grp
import os
import pwd
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid.
SO_PEERGROUPS = 59  # asm-generic/socket.h; Linux 4.13. Python does not name it.
MAX_NUMBER = 0xFFFF_FFFE  # The one above it means nobody to chown(2).
MAX_GROUPS_BYTES = 1024  # What getsockopt() of Python takes: 256 groups.


def peer_credentials(connected: socket.socket) -> tuple[int, int, int]:
    """Return (pid, uid, gid) of the process at the other end; see SO_PEERCRED in unix(7)."""
    raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    pid, uid, gid = CREDENTIALS.unpack(raw)
    return pid, uid, gid


@dataclass(frozen=True)
class Peer:
    """The process that connected, with its groups as they were then."""

    pid: int = 0
    uid: int = -1
    gids: frozenset[int] = frozenset()

    @classmethod
    def of(cls, connected: socket.socket) -> Peer:
        """Ask the kernel."""
        pid, uid, gid = peer_credentials(connected)
        return cls(pid, uid, frozenset({gid, *_peer_groups(connected)}))


@dataclass(frozen=True)
class Access:
    """Who may connect: the daemon's own user, and whom `--allow-uid` and `--allow-gid` name."""

    uids: frozenset[int] = frozenset()
    gids: frozenset[int] = frozenset()
    own_uid: int = field(default_factory=os.getuid)

    @property
    def socket_mode(self) -> int:
        """Return the mode the socket needs."""
        return 0o660 if self.gids else 0o600

    @property
    def socket_gid(self) -> int | None:
        """Return the group that the socket should belong to, if it is certain which."""
        return min(self.gids) if len(self.gids) == 1 else None

    def refusal(self, peer: Peer) -> str | None:
        """Return why a peer may not connect, in words that name the flag; None: it may."""
        if peer.uid == self.own_uid or peer.uid in self.uids or peer.gids & self.gids:
            return None
        return (
            f"user {peer.uid} may not connect to the daemon of user {self.own_uid}; start it "
            f"with --allow-uid {peer.uid}, or with --allow-gid and a group of that user"
        )

    def notes(self) -> list[str]:
        """Return what to say at start: who may connect, and whom the socket's mode keeps out."""
        notes = []
        if self.uids or self.gids:
            users = ", ".join(map(str, sorted(self.uids | {self.own_uid})))
            groups = ", ".join(map(str, sorted(self.gids))) or "none"
            notes.append(f"may connect: users {users}; groups {groups}")
        shut_out = sorted(self.uids - {0, self.own_uid})
        if shut_out and not self.gids:
            notes.append(
                f"users {', '.join(map(str, shut_out))} are allowed, but the socket is for its "
                "owner only (mode 0600): name a group of theirs with --allow-gid too"
            )
        return notes


def user(text: str) -> int:
    """Return the number of a user, given by number or name; ValueError when there is none."""
    return _number("user", text, lambda name: pwd.getpwnam(name).pw_uid)


def group(text: str) -> int:
    """Return the number of a group, given by number or name; ValueError when there is none."""
    return _number("group", text, lambda name: grp.getgrnam(name).gr_gid)


def _number(kind: str, text: str, look_up: Callable[[str], int]) -> int:
    try:
        number = int(text) if text.isdecimal() else look_up(text)
    except KeyError:
        raise ValueError(f"there is no such {kind}; give its number or its name") from None
    if number > MAX_NUMBER:
        raise ValueError(f"no {kind} has a number above {MAX_NUMBER}")
    return number


def _peer_groups(connected: socket.socket) -> list[int]:
    groups = array.array("I")
    try:
        raw = connected.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, MAX_GROUPS_BYTES)
    except OSError:
        return []  # An old kernel, or more groups than fit: the first one must do.
    groups.frombytes(raw[: len(raw) // groups.itemsize * groups.itemsize])
    return list(groups)
