"""Sectors of a simulated disk that are bad for good, whatever is written to them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

BAD_KINDS = ("read", "corrupt", "write", "sync")


class BadSectors(NamedTuple):
    """A range of a file that fails.

    Attributes
    ----------
    node : int
        The file.
    offset, length : int
        In bytes; multiples of 4096.
    kind : str
        ``read``: reads fail with EIO. ``corrupt``: reads give other bytes. ``write``: writes and
        reads fail with EIO. ``sync``: a sync after a write there fails, as it does through a page
        cache, and reads fail.
    """

    node: int
    offset: int
    length: int
    kind: str

    def overlap(self, node: int, offset: int, length: int) -> int | None:
        """Return where a transfer first meets these sectors; None where it does not."""
        start = max(self.offset, offset)
        end = min(self.offset + self.length, offset + length)
        return start if node == self.node and start < end else None


def fails(bad: Iterable[BadSectors], transfer: str, node: int, offset: int, length: int) -> bool:
    """Say whether a read or write meets sectors that make it fail with EIO."""
    kinds = ("read", "write", "sync") if transfer == "read" else ("write",)
    return any(
        each.kind in kinds and each.overlap(node, offset, length) is not None for each in bad
    )


def garbled(bad: Iterable[BadSectors], node: int, offset: int, length: int) -> Iterator[int]:
    """Yield the positions within a read whose bytes come back changed."""
    for each in bad:
        start = each.overlap(node, offset, length)
        if each.kind == "corrupt" and start is not None:
            yield start - offset
