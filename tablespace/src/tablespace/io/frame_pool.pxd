from libc.stddef cimport size_t
from libc.stdint cimport uint32_t

from tablespace._core.aligned_buffer cimport AlignedBuffer


cdef class FramePool:
    cdef AlignedBuffer memory
    cdef readonly size_t frame_bytes
    cdef readonly uint32_t idle       # frames in the stack
    cdef unsigned char **stack        # owned array of borrowed addresses within `memory`
    cdef unsigned char *take(self) noexcept
    cdef void give(self, unsigned char *frame) noexcept
