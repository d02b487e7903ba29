from tablespace.policy.ranked cimport Ranked
from tablespace.policy.ranked_cache cimport RankedCache
from tablespace.policy.sample cimport Sample


cdef class Trial:
    cdef Sample sample
    cdef RankedCache with_credit, without
    cdef double bound, score
    cdef double share_now(self) noexcept
    cdef int look(self, Ranked item) except -1
