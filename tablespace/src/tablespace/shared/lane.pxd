"""The C surface of a lane: what the index scans and the arena's reader writes."""

from libc.stdint cimport uint32_t, uint64_t

cdef enum:
    # A lane's head, as 64-bit words; then the leases; then the ring of touches.
    WORD_HIGH_WATER = 0
    WORD_TOUCHES = 1
    WORD_HITS = 2
    WORD_HIT_BYTES = 3
    HEAD_SIZE = 64
    LEASES_MAX = 4096
    TOUCHES_MAX = 65536


cdef class Lane:
    cdef Py_buffer _view
    cdef bint _held
    cdef uint64_t *_head
    cdef uint64_t *_leases
    cdef uint64_t *_ring
    cdef readonly Py_ssize_t lease_count
    cdef readonly Py_ssize_t touch_count
    # The client's own: free lease words, as a stack.
    cdef uint32_t *_free
    cdef Py_ssize_t _free_count
    cdef readonly bint is_shut
    cdef uint64_t _last_touch
    # The daemon's own: how far it has read.
    cdef uint64_t _drained
    cdef uint64_t _hits_seen
    cdef uint64_t _bytes_seen

    cdef int _require_open(self) except -1
    cdef int drain_into(self, list touches, Py_ssize_t slot_count) except -1
    cdef void mark(self, unsigned char *marks, uint64_t slot_count) noexcept nogil
    cdef Py_ssize_t claim(self, uint64_t slot) noexcept nogil
    cdef void let_go(self, Py_ssize_t place) noexcept nogil
    cdef void push(self, uint64_t slot, uint64_t now_ns) noexcept nogil
    cdef void count(self, uint64_t hits, uint64_t size_bytes) noexcept nogil
