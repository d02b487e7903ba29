"""Batches: how many blocks go into one request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvd.connection import Connection
from kvd.frames import INLINE_BATCH_BYTES


def batch_blocks(connection: Connection) -> int:
    """Return how many blocks one lookup may ask for: a small arena holds no more at once."""
    limits = connection.limits
    size = limits.max_batch_blocks
    if connection.mapping is None:
        size = min(size, max(1, INLINE_BATCH_BYTES // max(1, limits.max_value_bytes)))
    return max(1, size)


def put_parts(values: Sequence[memoryview], connection: Connection) -> Iterator[slice]:
    """Cut a long put into requests."""
    size = batch_blocks(connection)
    for first in range(0, len(values), size):
        yield slice(first, first + size)
