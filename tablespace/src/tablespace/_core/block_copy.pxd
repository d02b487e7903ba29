cdef extern from "block_copy.h" nogil:
    void copy_block(void *to, const void *source, size_t length)
