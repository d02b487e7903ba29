from cpython.object cimport PyObject

from tablespace.policy.ranked cimport Ranked


cdef struct Bucket:
    double number
    PyObject *oldest   # the first to come; borrowed, as all links: the queue's list owns
    PyObject *newest


cdef class EvictionQueue:
    cdef readonly double resolution
    cdef list owned         # all that stand here, in no order; each knows its place in it
    cdef Bucket **buckets   # owned, as what it points to: freed in __dealloc__
    cdef Py_ssize_t head    # the buckets lie from here, lowest number first,
    cdef Py_ssize_t tail    # to here,
    cdef Py_ssize_t room    # where there is room for so many
    cdef double key_of(self, Ranked item) except? -1
    cdef Py_ssize_t find(self, double number) noexcept
    cdef Bucket *bucket(self, double number) except NULL
    cdef Py_ssize_t open_gap(self, Py_ssize_t at) except -1
    cdef void unlink(self, Ranked item) noexcept
    # Not to be overridden, as links depend on them; the methods of like name do only this.
    cdef int put(self, Ranked item) except -1
    cdef int remove(self, Ranked item) except -1
    cdef int reorder(self, Ranked item) except -1
    cdef Ranked lowest_one(self)
