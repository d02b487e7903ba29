"""How long blocks are kept, as an operator or a request says it."""

from __future__ import annotations

import msgspec

RETENTIONS = ("none", "ephemeral", "short", "long")


class Keep(msgspec.Struct, frozen=True):
    """How long the blocks of one request are kept.

    Attributes
    ----------
    retention : str
        "none" neither loads nor stores.
    ttl_s : float or None
    """

    retention: str
    ttl_s: float | None = None


def check_retention(retention: str) -> None:
    """Raise ValueError for a retention that there is not."""
    if retention not in RETENTIONS:
        raise ValueError(f"retention {retention!r} is none of {', '.join(RETENTIONS)}")
