from libc.stdint cimport uint8_t, uint32_t, uint64_t


cdef enum RecordKind:
    RECORD_NONE = 0
    RECORD_PUT = 1
    RECORD_EVICT = 2
    RECORD_DELETE = 3
    RECORD_DROP = 4
    RECORD_CLAIM = 5
    RECORD_RELEASE = 6
    RECORD_QUARANTINE = 7
    RECORD_RESTORE = 8


cdef struct Record:
    RecordKind kind
    uint64_t seq
    uint64_t group
    uint32_t container
    uint32_t slot
    uint32_t length
    uint32_t raw          # the value's length where it is compressed, else 0
    uint64_t check
    uint32_t key_length
    uint32_t metadata_length
    uint8_t key[256]
    uint8_t metadata[256]


cdef class LineWriter:
    cdef char *data       # owned, freed in __dealloc__
    cdef size_t used
    cdef size_t capacity
    cdef int room(self, size_t more) noexcept nogil
    cdef char *begin(self, uint64_t seq, uint64_t group, const char *kind, size_t kind_length,
                     const uint8_t *key, size_t key_length, uint32_t container,
                     uint32_t slot) noexcept nogil
    cdef int put_line(self, uint64_t seq, uint64_t group, const uint8_t *key, size_t key_length,
                      uint32_t container, uint32_t slot, uint32_t length, uint64_t check,
                      const uint8_t *metadata, size_t metadata_length,
                      uint32_t raw=*) noexcept nogil
    cdef int pool_line(self, RecordKind kind, uint64_t seq, uint64_t group, uint32_t container,
                       uint32_t slot_bytes) noexcept nogil
    cdef int slot_line(self, RecordKind kind, uint64_t seq, uint64_t group, uint32_t container,
                       uint32_t slot) noexcept nogil
    cdef int free_line(self, RecordKind kind, uint64_t seq, uint64_t group, const uint8_t *key,
                       size_t key_length, uint32_t container, uint32_t slot) noexcept nogil


cdef bint line_is_whole(const char *line, size_t length) noexcept nogil
cdef bint parse_record(const char *line, size_t length, Record *out) noexcept nogil
