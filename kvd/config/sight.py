"""Flags about what the daemon shows of itself."""

from __future__ import annotations

from dataclasses import dataclass

from kvd.config.flag import choice, flag
from kvd.config.values import Values

TITLE = "logs and metrics"


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


def settle(values: Values) -> list[str]:
    """Nothing here depends on other flags."""
    return []
