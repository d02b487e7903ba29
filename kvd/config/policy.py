"""Flags about what is kept: eviction and admission. Each is a field, as in the other groups."""

from __future__ import annotations

from dataclasses import dataclass

from kvd.config.flag import choice, flag
from kvd.config.values import Values
from kvd.policy.rules import DEFAULT_POLICY, POLICIES

TITLE = "what is kept"


def share(given: str) -> float:
    """A part of a whole, above 0."""
    try:
        number = float(given)
    except ValueError:
        number = -1.0
    if not 0 < number <= 1:
        raise ValueError("not a share above 0, at most 1; write for example 0.9")
    return number


@dataclass(frozen=True, kw_only=True)
class Policy:
    """See `kvd --help`."""

    evict_policy: str = flag(
        "--evict-policy",
        choice(*POLICIES),
        default=DEFAULT_POLICY,
        metavar="NAME",
        help="which blocks leave first, in both tiers: value, lru or fifo",
    )
    watermark: float = flag(
        "--watermark",
        share,
        default="0.9",
        metavar="SHARE",
        help="share of the long tier in use at which room is made in the background; 1.0: only "
        "when a write needs it",
    )
    evict_ratio: float = flag(
        "--evict-ratio",
        share,
        default="0.1",
        metavar="SHARE",
        help="share of what is in use that goes then",
    )


def settle(values: Values) -> list[str]:
    """Check what depends on other flags."""
    return []
