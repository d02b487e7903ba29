from libc.stdint cimport int64_t


cdef class Sample:
    cdef readonly int64_t scale, entries
    cdef bint has(self, int64_t identity) noexcept
