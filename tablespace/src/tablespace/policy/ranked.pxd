from cpython.object cimport PyObject
from libc.stdint cimport int64_t


cdef class Ranked:
    cdef public double rank, fill
    cdef public int64_t used_at, identity, position
    cdef public int reuses
    cdef readonly object queue   # the EvictionQueue it stands in, or None; that one owns it too
    # Of that queue; all borrowed, and meaningless outside one.
    cdef void *bucket
    cdef PyObject *before        # its neighbours in the bucket: came before and after it
    cdef PyObject *after
    cdef double key              # its rank when it came into the bucket, in units of resolution
    cdef Py_ssize_t place        # in the queue's list of what it owns
