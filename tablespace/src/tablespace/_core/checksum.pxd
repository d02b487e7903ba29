from libc.stdint cimport uint64_t

ctypedef uint64_t (*xxh3_function)(const void *data, size_t length) noexcept nogil

cdef xxh3_function xxh3_64
cdef uint64_t hash_key(const unsigned char *key, size_t length) noexcept nogil
