cimport cython
from libc.stdint cimport uint32_t, uint64_t


cdef class Lending:
    cdef object make
    cdef uint32_t limit
    cdef readonly uint32_t made     # things there are, lent or not
    cdef readonly str closed        # why nothing is lent any more; empty before that
    cdef readonly list buried       # (thing, what it still needs), never lent again
    cdef list idle, waiting, closers
    cdef uint64_t changes           # counts what may let a waiter go on
    cdef cython.pymutex mutex       # never interrupted by signals, held for a few steps only
    cpdef Loan lend(self)
    cdef int wait(self, list queue, uint64_t seen) except -1
    cdef int stir(self) except -1


cdef class Loan:
    cdef Lending owner
    cdef readonly object item
    cdef bint counted               # among the owner's `made`
    cpdef end(self)
    cdef bury(self, held)
