"""Lets the disk keep up with a replay that stores as fast as it can."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvd import Client, UnavailableError
from kvd.replay.sizes import BlockSizes, as_sizes

ARENA_SHARE = 4
"""A quarter of the arena may wait for the disk; the daemon itself queues up to a half."""

FLUSH_TIMEOUT_S = 30.0


class Backlog:
    """Waits until what was stored is durable whenever a bound's worth of it may not be.

    An engine computes between two stores; a replay at full speed does not, and would fill the
    arena with blocks that only wait for the disk. What is refused then says something about
    the disk's pace at that minute and nothing about the tiers.

    Parameters
    ----------
    client : kvd.Client
        Of a daemon that answers; its arena sets the bound.
    block_bytes : int or BlockSizes
        Size of the blocks.

    Attributes
    ----------
    waited_s : float
        Time spent waiting.
    """

    def __init__(self, client: Client, block_bytes: int | BlockSizes) -> None:
        memory = client.stats().memory
        self.waited_s = 0.0
        self._client = client
        self._limit = max(1, memory.data_bytes // ARENA_SHARE // as_sizes(block_bytes).mean)
        self._blocks = 0

    def store(self, hash_ids: Sequence[int]) -> None:
        """Count stored blocks, and wait if they make the bound full."""
        self._blocks += len(hash_ids)
        if self._blocks < self._limit:
            return
        self._blocks = 0
        began = time.monotonic()
        try:
            self._client.flush(FLUSH_TIMEOUT_S)
        except UnavailableError:
            pass  # A daemon that is away has no backlog.
        self.waited_s += time.monotonic() - began
