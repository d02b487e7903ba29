"""Durations counted in buckets, cheap enough for every request."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

# From a hit in memory (tens of microseconds) to a disk at its time limit (seconds).
BOUNDS_S = (
    *(1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3),
    *(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)


class Histogram:
    """Counts durations; the last bucket has no bound. One thread adds, others may look."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += seconds


class RequestTimes:
    """How long requests took, by kind: those answered from memory, and those that waited.

    Parameters
    ----------
    kinds : iterable of type
        The messages that are requests.
    """

    def __init__(self, kinds: Iterable[type]) -> None:
        kinds = tuple(kinds)
        self.from_memory = {kind: Histogram() for kind in kinds}
        self.waited = {kind: Histogram() for kind in kinds}
