from cpython.buffer cimport Py_buffer
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from tablespace._core.line_codec cimport LineWriter
from tablespace._core.slot_allocator cimport SlotAllocator
from tablespace.io.device cimport Device, IoContext, IoQueue


cdef struct Block:
    Py_buffer view             # the caller's bytes; released with the request
    const uint8_t *key         # borrowed from request.keys
    const uint8_t *metadata    # borrowed from request.metadata, or NULL
    uint32_t key_length
    uint32_t metadata_length
    uint32_t length
    uint64_t location
    uint64_t check
    uint64_t seq
    int64_t result             # bytes written, or -errno
    bint placed                # holds a reserved slot until published or abandoned


cdef class PutRequest:
    cdef readonly uint32_t count
    cdef readonly uint32_t limit
    cdef readonly uint64_t slot_bytes
    cdef public object error      # set by the leader when the whole commit failed
    cdef public object wake       # lock the submitting thread waits on
    cdef public bint done
    cdef public bint joins        # may share a commit with others that do
    cdef public bint stuck        # transfers may be in flight for ever: never released
    cdef uint32_t held            # buffers of the caller still held
    cdef Block *blocks            # owned array of `limit`
    cdef list keys, metadata      # keep what the blocks borrow alive
    cdef void let_go(self) noexcept


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
    cdef uint64_t offset_of(self, Block *block) noexcept nogil
    cdef uint32_t memory_alignment(self, uint32_t container) noexcept nogil
    cdef int push(self, IoQueue queue, uint32_t container, void *buffer, size_t length,
                  uint64_t offset, uint64_t tag) noexcept nogil
    cdef int collect(self, IoQueue queue, uint32_t wait_for, uint32_t *frame_stack,
                     uint32_t *free_frames, int32_t *frame_of, void **buffers) noexcept nogil
