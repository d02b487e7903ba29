"""Flags about what the daemon shows of itself."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from kvd.config.flag import choice, flag
from kvd.config.values import Values

TITLE = "logs and metrics"
LOOPBACK = "127.0.0.1"
MAX_PORT = 65535


def address(given: str) -> tuple[str, int]:
    """An address and a port; a port alone is one of this host's loopback."""
    host, _, port = given.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or LOOPBACK
    if not port.isascii() or not port.isdigit() or int(port) > MAX_PORT:
        raise ValueError("must be a port, or ADDRESS:PORT: 9464, 127.0.0.1:9464, [::1]:9464")
    try:
        ipaddress.ip_address(host)
    except ValueError:
        if host != "localhost":
            raise ValueError(f"{host} is not an IP address; a port alone is loopback") from None
        host = LOOPBACK
    return host, int(port)


@dataclass(frozen=True, kw_only=True)
class Sight:
    """See `kvd --help`."""

    log_level: str = flag(
        "--log-level",
        choice("debug", "info", "warning", "error"),
        default="info",
        metavar="LEVEL",
        help="debug, info, warning or error",
    )
    log_format: str = flag(
        "--log-format",
        choice("text", "json"),
        default="text",
        metavar="FORMAT",
        help="text, or json: one object a line",
    )
    metrics: tuple[str, int] | None = flag(
        "--metrics",
        address,
        metavar="ADDR:PORT",
        help="serve /metrics, /healthz, /readyz and a status page over HTTP there; a port alone "
        "is loopback (default: off)",
    )


def settle(values: Values) -> list[str]:
    """Nothing here depends on other flags."""
    return []
