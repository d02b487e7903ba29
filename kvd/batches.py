"""Batches: how many blocks go into one request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvd.connection import Connection
from kvd.frames import INLINE_BATCH_BYTES
from kvd.protocol import MAX_BATCH_KEYS

FIRST_KEYS = 64
GROWTH = 16


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


def growing_parts(keys: list[bytes]) -> Iterator[list[bytes]]:
    """Cut keys whose leading ones are asked for: few at first, more while those are there.

    Most of what memory does not have is nowhere, and that is known after a few.
    """
    first, size = 0, FIRST_KEYS
    while first < len(keys):
        yield keys[first : first + size]
        first += size
        size = min(size * GROWTH, MAX_BATCH_KEYS)
