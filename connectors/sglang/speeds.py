"""How many pages went and how fast, each way, for SGLang's metrics."""

from __future__ import annotations

import threading
from collections import deque

# What nobody asks for is not kept for ever.
MOST = 1024

# (pages, GB/s)
Speed = tuple[int, float]


class Speeds:
    """Collects transfers until they are taken. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_direction: dict[str, deque[Speed]] = {}

    def add(self, direction: str, pages: int, size_bytes: int, spent_ns: int) -> None:
        """Note one transfer; bytes a nanosecond are GB a second."""
        if pages:
            with self._lock:
                kept = self._by_direction.setdefault(direction, deque(maxlen=MOST))
                kept.append((pages, size_bytes / max(1, spent_ns)))

    def take(self, direction: str) -> list[Speed]:
        """Return the transfers since the last call."""
        with self._lock:
            return list(self._by_direction.pop(direction, ()))
