"""Hit ratio against capacity of what a daemon serves now, from a sample of its references."""

from __future__ import annotations

from tablespace.policy import RankedCache, Rule, Sample, SampledRule

from kvd.policy.rules import make_rule
from kvd.policy.simulation import Row

SAMPLE_ENTRIES = 256
"""Entries of the small cache that stands for the real one: a fraction of a percent of a large
arena's references are played."""

LEAST_SCALE = 8
"""A reference that is played is looked up in six caches, so in a small arena, too, few are."""

FACTORS = (0.25, 0.5, 1, 2, 4, 8)


class Sampled(SampledRule):
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
        sample = Sample(capacity, max(1, min(SAMPLE_ENTRIES, capacity // LEAST_SCALE)))
        sizes = sorted({max(1, int(factor * sample.entries)) for factor in FACTORS})
        caches = [RankedCache(size, make_rule(name, size)) for size in sizes]
        super().__init__(make_rule(name, capacity), sample, caches)
        self._name = name
        self._capacities = [size * sample.scale for size in sizes]

    def curve(self) -> list[Row]:
        """Return a row for each capacity, counts scaled up from the sample."""
        # A hot key that fell into the sample, or not, skews it: its references are hits at any
        # capacity, so the difference to what was to be expected is taken as such.
        total = self.references
        excess = self.sampled - total / self.sample.scale
        return [
            Row(
                self._name,
                capacity,
                total,
                self._scaled(hits - excess),
                round(self._scaled(hits - excess) / max(1, total), 6),
            )
            for capacity, hits in zip(self._capacities, self.hits, strict=True)
        ]

    def _scaled(self, hits: float) -> int:
        return min(self.references, max(0, round(hits * self.sample.scale)))


def curve_of(rule: Rule) -> list[Row]:
    """Return the rule's curve; nothing for one that is not sampled."""
    return rule.curve() if isinstance(rule, Sampled) else []
