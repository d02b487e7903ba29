from libc.stdint cimport int64_t, int8_t, uint32_t, uint64_t

from tablespace._core.slot_bitset cimport SlotBitset

cdef enum:
    MAX_POOLS = 16

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
    cdef readonly uint32_t pool_count
    cdef readonly uint64_t quarantined_count  # set in a bitset, but owned by no entry
    cdef readonly uint32_t unassigned_count
    cdef uint64_t pool_bytes[MAX_POOLS]     # slot size, ascending
    cdef uint32_t pool_slots[MAX_POOLS]     # slots a container of the pool has
    cdef uint64_t pool_free[MAX_POOLS]      # free slots in the pool's containers
    cdef uint32_t pool_containers[MAX_POOLS]
    cdef uint64_t pool_quarantined[MAX_POOLS]
    cdef uint32_t next_container[MAX_POOLS]
    cdef int8_t *pool_of                    # owned: pool of each container, or -1
    cdef set quarantined                    # locations of the slots out of use
    cdef list bitsets                       # keeps every SlotBitset alive for `rows`
    cdef void **rows                        # owned array, entries borrowed from `bitsets`
    cdef readonly list fresh                # (container, old pool, new pool), record not durable
    cdef uint32_t reserve_run(self, uint32_t pool, uint64_t *out,
                              uint32_t wanted) except? 0xFFFFFFFF
    cdef bint mark(self, uint32_t container, uint32_t slot) noexcept
    cdef bint release(self, uint64_t location) noexcept
    cdef int quarantine(self, uint64_t location) except -1
    cdef int restore(self, uint64_t location) except -1
    cdef bint assign(self, uint32_t container, int pool) except -1
    cdef int64_t take_container(self, uint32_t pool) except -2
    cdef uint64_t slot_bytes_of(self, uint64_t location) noexcept nogil
    cdef int pool_for(self, uint64_t length) noexcept nogil
