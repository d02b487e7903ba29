from cpython.buffer cimport Py_buffer
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t


cdef struct Block:
    Py_buffer view             # the caller's bytes; released with the request
    const uint8_t *key         # borrowed from request.keys
    const uint8_t *metadata    # borrowed from request.metadata, or NULL
    uint32_t key_length
    uint32_t metadata_length
    uint32_t length
    uint32_t raw               # the value's length where it is compressed, else 0
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
