# cython: cdivision=True
"""The value rule: recency in half-lives that it measures, plus bounded credits.

The worth of an entry halves with every half-life that it is not used, and doubles with every
reuse. Its rank is the binary logarithm of that worth on a clock that runs on for all alike, so
an entry that nobody uses keeps its rank and only the used ones are touched.
"""

from libc.math cimport log2
from libc.stdint cimport int64_t

from tablespace.policy.ghosts cimport REUSES_MAX, GhostTable
from tablespace.policy.ranked cimport Ranked
from tablespace.policy.rules cimport Rule
from tablespace.policy.trial cimport Trial

cdef extern from *:
    """
    #include <time.h>
    static inline double monotonic_s(void)
    {
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
    }
    """
    double monotonic_s() noexcept

# Buckets of an eviction queue in a half-life.
cdef double RESOLUTION = 64.0
# A reuse moves the half-life by this share: some fifty reuses on one side double it.
cdef double LEARNING_FACTOR = 1.0 + 1.0 / 64.0
# Uses closer than the half-life by this factor are one: a prefetch, its read, its refresh.
cdef int64_t ONE_USE = 64
# The half-life stays within this factor of the capacity, either way.
cdef double MAX_SPAN = 16.0
cdef double MAX_PREFIX_LOSS = 1.0
cdef double MAX_EMPTINESS_LOSS = 1.0


cdef class ValueRule(Rule):
    """Recency, plus bounded credit for reuse, prefix position and bytes.

    Parameters
    ----------
    capacity : int
        Entries the cache holds: where the half-life starts, and how much is remembered.
    trial : bool
        Whether small caches beside it judge how much credit reuses get; else they get all.
    half_life_s : float, optional
        When given, the clock also runs with time, a half-life in so many seconds.
    clock : callable, optional
        Returns seconds; by default the monotonic clock.

    Attributes
    ----------
    half_life : float
        References in which an unused entry loses half its worth.

    Notes
    -----
    The half-life is the median distance, in references, between two uses of one entry, tracked
    step by step, also across an eviction (see `GhostTable`). Every operation costs a constant.
    """

    def __init__(self, capacity, *, bint trial=True, half_life_s=None, clock=None):
        self.resolution = RESOLUTION
        self.ghosts = GhostTable(capacity)
        self.trial = Trial(capacity, with_full_credit) if trial else None
        self.references = 0
        self.now = 0.0
        self.half_life = max(1, capacity)
        self.shortest = max(1.0, self.half_life / MAX_SPAN)
        self.longest = self.half_life * MAX_SPAN
        self.half_life_s = 0.0 if half_life_s is None else half_life_s
        if half_life_s is not None and not self.half_life_s > 0:
            raise ValueError(f"half_life_s must be above 0 seconds, not {half_life_s}")
        self.clock = clock
        self.seconds = self.read_clock() if self.half_life_s else 0.0

    cpdef stored(self, Ranked item):
        """Rank an entry that comes in; one that was here before has its reuses back."""
        self.tick(item)
        if self.ghosts.recall(item.identity, &item.used_at, &item.reuses):
            self.reuse(item)
        else:
            item.used_at, item.reuses = self.references, 0
        self.place(item)

    cpdef used(self, Ranked item):
        """Rank an entry that is read."""
        self.tick(item)
        self.reuse(item)
        self.place(item)

    cpdef left(self, Ranked item):
        """Remember an entry that was evicted."""
        self.check(item)
        self.ghosts.remember(item.identity, item.used_at, item.reuses)

    cdef int check(self, Ranked item) except -1:
        if item is None:
            raise TypeError("None has no rank")
        if self.ghosts is None:
            raise TypeError("ValueRule.__init__ was not called")
        return 0

    cdef int tick(self, Ranked item) except -1:
        cdef double seconds
        self.check(item)
        if self.trial is not None:
            self.trial.look(item)
        self.references += 1
        self.now += 1.0 / self.half_life
        if self.half_life_s:
            seconds = self.read_clock()
            self.now += max(0.0, seconds - self.seconds) / self.half_life_s
            self.seconds = seconds
        return 0

    cdef double read_clock(self) except? -1:
        return monotonic_s() if self.clock is None else self.clock()

    cdef void reuse(self, Ranked item) noexcept:
        cdef int64_t distance = self.references - item.used_at
        if distance * ONE_USE < self.half_life:
            return
        item.used_at = self.references
        if item.reuses < REUSES_MAX:
            item.reuses += 1
        if distance > self.half_life:
            self.half_life = min(self.longest, self.half_life * LEARNING_FACTOR)
        else:
            self.half_life = max(self.shortest, self.half_life / LEARNING_FACTOR)

    cdef void place(self, Ranked item) noexcept:
        # A sequence comes leading entries first, one reference each: twice that turns the order
        # round also between buckets. An entry is worth nothing once one before it is gone.
        cdef double loss = min(MAX_PREFIX_LOSS, 2.0 * item.position / self.half_life)
        cdef double reuses = item.reuses
        if item.fill < 1.0:
            loss += min(MAX_EMPTINESS_LOSS, -log2(max(item.fill, 0.5)))
        if self.trial is not None:
            reuses *= self.trial.share_now()
        item.rank = self.now + reuses - loss


cdef with_full_credit(capacity):
    """Make the rule that the trial holds against none."""
    return ValueRule(capacity, trial=False)
