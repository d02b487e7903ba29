"""Flags about serving: where, and how the daemon stops."""

from __future__ import annotations

from dataclasses import dataclass

from kvd.config.flag import flag, seconds, text
from kvd.config.values import Values
from kvd.peers import Access, group, user
from kvd.socket_path import default_socket

TITLE = "serving"


@dataclass(frozen=True, kw_only=True)
class Serving:
    """See `kvd --help`."""

    @property
    def access(self) -> Access:
        """Return who may connect."""
        return Access(frozenset(self.allow_uid or ()), frozenset(self.allow_gid or ()))

    socket: str = flag(
        "--socket",
        text,
        metavar="PATH",
        help="Unix socket (default: /var/run/kvd.sock, or $XDG_RUNTIME_DIR/kvd.sock)",
    )
    allow_uid: tuple[int, ...] = flag(
        "--allow-uid",
        user,
        metavar="USER",
        many=True,
        help="users to serve besides the daemon's own, by number or name",
    )
    allow_gid: tuple[int, ...] = flag(
        "--allow-gid",
        group,
        metavar="GROUP",
        many=True,
        help="groups whose members to serve; the socket's mode is then 0660",
    )
    drain_timeout_s: float = flag(
        "--drain-timeout",
        seconds,
        default="20s",
        metavar="SECONDS",
        help="how long SIGTERM may write what is not on the disk yet",
    )


def settle(values: Values) -> list[str]:
    """Fill in what depends on the user; say who may connect besides."""
    if values["socket"] is None:
        values["socket"] = default_socket()
    for name in ("allow_uid", "allow_gid"):
        values[name] = values[name] or ()
    return Access(frozenset(values["allow_uid"]), frozenset(values["allow_gid"])).notes()
