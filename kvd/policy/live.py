"""Hit ratio against capacity of what a daemon serves now, from a sample of its references."""

from __future__ import annotations

from kvd.policy.ranked import Ranked, Rule
from kvd.policy.ranked_cache import RankedCache
from kvd.policy.rules import make_rule
from kvd.policy.sample import Sample
from kvd.policy.simulation import Row

SAMPLE_ENTRIES = 256
"""Entries of the small cache that stands for the real one: a fraction of a percent of a large
arena's references are played, by microseconds each."""

LEAST_SCALE = 8
"""A reference that is played costs tens of microseconds, so in a small arena, too, few are."""

FACTORS = (0.25, 0.5, 1, 2, 4, 8)


class Sampled:
    """A rule whose references are also played, sampled, against caches of other sizes.

    Parameters
    ----------
    name : str
        The policy.
    capacity : int
        Entries of the real cache.

    Notes
    -----
    A sample of keys holds no whole prompts: what is counted is hits of blocks, leading or not.
    """

    def __init__(self, name: str, capacity: int) -> None:
        self._rule = make_rule(name, capacity)
        self.resolution = self._rule.resolution
        self._name = name
        self._sample = Sample(capacity, max(1, min(SAMPLE_ENTRIES, capacity // LEAST_SCALE)))
        sizes = sorted({max(1, int(factor * self._sample.entries)) for factor in FACTORS})
        self._caches = [RankedCache(size, make_rule(name, size)) for size in sizes]
        self._capacities = [size * self._sample.scale for size in sizes]
        self._hits = [0] * len(sizes)
        self._references = 0
        self._sampled = 0

    def stored(self, item: Ranked) -> None:
        """Rank an entry that comes in."""
        self._rule.stored(item)
        self._play(item)

    def used(self, item: Ranked) -> None:
        """Rank an entry that is read."""
        self._rule.used(item)
        self._play(item)

    def left(self, item: Ranked) -> None:
        """Learn that an entry was evicted."""
        self._rule.left(item)

    def curve(self) -> list[Row]:
        """Return a row for each capacity, counts scaled up from the sample."""
        # A hot key that fell into the sample, or not, skews it: its references are hits at any
        # capacity, so the difference to what was to be expected is taken as such.
        total = self._references
        excess = self._sampled - total / self._sample.scale
        return [
            Row(
                self._name,
                capacity,
                total,
                self._scaled(hits - excess),
                round(self._scaled(hits - excess) / max(1, total), 6),
            )
            for capacity, hits in zip(self._capacities, self._hits, strict=True)
        ]

    def _scaled(self, hits: float) -> int:
        return min(self._references, max(0, round(hits * self._sample.scale)))

    def _play(self, item: Ranked) -> None:
        self._references += 1
        if item.identity not in self._sample:
            return
        self._sampled += 1
        for number, cache in enumerate(self._caches):
            self._hits[number] += cache.refer(item.identity, 0)


def curve_of(rule: Rule) -> list[Row]:
    """Return the rule's curve; nothing for one that is not sampled."""
    return rule.curve() if isinstance(rule, Sampled) else []
