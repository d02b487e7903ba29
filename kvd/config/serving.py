"""Flags about serving: where, and how the daemon stops."""

from __future__ import annotations

from dataclasses import dataclass

from kvd.config.flag import flag, seconds, text
from kvd.config.values import Values
from kvd.socket_path import default_socket

TITLE = "serving"


@dataclass(frozen=True, kw_only=True)
class Serving:
    """See `kvd --help`."""

    socket: str = flag(
        "--socket",
        text,
        metavar="PATH",
        help="Unix socket (default: /var/run/kvd.sock, or $XDG_RUNTIME_DIR/kvd.sock)",
    )
    drain_timeout_s: float = flag(
        "--drain-timeout",
        seconds,
        default="20s",
        metavar="SECONDS",
        help="how long SIGTERM may write what is not on the disk yet",
    )


def settle(values: Values) -> list[str]:
    """Fill in what depends on the user."""
    if values["socket"] is None:
        values["socket"] = default_socket()
    return []
