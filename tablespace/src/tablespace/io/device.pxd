from libc.errno cimport EIO
from libc.stdint cimport int64_t, uint32_t, uint64_t

from tablespace._core.aligned_buffer cimport AlignedBuffer

cdef extern from "errno.h":
    int EBADMSG, EILSEQ, ENODATA


cdef inline bint is_medium_error(int64_t code) noexcept nogil:
    """Say whether a transfer's -errno means that the medium, rather than the way to it, failed.

    Besides EIO what the kernel's block layer answers to O_DIRECT: ENODATA for an unreadable
    sector, EILSEQ and EBADMSG for failed protection data.
    """
    return code == -EIO or code == -ENODATA or code == -EILSEQ or code == -EBADMSG


cdef enum IoKind:
    IO_READ = 0
    IO_WRITE = 1

cdef struct Completion:
    uint64_t tag
    int64_t result        # bytes moved, or -errno


cdef class Device:
    cdef readonly str path
    cdef readonly uint64_t size_bytes
    cdef readonly uint32_t alignment_bytes         # of offsets and lengths
    cdef readonly uint32_t memory_alignment_bytes  # of buffer addresses
    cdef readonly bint direct                      # O_DIRECT in force
    cdef readonly bint closed
    cdef readonly bint read_only                   # writes, syncs and new lengths are refused
    cdef readonly object identity                  # equal for two devices of the same file
    cdef uint64_t slack_bytes                      # filler at the end, to be written over
    cdef public uint32_t filler_bytes              # how much of it is laid at a time; 0: none
    cdef int fd                                    # owned by the subclass; -1 where there is none
    # Checked; what the engine calls.
    cdef int64_t read(self, void *buffer, size_t length, uint64_t offset) noexcept nogil
    cdef int64_t write(self, const void *buffer, size_t length, uint64_t offset) noexcept nogil
    cdef int sync(self) noexcept nogil
    cdef void forget(self, uint64_t offset, uint64_t length) noexcept nogil
    cdef int64_t extend(self, const void *buffer, size_t length) noexcept nogil
    cdef uint64_t end(self) noexcept nogil
    cdef int make_room(self, size_t length) noexcept nogil
    cdef void lay_filler(self) noexcept nogil
    cdef int cut(self, uint64_t size_bytes) noexcept nogil
    # Hooks: what a kind of device overrides. They return bytes (or 0), or -errno.
    cdef int64_t do_read(self, void *buffer, size_t length, uint64_t offset) noexcept nogil
    cdef int64_t do_write(self, const void *buffer, size_t length, uint64_t offset) noexcept nogil
    cdef int do_sync(self) noexcept nogil
    cdef void do_forget(self, uint64_t offset, uint64_t length) noexcept nogil
    cdef int do_truncate(self, uint64_t size_bytes) noexcept nogil
    cdef int do_allocate(self, uint64_t size_bytes) noexcept nogil
    cdef int do_reserve(self, uint64_t size_bytes) noexcept nogil
    cdef int64_t do_first_hole(self, uint64_t offset) noexcept nogil
    cdef int do_close(self) noexcept nogil
    cdef int64_t fits(self, size_t length, uint64_t offset) noexcept nogil
    cdef int64_t finish(self, IoKind kind, void *buffer, size_t length, uint64_t offset,
                        int64_t result) noexcept nogil


cdef class IoQueue:
    cdef readonly uint32_t depth
    cdef readonly uint32_t in_flight
    cdef readonly str engine
    cdef public uint64_t timeout_ns   # longest wait in which nothing completes; 0: for ever
    cdef int push(self, Device device, IoKind kind, void *buffer, size_t length, uint64_t offset,
                  uint64_t tag) noexcept nogil
    cdef int submit(self) noexcept nogil
    cdef int reap(self, Completion *out, uint32_t limit, uint32_t wait_for) noexcept nogil
    cdef int do_push(self, Device device, IoKind kind, void *buffer, size_t length,
                     uint64_t offset, uint64_t tag) noexcept nogil
    cdef int do_submit(self) noexcept nogil
    cdef int do_reap(self, Completion *out, uint32_t limit, uint32_t wait_for) noexcept nogil


cdef class IoContext:
    cdef readonly IoQueue queue
    cdef readonly AlignedBuffer staging
