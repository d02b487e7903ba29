"""The default rule: recency in half-lives that it measures, plus bounded credits.

The worth of an entry halves with every half-life that it is not used, and doubles with every
reuse. Its rank is the binary logarithm of that worth on a clock that runs on for all alike, so
an entry that nobody uses keeps its rank and only the used ones are touched.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from kvd.policy.ghosts import MAX_REUSES, GhostTable
from kvd.policy.ranked import Ranked
from kvd.policy.trial import Trial

LONG_HALF_LIFE_S = 86400.0
"""On the long tier a block unused for a day is worth half, however little traffic there was."""

LEARNING_STEP = 1 / 64
"""A reuse moves the half-life by this share: some fifty reuses on one side double it."""

ONE_USE = 64
"""Uses closer than the half-life by this factor are one: a prefetch, its read, its refresh."""

MAX_SPAN = 16.0
"""The half-life stays within this factor of the capacity, either way."""

MAX_PREFIX_LOSS = 1.0
MAX_EMPTINESS_LOSS = 1.0


class ValueRule:
    """Recency, plus bounded credit for reuse, prefix position and bytes.

    Parameters
    ----------
    capacity : int
        Entries the cache holds: where the half-life starts, and how much is remembered.
    half_life_s, clock
        When given, the clock also runs with time, a half-life in so many seconds.

    Notes
    -----
    The half-life is the median distance, in references, between two uses of one block, tracked
    step by step, also across an eviction (see `GhostTable`). Every operation costs a constant.
    """

    resolution = 64.0

    def __init__(
        self,
        capacity: int,
        *,
        trial: bool = True,
        half_life_s: float | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._ghosts = GhostTable(capacity)
        self._trial = Trial(capacity, _with_full_credit) if trial else None
        self._references = 0
        self._now = 0.0
        self._half_life = float(max(1, capacity))
        self._shortest = max(1.0, self._half_life / MAX_SPAN)
        self._longest = self._half_life * MAX_SPAN
        self._half_life_s = half_life_s
        self._clock = clock or time.monotonic
        self._seconds = self._clock() if half_life_s is not None else 0.0

    @property
    def half_life(self) -> float:
        """Return the references in which an unused entry loses half its worth."""
        return self._half_life

    def stored(self, item: Ranked) -> None:
        """Rank an entry that comes in; one that was here before has its reuses back."""
        self._tick(item)
        remembered = self._ghosts.take(item.identity)
        if remembered is None:
            item.used_at, item.reuses = self._references, 0
        else:
            item.used_at, item.reuses = remembered
            self._reuse(item)
        self._place(item)

    def used(self, item: Ranked) -> None:
        """Rank an entry that is read."""
        self._tick(item)
        self._reuse(item)
        self._place(item)

    def left(self, item: Ranked) -> None:
        """Remember an entry that was evicted."""
        self._ghosts.put(item.identity, item.used_at, item.reuses)

    def _tick(self, item: Ranked) -> None:
        if self._trial is not None:
            self._trial.refer(item)
        self._references += 1
        self._now += 1.0 / self._half_life
        if self._half_life_s is not None:
            seconds = self._clock()
            self._now += max(0.0, seconds - self._seconds) / self._half_life_s
            self._seconds = seconds

    def _reuse(self, item: Ranked) -> None:
        distance = self._references - item.used_at
        if distance * ONE_USE < self._half_life:
            return
        item.used_at = self._references
        if item.reuses < MAX_REUSES:
            item.reuses += 1
        if distance > self._half_life:
            self._half_life = min(self._longest, self._half_life * (1 + LEARNING_STEP))
        else:
            self._half_life = max(self._shortest, self._half_life / (1 + LEARNING_STEP))

    def _place(self, item: Ranked) -> None:
        # Blocks of a prompt come leading ones first, one reference each: twice that turns the
        # order round also between buckets. A block is worth nothing once one before it is gone.
        loss = min(MAX_PREFIX_LOSS, 2.0 * item.position / self._half_life)
        if item.fill < 1.0:
            loss += min(MAX_EMPTINESS_LOSS, -math.log2(max(item.fill, 0.5)))
        reuses = item.reuses if self._trial is None else item.reuses * self._trial.share
        item.rank = self._now + reuses - loss


def _with_full_credit(capacity: int) -> ValueRule:
    return ValueRule(capacity, trial=False)
