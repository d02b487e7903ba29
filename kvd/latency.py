"""The last latencies of one kind, and their percentiles."""

from __future__ import annotations

from collections import deque

from kvd.durations import Histogram
from kvd.results import Latency

SAMPLES = 2048


class LatencyRing:
    """Keeps the last `SAMPLES` durations, and counts all of them in `histogram`."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=SAMPLES)
        self.histogram = Histogram()

    def add(self, seconds: float) -> None:
        """Note one duration."""
        self._samples.append(seconds)
        self.histogram.add(seconds)

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
