from libc.stdint cimport int64_t

from tablespace.policy.ranked cimport Ranked


cdef class Rule:
    cdef readonly double resolution
    cpdef stored(self, Ranked item)
    cpdef used(self, Ranked item)
    cpdef left(self, Ranked item)


cdef class LruRule(Rule):
    cdef int64_t references


cdef class FifoRule(Rule):
    cdef int64_t references
