from libc.stdint cimport int64_t, uint32_t, uint64_t

from tablespace._core.slot_bitset cimport SlotBitset

# A location word: container index (24 bits) | slot index (24 bits) | pins (16 bits, used by the
# key index alone).
cdef inline uint64_t pack_location(uint32_t container, uint32_t slot) noexcept nogil:
    return (<uint64_t>container << 40) | (<uint64_t>slot << 16)

cdef inline uint32_t location_container(uint64_t location) noexcept nogil:
    return <uint32_t>(location >> 40)

cdef inline uint32_t location_slot(uint64_t location) noexcept nogil:
    return <uint32_t>(location >> 16) & 0xFFFFFF


cdef class SlotAllocator:
    cdef readonly uint32_t container_count
    cdef readonly uint32_t slots_per_container
    cdef readonly uint64_t free_count
    cdef public uint64_t quarantined_count  # set in a bitset, but owned by no entry
    cdef list bitsets          # keeps every SlotBitset alive for `rows`
    cdef void **rows           # borrowed from `bitsets`
    cdef uint32_t next_container
    cdef uint32_t reserve_run(self, uint64_t *out, uint32_t wanted) noexcept
    cdef bint mark(self, uint32_t container, uint32_t slot) noexcept
    cdef bint release(self, uint64_t location) noexcept
