"""Flags about what is kept: eviction and admission. Each is a field, as in the other groups."""

from __future__ import annotations

from dataclasses import dataclass

from kvd.config.values import Values

TITLE = "what is kept"


@dataclass(frozen=True, kw_only=True)
class Policy:
    """See `kvd --help`."""


def settle(values: Values) -> list[str]:
    """Check what depends on other flags."""
    return []
