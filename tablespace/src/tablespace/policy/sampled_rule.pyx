"""Plays a sample of a cache's references against caches of other sizes."""

from tablespace.policy.ranked cimport Ranked
from tablespace.policy.ranked_cache cimport RankedCache
from tablespace.policy.rules cimport Rule
from tablespace.policy.sample cimport Sample


cdef class SampledRule(Rule):
    """A rule whose references are also played, sampled, against small caches.

    Parameters
    ----------
    rule : Rule
        Gives the ranks.
    sample : Sample
        Which keys are played.
    caches : sequence of RankedCache
        Each sees them all, without positions: a sample of keys holds no whole sequences.

    Attributes
    ----------
    references, sampled : int
        Entries stored and used so far, and how many of those were played.
    hits : list of int
        How many were hits, for each cache.
    """

    def __init__(self, Rule rule not None, Sample sample not None, caches):
        cdef RankedCache cache
        self.resolution = rule.resolution
        self.rule = rule
        self.sample = sample
        self.caches = tuple(caches)
        for cache in self.caches:
            if cache is None:
                raise TypeError("None is no cache")
        self.counts = [0] * len(self.caches)

    @property
    def hits(self):
        self.check()
        return list(self.counts)

    cpdef stored(self, Ranked item):
        """Rank an entry that comes in."""
        self.check()
        self.rule.stored(item)
        self.play(item)

    cpdef used(self, Ranked item):
        """Rank an entry that is read."""
        self.check()
        self.rule.used(item)
        self.play(item)

    cpdef left(self, Ranked item):
        """Learn that an entry was evicted."""
        self.check()
        self.rule.left(item)

    cdef int check(self) except -1:
        if self.counts is None:
            raise TypeError("SampledRule.__init__ was not called")
        return 0

    cdef int play(self, Ranked item) except -1:
        cdef Py_ssize_t number
        self.references += 1
        if self.sample.has(item.identity):
            self.sampled += 1
            for number in range(len(self.caches)):
                if (<RankedCache>self.caches[number]).look_up(item.identity, 0):
                    self.counts[number] += 1
        return 0
