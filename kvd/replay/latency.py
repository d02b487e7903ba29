"""Collects timed calls and answers percentiles of them, per call and per block."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np


def weighted_percentiles(
    values: Sequence[float], weights: Sequence[int], percents: Sequence[float]
) -> list[float]:
    """Return nearest-rank percentiles of values that each count ``weight`` times.

    Parameters
    ----------
    values : sequence of float
        Samples, in any order.
    weights : sequence of int
        How often each sample counts, at least once each.
    percents : sequence of float
        Which percentiles, from 0 to 100.

    Returns
    -------
    list of float
        One sample per percent: the smallest one that at least that share of the weight does
        not exceed. Not a number where there are no samples.
    """
    if len(values) == 0:
        return [float("nan")] * len(percents)
    samples = np.asarray(values, dtype=np.float64)
    order = np.argsort(samples, kind="stable")
    cumulated = np.cumsum(np.asarray(weights, dtype=np.int64)[order])
    ranks = np.ceil(np.asarray(percents, dtype=np.float64) / 100.0 * cumulated[-1])
    found = np.searchsorted(cumulated, np.maximum(ranks, 1), side="left")
    return [float(samples[order[index]]) for index in found]


class Calls:
    """Timed calls, each over some number of blocks; 16 bytes a call."""

    def __init__(self) -> None:
        self._seconds = array("d")
        self._blocks = array("q")

    def add(self, seconds: float, blocks: int) -> None:
        """Record one call over at least one block."""
        self._seconds.append(seconds)
        self._blocks.append(blocks)

    def __len__(self) -> int:
        return len(self._seconds)

    def per_call_us(self, percents: Sequence[float]) -> list[float]:
        """Return percentiles of the whole calls, in microseconds."""
        found = weighted_percentiles(self._seconds, [1] * len(self._seconds), percents)
        return [second * 1e6 for second in found]

    def per_block_us(self, percents: Sequence[float]) -> list[float]:
        """Return percentiles over the blocks of a call's time divided by its blocks."""
        shares = [s / n for s, n in zip(self._seconds, self._blocks, strict=True)]
        found = weighted_percentiles(shares, self._blocks, percents)
        return [second * 1e6 for second in found]
