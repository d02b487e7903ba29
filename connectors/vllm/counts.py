"""Counters of one side of the connector, summed and handed to the engine now and then."""

from __future__ import annotations

import threading
from collections import Counter

NAMES = {
    "lookups": "requests looked up",
    "tokens_found": "tokens that a look-up found",
    "blocks_loaded": "blocks loaded",
    "bytes_loaded": "bytes loaded",
    "blocks_failed": "blocks that were to be loaded and could not be",
    "blocks_saved": "blocks saved",
    "bytes_saved": "bytes saved",
    "blocks_present": "blocks that were to be saved and were there",
    "blocks_unsaved": "blocks that were to be saved and were refused or given up",
    "digests_wrong": "blocks whose bytes differed from their digest after a load",
    "load_us": "microseconds spent loading",
    "save_us": "microseconds spent saving",
    "hook_us": "microseconds spent inside the engine's calls",
}


class Counts:
    """Counts by name. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._new: Counter[str] = Counter()
        self.total: Counter[str] = Counter()

    def add(self, name: str, count: int = 1) -> None:
        """Count."""
        if count:
            with self._lock:
                self._new[name] += count
                self.total[name] += count

    def take(self) -> dict[str, int]:
        """Return what was counted since the last call."""
        with self._lock:
            new, self._new = self._new, Counter()
        return dict(new)
