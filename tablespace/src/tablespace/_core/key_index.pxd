from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from tablespace._core.slot_allocator cimport MAX_POOLS, SlotAllocator

cdef enum:
    ENTRY_LIVE = 1        # in the table and in the recency list
    ENTRY_RELEASED = 2    # gone, its record durable: the slot is free once nobody pins it
    ENTRY_SUSPECT = 8     # its bytes failed their checksum: the slot waits for a test
    ENTRY_DROPPED = 16    # the record that drops the suspect is durable
    ENTRY_BAD = 32        # its slot failed the test; the record of that is not durable
    ENTRY_COMPRESSED = 64 # 4 bytes behind its name are the value's length; `length` is stored
    ENTRY_EVICTING = 4    # chosen as a victim; still readable until the record is durable

cdef struct Entry:
    uint64_t check        # XXH3-64 of the stored bytes
    uint64_t seq          # sequence number of the record that stored it
    uint64_t location     # container | slot | pins, see slot_allocator.pxd
    uint8_t *name         # key bytes, then metadata bytes; owned, in the index's key arena
    uint32_t length       # of the stored bytes
    uint32_t older        # recency list; for a free entry: the next free one
    uint32_t newer
    uint8_t key_length
    uint8_t metadata_length
    uint8_t flags
    uint8_t reserved

cdef uint32_t NO_ENTRY
cdef uint32_t raw_length(const Entry *entry) noexcept nogil


cdef class KeyIndex:
    cdef readonly uint32_t live_count
    cdef readonly uint32_t limbo_count     # gone from the table, still pinned, held or suspect
    cdef dict suspects             # location -> id of the entry that lay there and failed
    cdef readonly uint64_t name_bytes      # of the keys and metadata of live entries
    cdef readonly uint64_t stored_bytes    # of the live values, as they lie in their slots
    cdef readonly uint64_t live_slot_bytes # what those slots have
    cdef readonly SlotAllocator allocator
    cdef Entry **chunks            # owned: chunks of CHUNK_ENTRIES entries, never moved
    cdef uint32_t chunk_count
    cdef uint32_t free_entry       # head of the list of unused entries
    cdef uint64_t *table           # owned: tag (32 bits) | entry id + 1; 0 is empty
    cdef uint64_t table_size
    cdef uint32_t oldest[MAX_POOLS]   # recency lists, one a pool
    cdef uint32_t newest[MAX_POOLS]
    cdef uint8_t **key_slabs       # owned memory of the key arena
    cdef uint32_t key_slab_count
    cdef size_t key_slab_used
    cdef uint8_t *key_free[66]     # free lists by size class of 8 bytes; the link is in the chunk
    cdef uint32_t captures         # while there are any, freed names are only set aside
    cdef uint8_t **aside           # owned array of names set aside, with their size classes
    cdef uint8_t *aside_classes
    cdef size_t aside_count, aside_room
    cdef bint holding              # freed slots are held: what freed them is not durable yet
    cdef uint64_t *held            # owned array of their locations
    cdef size_t held_count, held_room
    cdef uint32_t held_of[MAX_POOLS]
    cdef public bint keeps_order   # uses do not move entries: the order is that of the puts
    cdef public object events      # None, or a deque of what happened, see `tell`

    cdef Entry *entry(self, uint32_t id) noexcept nogil
    cdef uint32_t take_entry(self) except? 0xFFFFFFFF
    cdef uint8_t *take_name(self, size_t length) except NULL
    cdef void give_back(self, uint32_t id) noexcept
    cdef void end(self, uint32_t id) noexcept
    cdef void hold_slot(self, uint64_t location) noexcept
    cdef void free_name(self, uint8_t *name, size_t kind) noexcept
    cdef void set_aside(self, uint8_t *name, size_t kind) noexcept
    cdef void end_capture(self) noexcept
    cdef int grow(self) except -1
    cdef void table_remove(self, uint32_t id, uint64_t hash) noexcept
    cdef void unlink(self, Entry *entry) noexcept nogil
    cdef void link_newest(self, uint32_t id, Entry *entry) noexcept nogil
    cdef int64_t lookup(self, object key) except -2
    cdef tuple describe(self, uint32_t id)
    cdef tuple row(self, uint32_t id)
    cdef int lookup_block(self, list keys, Py_ssize_t start, Py_ssize_t count,
                          int64_t *out) except -1
    cdef int64_t owner_of(self, uint32_t container, uint32_t slot) noexcept
    cdef int64_t find(self, const uint8_t *key, size_t length, uint64_t hash) noexcept nogil
    cdef int64_t insert(self, const uint8_t *key, size_t key_length, const uint8_t *metadata,
                        size_t metadata_length, uint64_t hash, uint64_t location, uint32_t length,
                        uint64_t check, uint64_t seq, uint32_t raw=*) except -1
    cdef void remove(self, uint32_t id, bint suspect=*) noexcept
    cdef int64_t suspect_at(self, object container, object slot) except -2
    cdef bint fits(self, uint32_t container, uint32_t slot, uint64_t length,
                   uint32_t raw=*) noexcept nogil
    cdef bint restore_entry(self, const uint8_t *key, size_t key_length, const uint8_t *metadata,
                            size_t metadata_length, uint32_t container, uint32_t slot,
                            uint32_t length, uint64_t check, uint64_t seq,
                            uint32_t raw=*) except -1
    cdef void touch(self, uint32_t id) noexcept nogil
    cdef void use(self, uint32_t id) noexcept
    cdef void tell(self, char what, Entry *entry) noexcept
    cdef bint pin(self, uint32_t id) noexcept nogil
    cdef void unpin(self, uint32_t id) noexcept
    cdef int pool_of(self, Entry *entry) noexcept nogil
    cdef uint32_t choose_victims(self, uint32_t pool, uint32_t *out,
                                 uint32_t wanted) noexcept nogil
    cdef uint32_t choose_keys(self, uint32_t pool, list keys, uint32_t *out,
                              uint32_t wanted, list passed_over) except? 0xFFFFFFFF
    cdef uint32_t choose_container(self, uint32_t container, uint32_t *out,
                                   uint32_t limit) noexcept nogil


cdef class IndexCapture:
    cdef readonly uint32_t live_count
    cdef readonly uint32_t pool_count
    cdef KeyIndex index            # keeps the names' memory alive
    cdef Entry **chunks            # owned copies of the index's chunks
    cdef uint32_t chunk_count
    cdef uint32_t oldest[MAX_POOLS]
    cdef bint open
    cdef void drop(self) noexcept
    cdef Entry *entry(self, uint32_t id) noexcept nogil
