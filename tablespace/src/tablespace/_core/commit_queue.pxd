cimport cython
from libc.stdint cimport uint32_t

cdef extern from "semaphore.h" nogil:
    ctypedef struct sem_t:
        pass


cdef class Request:
    cdef public uint32_t count    # blocks
    cdef public bint joins        # may share a batch with others that do
    cdef public bint done
    cdef public object error      # set by the leader when the whole batch failed
    cdef bint queued              # linked in the queue, not in a batch yet
    cdef bint orphaned            # its caller was interrupted while the leader works on it
    cdef void *next               # borrowed; the caller's `run` keeps what is queued alive
    cdef void *after             # borrowed; whom to wake next of those served together
    cdef sem_t woken
    cdef void prepare(self) noexcept nogil
    cdef void let_go(self) noexcept
    cdef void wake_next(self) noexcept nogil


cdef class CommitQueue:
    cdef object commit
    cdef uint32_t limit
    cdef bint led
    cdef void *head
    cdef void *tail
    cdef uint32_t blocks         # queued
    cdef uint32_t present        # in the last batch and behind it: as many may come again
    cdef bint lingering
    cdef uint32_t vain, rest     # waits that brought nothing; batches to go without one
    cdef sem_t arrived
    cdef cython.pymutex mutex    # held for a few steps in C only
    cdef int desert(self, Request request) except -1
    cdef void appoint(self) noexcept nogil
    cdef void linger(self) noexcept nogil
    cdef int lead(self, Request own) except -1
    cdef list take(self)
