from cpython.buffer cimport Py_buffer
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from tablespace._core.commit_queue cimport Request
from tablespace.io.frame_pool cimport FramePool


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
    unsigned char *frame       # of request.frames: the value's copy, padded; or NULL
    bint summed                # `check` is that of the bytes in `frame`


cdef class PutRequest(Request):
    cdef readonly uint32_t limit
    cdef readonly uint64_t slot_bytes
    cdef public bint deferred     # acknowledged before any sync, if all of its commit are
    cdef public bint stuck        # transfers may be in flight for ever: never released
    cdef uint32_t held            # buffers of the caller still held
    cdef Block *blocks            # owned array of `limit`
    cdef FramePool frames         # where the blocks' frames go back to
    cdef list keys, metadata      # keep what the blocks borrow alive

    cdef int append(self, key, value, metadata) except -1
