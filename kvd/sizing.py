"""Advice on sizes: each tier should hold at least as much as the one above it."""

from __future__ import annotations

import logging

from tablespace import format_size

logger = logging.getLogger(__name__)


class Sizing:
    """Compares what engines announce of their own caches with the memory tier.

    Parameters
    ----------
    memory_bytes : int
        The arena.
    notes : list of str
        Where advice is put, for STATS; one sentence at most.
    """

    def __init__(self, memory_bytes: int, notes: list[str]) -> None:
        self._memory_bytes = memory_bytes
        self._notes = notes
        self._largest_bytes = memory_bytes
        self._said: str | None = None

    def announced(self, client: str, l1_bytes: int | None) -> None:
        """Note an engine's cache; a larger one than all before it is worth a new sentence."""
        if l1_bytes is None or l1_bytes <= self._largest_bytes:
            return
        self._largest_bytes = l1_bytes
        if self._said is not None:
            self._notes.remove(self._said)
        self._said = (
            f"advice: memory ({format_size(self._memory_bytes)}) is smaller than the cache of "
            f"{client or 'an engine'} ({format_size(l1_bytes)}), so it will churn; "
            "raise --max-bytes"
        )
        self._notes.append(self._said)
        logger.warning("%s", self._said)
