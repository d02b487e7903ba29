from libc.stdint cimport int64_t

from tablespace.policy.eviction_queue cimport EvictionQueue
from tablespace.policy.rules cimport Rule


cdef class RankedCache:
    cdef readonly Py_ssize_t capacity
    cdef Rule rule
    cdef EvictionQueue queue
    cdef dict entries   # from identity
    cdef bint look_up(self, int64_t identity, int64_t position) except -1
