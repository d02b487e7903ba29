"""Chooses keys by a hash: a small cache that sees a share of the keys behaves as a large one.

Waldspurger et al., "Efficient MRC Construction with SHARDS", FAST 2015.
"""

from libc.stdint cimport int64_t, uint64_t

# An odd constant unlike the ghosts': samples and places are unrelated.
cdef uint64_t MIX = 0xD6E8FEB86659FD93


cdef class Sample:
    """One key in 2^n, such that a cache of `capacity` entries shrinks to at most `entries`.

    Attributes
    ----------
    scale : int
        2^n.
    entries : int
        What a cache of the keys of the sample holds.
    """

    def __cinit__(self, int64_t capacity, int64_t entries):
        if capacity < 1 or entries < 1:
            raise ValueError(f"there is no sample of {capacity} entries in {entries}")
        self.scale = 1
        while self.scale <= (capacity - 1) // entries:
            self.scale *= 2
        self.entries = max(1, capacity // self.scale)

    def __contains__(self, int64_t identity):
        return self.has(identity)

    cdef bint has(self, int64_t identity) noexcept:
        return not (<uint64_t>identity * MIX >> 32 & <uint64_t>(self.scale - 1))
