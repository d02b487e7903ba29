from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from tablespace._core.line_codec cimport LineWriter
from tablespace._core.slot_allocator cimport SlotAllocator
from tablespace.io.device cimport Device, IoContext, IoQueue
from tablespace.io.put_request cimport Block


cdef class CommitGroup:
    cdef readonly uint32_t count
    cdef Block **blocks           # owned array; the blocks belong to the requests
    cdef list requests            # keeps them alive
    cdef void **devices           # borrowed from `device_list`, by container
    cdef list device_list
    cdef uint64_t frame_bytes     # the largest slot: what one block needs of staging
    cdef SlotAllocator allocator
    cdef int commit_all(self, IoContext context, Device journal, LineWriter writer, uint64_t *seq,
                        uint64_t group, int *code, uint32_t *container) noexcept nogil
    cdef int sync_containers(self, uint32_t *container) noexcept nogil
    cdef int encode(self, LineWriter writer, uint64_t *seq, uint64_t group) noexcept nogil
    cdef int write_all(self, IoQueue queue, unsigned char *staging,
                       size_t staging_bytes) noexcept nogil
    cdef void sum_up(self, void **buffers, uint32_t *begin, uint32_t end) noexcept nogil
    cdef uint64_t offset_of(self, Block *block) noexcept nogil
    cdef uint32_t memory_alignment(self, uint32_t container) noexcept nogil
    cdef int push(self, IoQueue queue, uint32_t container, void *buffer, size_t length,
                  uint64_t offset, uint64_t tag) noexcept nogil
    cdef int collect(self, IoQueue queue, uint32_t wait_for, uint32_t *frame_stack,
                     uint32_t *free_frames, int32_t *frame_of, void **buffers) noexcept nogil


cdef int append_durably(Device journal, LineWriter writer, int *code) noexcept nogil
