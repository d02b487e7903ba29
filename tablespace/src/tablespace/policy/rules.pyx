"""What gives ranks, and the two simple rules."""

from libc.stdint cimport int64_t

from tablespace.policy.eviction_queue cimport EvictionQueue
from tablespace.policy.ranked cimport Ranked


cdef class Rule:
    """Gives ranks. One rule serves one cache.

    Parameters
    ----------
    resolution : float
        Differences of rank that matter, per unit; 0: all, and the ranks are in order of time.

    Notes
    -----
    A base class, to be derived from in Cython or in Python: `stored` and `used` set the rank and
    what else the rule keeps in an entry, `left` learns that one was evicted. Thread rule: under
    the GIL, one call at a time.
    """

    def __cinit__(self, *args, **options):
        self.resolution = 0.0

    def __init__(self, double resolution=0.0):
        self.resolution = resolution

    cpdef stored(self, Ranked item):
        """Rank an entry that comes in."""
        raise NotImplementedError(f"{type(self).__name__}.stored")

    cpdef used(self, Ranked item):
        """Rank an entry that is read."""
        raise NotImplementedError(f"{type(self).__name__}.used")

    cpdef left(self, Ranked item):
        """Learn that an entry was evicted; by default remember nothing."""

    def touch(self, Ranked item not None):
        """Rank an entry that is read, and move it in the queue where it stands."""
        touch(self, item)

    def touch_many(self, items):
        """Rank entries that are read, in this order, and move each where it stands."""
        cdef Ranked item
        for item in items:
            if item is None:
                raise TypeError("None has no rank")
            touch(self, item)


cdef int touch(Rule rule, Ranked item) except -1:
    cdef EvictionQueue queue
    rule.used(item)
    if item.queue is not None:
        queue = item.queue
        queue.reorder(item)
    return 0


cdef class LruRule(Rule):
    """Least recently used first."""

    def __init__(self):
        pass

    cpdef stored(self, Ranked item):
        """Rank an entry behind all others."""
        self.references = rank_last(item, self.references)

    cpdef used(self, Ranked item):
        """Rank an entry behind all others."""
        self.references = rank_last(item, self.references)


cdef class FifoRule(Rule):
    """First stored first."""

    def __init__(self):
        pass

    cpdef stored(self, Ranked item):
        """Rank an entry behind all others."""
        self.references = rank_last(item, self.references)

    cpdef used(self, Ranked item):
        """Change nothing."""


cdef int64_t rank_last(Ranked item, int64_t references) except -1:
    if item is None:
        raise TypeError("None has no rank")
    item.used_at = references + 1
    item.rank = <double>item.used_at
    return item.used_at
