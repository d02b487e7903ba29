from libc.stdint cimport int64_t, uint32_t, uint64_t


cdef class SlotBitset:
    cdef readonly uint32_t slot_count
    cdef readonly uint32_t used
    cdef uint64_t *words   # owned, freed in __dealloc__
    cdef uint32_t word_count
    cdef uint32_t hint     # no word below this one has a free slot
    cdef int64_t reserve(self) noexcept nogil
    cdef bint test(self, uint32_t slot) noexcept nogil
    cdef bint mark(self, uint32_t slot) noexcept nogil
    cdef bint free(self, uint32_t slot) noexcept nogil

