from libc.stdint cimport int64_t

from tablespace.policy.ghosts cimport GhostTable
from tablespace.policy.ranked cimport Ranked
from tablespace.policy.rules cimport Rule
from tablespace.policy.trial cimport Trial


cdef class ValueRule(Rule):
    cdef readonly double half_life
    cdef GhostTable ghosts
    cdef Trial trial            # None: full credit
    cdef int64_t references
    cdef double now, shortest, longest
    cdef double half_life_s     # 0: the clock runs with references alone
    cdef double seconds
    cdef object clock           # None: the system's
    cdef int check(self, Ranked item) except -1
    cdef int tick(self, Ranked item) except -1
    cdef double read_clock(self) except? -1
    cdef void reuse(self, Ranked item) noexcept
    cdef void place(self, Ranked item) noexcept
