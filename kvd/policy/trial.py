"""Two small caches beside the real one: does credit for reuse pay on this traffic?"""

from __future__ import annotations

from collections.abc import Callable

from kvd.policy.ranked import LruRule, Ranked, Rule
from kvd.policy.ranked_cache import RankedCache
from kvd.policy.sample import Sample

SAMPLE_ENTRIES = 2048
"""Entries of each small cache, at most."""

SCORE_SHARE = 0.5
"""Half the credit is at stake for so many hits, as a share of the entries."""


class Trial:
    """Plays a sample of the references with the credit and without, and keeps the score.

    Parameters
    ----------
    capacity : int
        Entries of the real cache.
    rule_with_credit : callable
        Makes the rule that gives full credit, for a capacity.
    """

    def __init__(self, capacity: int, rule_with_credit: Callable[[int], Rule]) -> None:
        self._sample = Sample(capacity, SAMPLE_ENTRIES)
        entries = self._sample.entries
        self._with = RankedCache(entries, rule_with_credit(entries))
        self._without = RankedCache(entries, LruRule())
        self._bound = max(1.0, entries * SCORE_SHARE)
        self._score = self._bound

    @property
    def share(self) -> float:
        """Return how much of the credit to give, 0 to 1."""
        return 0.5 + 0.5 * self._score / self._bound

    def refer(self, item: Ranked) -> None:
        """Let both see a reference, if its key is in the sample."""
        identity = item.identity
        if identity in self._sample:
            # Sampled keys are no prompts any more: without positions.
            gain = self._with.refer(identity, 0) - self._without.refer(identity, 0)
            if gain:
                self._score = max(-self._bound, min(self._bound, self._score + gain))
