"""What is remembered of entries that left: one word each, in a table of fixed size."""

from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport calloc, free

MAX_REUSES = REUSES_MAX

cdef enum:
    # Per entry of the cache: a reuse some five turnovers of the cache away is still seen.
    PLACES_PER_ENTRY = 8
    # Places a key may lie in; the one used longest ago gives way.
    WAYS = 4
    MIN_PLACES = 64
    TIME_BITS = 42
    REUSE_BITS = 2
    TAG_SHIFT = TIME_BITS + REUSE_BITS

cdef uint64_t TIME_MASK = (<uint64_t>1 << TIME_BITS) - 1
cdef uint64_t REUSE_MASK = (<uint64_t>1 << REUSE_BITS) - 1
cdef uint64_t MIX = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: spreads small integers too.
cdef Py_ssize_t MAX_CAPACITY = <Py_ssize_t>1 << 40


cdef class GhostTable:
    """Last use and number of reuses of entries that left, by a hash of their key.

    Parameters
    ----------
    capacity : int
        Entries the cache holds.

    Raises
    ------
    ValueError
        For a capacity below 0 or above 2^40.

    Notes
    -----
    The memory is fixed: 64 to 128 bytes an entry of the cache, touched as it is used. Two keys
    are mistaken for each other about once in 260,000 looks; that costs a wrong rank and nothing
    else. The multiplier is Knuth's, TAOCP 6.4. Thread rule: under the GIL.
    """

    def __cinit__(self, Py_ssize_t capacity):
        cdef uint64_t places = MIN_PLACES
        if not 0 <= capacity <= MAX_CAPACITY:
            raise ValueError(f"a cache holds 0 to {MAX_CAPACITY} entries, not {capacity}")
        while places < <uint64_t>PLACES_PER_ENTRY * <uint64_t>capacity:
            places *= 2
        self.words = <uint64_t *>calloc(places, sizeof(uint64_t))
        if self.words == NULL:
            raise MemoryError
        self.mask = places - WAYS

    def __dealloc__(self):
        free(self.words)

    def put(self, int64_t identity, int64_t used_at, int reuses):
        """Remember an entry that leaves, last used at reference number `used_at` (not 0)."""
        if not 0 < used_at <= <int64_t>TIME_MASK or reuses < 0:
            raise ValueError(f"used_at {used_at} or reuses {reuses} cannot be remembered")
        self.remember(identity, used_at, reuses)

    def take(self, int64_t identity):
        """Return (used_at, reuses) of an entry that comes back, and forget it; None if unknown."""
        cdef int64_t used_at
        cdef int reuses
        return (used_at, reuses) if self.recall(identity, &used_at, &reuses) else None

    cdef void remember(self, int64_t identity, int64_t used_at, int reuses) noexcept:
        cdef uint64_t mixed = <uint64_t>identity * MIX
        cdef uint64_t *way = self.words + (mixed >> 20 & self.mask)
        cdef uint64_t *chosen = way
        cdef uint64_t oldest = <uint64_t>-1, last
        cdef int number
        for number in range(WAYS):
            last = way[number] & TIME_MASK
            if last < oldest:
                chosen, oldest = way + number, last
        chosen[0] = (mixed << TAG_SHIFT | <uint64_t>min(reuses, REUSES_MAX) << TIME_BITS
                     | <uint64_t>used_at & TIME_MASK)

    cdef bint recall(self, int64_t identity, int64_t *used_at, int *reuses) noexcept:
        cdef uint64_t mixed = <uint64_t>identity * MIX
        cdef uint64_t *way = self.words + (mixed >> 20 & self.mask)
        cdef uint64_t word
        cdef int number
        for number in range(WAYS):
            word = way[number]
            if word and word >> TAG_SHIFT == (mixed << TAG_SHIFT) >> TAG_SHIFT:
                way[number] = 0
                used_at[0] = <int64_t>(word & TIME_MASK)
                reuses[0] = <int>(word >> TIME_BITS & REUSE_MASK)
                return True
        return False
