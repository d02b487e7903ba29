from libc.stdint cimport int64_t

from tablespace.policy.ranked cimport Ranked
from tablespace.policy.rules cimport Rule
from tablespace.policy.sample cimport Sample


cdef class SampledRule(Rule):
    cdef readonly Rule rule
    cdef readonly Sample sample
    cdef readonly int64_t references, sampled
    cdef tuple caches
    cdef list counts
    cdef int check(self) except -1
    cdef int play(self, Ranked item) except -1
