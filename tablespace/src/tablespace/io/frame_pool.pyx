"""Aligned frames that callers copy small puts into before it is their turn to commit."""

from libc.stdint cimport uint32_t
from libc.stdlib cimport free, malloc

from tablespace._core.aligned_buffer cimport AlignedBuffer


cdef class FramePool:
    """A fixed number of frames on huge pages.

    Parameters
    ----------
    frame_bytes : int
        Size of a frame, a multiple of 4096.
    frames : int

    Notes
    -----
    Called under the GIL.  Who finds no frame does without.
    """

    def __cinit__(self, size_t frame_bytes, uint32_t frames):
        cdef uint32_t at
        self.frame_bytes = frame_bytes
        self.memory = AlignedBuffer(max(1, frames) * frame_bytes)
        self.stack = <unsigned char **>malloc(max(1, frames) * sizeof(unsigned char *))
        if self.stack == NULL:
            raise MemoryError()
        for at in range(frames):
            self.stack[at] = self.memory.data + (frames - 1 - at) * frame_bytes
        self.idle = frames

    def __dealloc__(self):
        free(self.stack)

    cdef unsigned char *take(self) noexcept:
        """Return a frame, or NULL when all are in use."""
        if self.idle == 0:
            return NULL
        self.idle -= 1
        return self.stack[self.idle]

    cdef void give(self, unsigned char *frame) noexcept:
        self.stack[self.idle] = frame
        self.idle += 1
