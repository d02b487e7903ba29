# cython: cdivision=True
"""Two small caches beside the real one: does credit for reuse pay on this traffic?"""

from tablespace.policy.ranked cimport Ranked
from tablespace.policy.ranked_cache cimport RankedCache
from tablespace.policy.rules cimport LruRule
from tablespace.policy.sample cimport Sample

# Entries of each small cache, at most.
SAMPLE_ENTRIES = 2048
# Half the credit is at stake for so many hits, as a share of the entries.
cdef double SCORE_SHARE = 0.5


cdef class Trial:
    """Plays a sample of the references with the credit and without, and keeps the score.

    Parameters
    ----------
    capacity : int
        Entries of the real cache.
    rule_with_credit : callable
        Makes the rule that gives full credit, for a capacity.
    """

    def __cinit__(self, capacity, rule_with_credit):
        self.sample = Sample(capacity, SAMPLE_ENTRIES)
        entries = self.sample.entries
        self.with_credit = RankedCache(entries, rule_with_credit(entries))
        self.without = RankedCache(entries, LruRule())
        self.bound = max(1.0, entries * SCORE_SHARE)
        self.score = self.bound

    @property
    def share(self):
        """Return how much of the credit to give, 0 to 1."""
        return self.share_now()

    def refer(self, Ranked item not None):
        """Let both see a reference, if its key is in the sample."""
        self.look(item)

    cdef double share_now(self) noexcept:
        return 0.5 + 0.5 * self.score / self.bound

    cdef int look(self, Ranked item) except -1:
        cdef int gain
        if self.sample.has(item.identity):
            # Sampled keys are no sequences any more: without positions.
            gain = self.with_credit.look_up(item.identity, 0)
            gain -= self.without.look_up(item.identity, 0)
            if gain:
                self.score = max(-self.bound, min(self.bound, self.score + gain))
        return 0
