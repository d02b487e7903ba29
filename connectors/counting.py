"""Counters of one side of a connector, summed and handed to the engine now and then."""

from __future__ import annotations

import threading
from collections import Counter


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
