from libc.stdint cimport int64_t, uint64_t

cdef enum:
    REUSES_MAX = 2   # Credited at most; more would keep what is no longer asked for.


cdef class GhostTable:
    cdef uint64_t *words   # owned, freed in __dealloc__
    cdef uint64_t mask
    cdef void remember(self, int64_t identity, int64_t used_at, int reuses) noexcept
    cdef bint recall(self, int64_t identity, int64_t *used_at, int *reuses) noexcept
