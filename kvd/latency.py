"""The last latencies of one kind, and their percentiles."""

from __future__ import annotations

from collections import deque

from kvd.results import Latency

SAMPLES = 2048


class LatencyRing:
    """Keeps the last `SAMPLES` durations."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=SAMPLES)

    def add(self, seconds: float) -> None:
        """Note one duration."""
        self._samples.append(seconds)

    def join(self, other: LatencyRing) -> None:
        """Take over what another ring keeps, as far as there is room."""
        self._samples.extend(other._samples)

    def summary(self) -> Latency:
        """Return the percentiles of what is kept."""
        ordered = sorted(self._samples)
        if not ordered:
            return Latency(0, 0.0, 0.0)
        return Latency(
            samples=len(ordered),
            p50_us=round(ordered[len(ordered) // 2] * 1e6, 1),
            p99_us=round(ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)] * 1e6, 1),
        )
