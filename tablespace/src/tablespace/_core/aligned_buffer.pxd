from libc.stddef cimport size_t


cdef class AlignedBuffer:
    cdef readonly size_t size_bytes
    cdef readonly size_t alignment_bytes
    cdef unsigned char *data  # owned: a private mapping, until close or __dealloc__
    cdef size_t mapped_bytes
    cdef int owner_pid        # the mapping does not exist in a forked child
    cdef Py_ssize_t views     # exported buffers still out
    cdef Py_ssize_t shape[1]
    cdef Py_ssize_t strides[1]
    cdef void unmap(self) noexcept
