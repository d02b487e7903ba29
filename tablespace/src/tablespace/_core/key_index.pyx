# cython: boundscheck=False
# The loops below index C arrays only; Cython's check does not apply to them.
"""key -> (container, slot, length, checksum, seq), with recency and pins, in compact C memory.

An entry is 48 bytes, plus its key rounded up to 8, plus 8 bytes of table at a load of at most
0.8.  Entries never move, so an entry id stays good while it is pinned.

Long because the entries, table, recency and pins are one structure whose invariants cross.
"""

cimport cython
from cpython.bytes cimport (
    PyBytes_AS_STRING,
    PyBytes_Check,
    PyBytes_FromStringAndSize,
    PyBytes_GET_SIZE,
)
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcmp, memcpy, memset

from tablespace._core.checksum cimport hash_key
from tablespace._core.slot_allocator cimport (
    SlotAllocator,
    location_container,
    location_slot,
    pack_location,
)

cdef extern from *:
    """
    #define tablespace_prefetch(address) __builtin_prefetch(address)
    """
    void prefetch "tablespace_prefetch"(const void *address) noexcept nogil

cdef uint32_t NO_ENTRY = 0xFFFFFFFF
cdef uint32_t CHUNK_ENTRIES = 4096
cdef size_t KEY_SLAB_BYTES = 1 << 16
cdef uint64_t FIRST_TABLE_SIZE = 1024
cdef uint64_t PIN_MASK = 0xFFFF

cdef enum:
    LOOKAHEAD = 16   # keys whose cache misses are overlapped


cdef inline uint64_t home_of(uint64_t word, uint64_t table_size) noexcept nogil:
    """Map a word's 32-bit tag onto the table, keeping order (multiply and shift)."""
    return ((word >> 32) * table_size) >> 32


cdef inline size_t key_class(size_t length) noexcept nogil:
    return (length + 7) >> 3


cdef inline size_t name_length(const Entry *entry) noexcept nogil:
    """What an entry's name takes: key, metadata, and a compressed value's length."""
    return (<size_t>entry.key_length + entry.metadata_length
            + (4 if entry.flags & ENTRY_COMPRESSED else 0))


cdef uint32_t raw_length(const Entry *entry) noexcept nogil:
    """Return the length of a compressed entry's value; 0 for one that is stored as it is."""
    cdef uint32_t raw = 0
    if entry.flags & ENTRY_COMPRESSED:
        memcpy(&raw, entry.name + entry.key_length + entry.metadata_length, 4)
    return raw


cdef inline uint32_t value_length(const Entry *entry) noexcept nogil:
    return raw_length(entry) if entry.flags & ENTRY_COMPRESSED else entry.length


def check_key(key):
    """Raise TypeError or ValueError unless `key` is bytes of length 1..255."""
    if not isinstance(key, bytes):
        raise TypeError(f"a key is bytes, not {type(key).__name__}")
    if not 1 <= len(key) <= 255:
        raise ValueError(f"a key has 1..255 bytes, not {len(key)}")


def exact_key(key):
    """Return a key as bytes itself: a subclass may compare and hash as it likes.

    Raises
    ------
    TypeError, ValueError
        For what is no key.
    """
    check_key(key)
    if type(key) is bytes:
        return key
    return PyBytes_FromStringAndSize(PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key))


cdef class KeyIndex:
    """The index of a region.

    Parameters
    ----------
    allocator : SlotAllocator
        Gets an entry's slot back when the entry is gone, its record durable, and nobody pins it.

    Notes
    -----
    Not thread-safe by itself: every method runs under the GIL and never gives it up.
    """

    def __cinit__(self, SlotAllocator allocator not None):
        self.allocator = allocator
        self.suspects = {}
        cdef uint32_t pool
        self.free_entry = NO_ENTRY
        for pool in range(MAX_POOLS):
            self.oldest[pool] = NO_ENTRY
            self.newest[pool] = NO_ENTRY
        self.table_size = FIRST_TABLE_SIZE
        self.table = <uint64_t *>calloc(self.table_size, sizeof(uint64_t))
        if self.table == NULL:
            raise MemoryError()
        memset(self.key_free, 0, sizeof(self.key_free))

    def __dealloc__(self):
        cdef uint32_t at
        for at in range(self.chunk_count):
            free(self.chunks[at])
        for at in range(self.key_slab_count):
            free(self.key_slabs[at])
        free(self.chunks)
        free(self.aside)
        free(self.aside_classes)
        free(self.held)
        free(self.key_slabs)
        free(self.table)

    def __len__(self):
        return self.live_count

    # Memory.

    cdef Entry *entry(self, uint32_t id) noexcept nogil:
        return &self.chunks[id // CHUNK_ENTRIES][id % CHUNK_ENTRIES]

    cdef uint32_t take_entry(self) except? 0xFFFFFFFF:
        cdef Entry *chunk
        cdef Entry **grown
        cdef uint32_t id, at
        if self.free_entry == NO_ENTRY:
            grown = <Entry **>realloc(self.chunks, (self.chunk_count + 1) * sizeof(Entry *))
            if grown == NULL:
                raise MemoryError()
            self.chunks = grown
            chunk = <Entry *>calloc(CHUNK_ENTRIES, sizeof(Entry))
            if chunk == NULL:
                raise MemoryError()
            self.chunks[self.chunk_count] = chunk
            for at in range(CHUNK_ENTRIES):
                id = self.chunk_count * CHUNK_ENTRIES + at
                chunk[at].older = id + 1 if at + 1 < CHUNK_ENTRIES else NO_ENTRY
            self.free_entry = self.chunk_count * CHUNK_ENTRIES
            self.chunk_count += 1
        id = self.free_entry
        self.free_entry = self.entry(id).older
        return id

    cdef uint8_t *take_name(self, size_t length) except NULL:
        cdef size_t kind = key_class(length)
        cdef size_t size_bytes = kind * 8
        cdef uint8_t *out = self.key_free[kind]
        cdef uint8_t **grown
        if out != NULL:
            memcpy(&self.key_free[kind], out, sizeof(uint8_t *))
            return out
        if self.key_slab_count == 0 or self.key_slab_used + size_bytes > KEY_SLAB_BYTES:
            grown = <uint8_t **>realloc(self.key_slabs,
                                        (self.key_slab_count + 1) * sizeof(uint8_t *))
            if grown == NULL:
                raise MemoryError()
            self.key_slabs = grown
            out = <uint8_t *>malloc(KEY_SLAB_BYTES)
            if out == NULL:
                raise MemoryError()
            self.key_slabs[self.key_slab_count] = out
            self.key_slab_count += 1
            self.key_slab_used = 0
        out = self.key_slabs[self.key_slab_count - 1] + self.key_slab_used
        self.key_slab_used += size_bytes
        return out

    cdef void give_back(self, uint32_t id) noexcept:
        """Recycle an entry and its name."""
        cdef Entry *entry = self.entry(id)
        cdef size_t kind = key_class(name_length(entry))
        if self.captures:
            self.set_aside(entry.name, kind)
        else:
            self.free_name(entry.name, kind)
        entry.name = NULL
        entry.flags = 0
        entry.older = self.free_entry
        self.free_entry = id

    cdef void free_name(self, uint8_t *name, size_t kind) noexcept:
        memcpy(name, &self.key_free[kind], sizeof(uint8_t *))
        self.key_free[kind] = name

    cdef void set_aside(self, uint8_t *name, size_t kind) noexcept:
        """Keep a freed name as it is: a capture may still read it.

        Without memory for that, the name is leaked rather than overwritten.
        """
        cdef size_t room = 2 * self.aside_room + 1024
        cdef uint8_t **names
        cdef uint8_t *classes
        if self.aside_count == self.aside_room:
            names = <uint8_t **>realloc(self.aside, room * sizeof(uint8_t *))
            if names == NULL:
                return
            self.aside = names
            classes = <uint8_t *>realloc(self.aside_classes, room)
            if classes == NULL:
                return
            self.aside_classes = classes
            self.aside_room = room
        self.aside[self.aside_count] = name
        self.aside_classes[self.aside_count] = <uint8_t>kind
        self.aside_count += 1

    cdef void end_capture(self) noexcept:
        """The last capture's end frees the names set aside."""
        cdef size_t at
        self.captures -= 1
        if self.captures == 0:
            for at in range(self.aside_count):
                self.free_name(self.aside[at], self.aside_classes[at])
            self.aside_count = 0

    cdef int grow(self) except -1:
        cdef uint64_t size = self.table_size + self.table_size // 2
        cdef uint64_t *table = <uint64_t *>calloc(size, sizeof(uint64_t))
        cdef uint64_t at, place, word
        if table == NULL:
            raise MemoryError()
        for at in range(self.table_size):
            word = self.table[at]
            if word:
                place = home_of(word, size)
                while table[place]:
                    place = place + 1 if place + 1 < size else 0
                table[place] = word
        free(self.table)
        self.table = table
        self.table_size = size
        return 0

    # Table.

    cdef int64_t find(self, const uint8_t *key, size_t length, uint64_t hash) noexcept nogil:
        cdef uint64_t tag = hash >> 32
        cdef uint64_t place = (tag * self.table_size) >> 32
        cdef uint64_t word
        cdef Entry *entry
        while True:
            word = self.table[place]
            if word == 0:
                return -1
            if word >> 32 == tag:
                entry = self.entry(<uint32_t>word - 1)
                if entry.key_length == length and memcmp(entry.name, key, length) == 0:
                    return <int64_t>(<uint32_t>word - 1)
            place = place + 1 if place + 1 < self.table_size else 0

    cdef void table_remove(self, uint32_t id, uint64_t hash) noexcept:
        cdef uint64_t size = self.table_size
        cdef uint64_t hole = ((hash >> 32) * size) >> 32
        cdef uint64_t at, home
        while <uint32_t>self.table[hole] != id + 1:
            hole = hole + 1 if hole + 1 < size else 0
        # Shift back what follows, so that no tombstone is ever needed.
        at = hole
        while True:
            at = at + 1 if at + 1 < size else 0
            if self.table[at] == 0:
                break
            home = home_of(self.table[at], size)
            if (at + size - home) % size >= (at + size - hole) % size:
                self.table[hole] = self.table[at]
                hole = at
        self.table[hole] = 0

    # Recency.

    cdef int pool_of(self, Entry *entry) noexcept nogil:
        """A container keeps its pool while entries lie in it."""
        return self.allocator.pool_of[location_container(entry.location)]

    cdef void unlink(self, Entry *entry) noexcept nogil:
        cdef int pool = self.pool_of(entry)
        if entry.older != NO_ENTRY:
            self.entry(entry.older).newer = entry.newer
        else:
            self.oldest[pool] = entry.newer
        if entry.newer != NO_ENTRY:
            self.entry(entry.newer).older = entry.older
        else:
            self.newest[pool] = entry.older

    cdef void link_newest(self, uint32_t id, Entry *entry) noexcept nogil:
        cdef int pool = self.pool_of(entry)
        entry.older = self.newest[pool]
        entry.newer = NO_ENTRY
        if self.newest[pool] != NO_ENTRY:
            self.entry(self.newest[pool]).newer = id
        else:
            self.oldest[pool] = id
        self.newest[pool] = id

    cdef void touch(self, uint32_t id) noexcept nogil:
        cdef Entry *entry = self.entry(id)
        if entry.newer == NO_ENTRY:
            return
        self.unlink(entry)
        self.link_newest(id, entry)

    cdef void use(self, uint32_t id) noexcept:
        """Note that an entry was of use to somebody."""
        if not self.keeps_order:
            self.touch(id)
        if self.events is not None:
            self.tell(b'u', self.entry(id))

    cdef void tell(self, char what, Entry *entry) noexcept:
        """Queue an event: its letter (i, u, r), 4 bytes of slot size, the key.

        Bytes, since making an object that the garbage collector tracks may run foreign code,
        and the index is being changed here.  Without memory for it the event is lost.
        """
        cdef bytes event = PyBytes_FromStringAndSize(NULL, 5 + entry.key_length)
        cdef char *text = PyBytes_AS_STRING(event)
        cdef uint32_t slot_bytes = <uint32_t>self.allocator.pool_bytes[self.pool_of(entry)]
        text[0] = what
        memcpy(text + 1, &slot_bytes, 4)
        memcpy(text + 5, entry.name, entry.key_length)
        self.events.append(event)

    cdef uint32_t choose_keys(self, uint32_t pool, list keys, uint32_t *out,
                              uint32_t wanted, list passed_over) except? 0xFFFFFFFF:
        """Mark and return up to `wanted` entries of a pool that somebody else named.

        What cannot go (unknown, of another pool, named twice, pinned) is passed over, and told
        with its reason.
        """
        cdef uint32_t got = 0
        cdef int64_t id
        cdef Entry *entry
        for key in keys:
            id = self.lookup(key) if PyBytes_Check(key) else -1
            if id < 0:
                passed_over.append("unknown")
                continue
            entry = self.entry(<uint32_t>id)
            if self.pool_of(entry) != <int>pool:
                passed_over.append("of another slot size")
            elif entry.flags & ENTRY_EVICTING:
                passed_over.append("named twice")
            elif entry.location & PIN_MASK:
                passed_over.append("being read")
            else:
                entry.flags |= ENTRY_EVICTING
                out[got] = <uint32_t>id
                got += 1
                if got == wanted:
                    break
        return got

    cdef uint32_t choose_victims(self, uint32_t pool, uint32_t *out,
                                 uint32_t wanted) noexcept nogil:
        """Mark and return up to `wanted` of a pool's oldest entries that nobody pins."""
        cdef uint32_t got = 0
        cdef uint32_t id = self.oldest[pool]
        cdef Entry *entry
        while got < wanted and id != NO_ENTRY:
            entry = self.entry(id)
            if entry.location & PIN_MASK == 0 and not entry.flags & ENTRY_EVICTING:
                entry.flags |= ENTRY_EVICTING
                out[got] = id
                got += 1
            id = entry.newer
        return got

    cdef uint32_t choose_container(self, uint32_t container, uint32_t *out,
                                   uint32_t limit) noexcept nogil:
        """Mark and return the entries of one container that nobody pins, by looking at all."""
        cdef uint32_t got = 0
        cdef int pool = self.allocator.pool_of[container]
        cdef uint32_t id = self.oldest[pool] if pool >= 0 else NO_ENTRY
        cdef Entry *entry
        while got < limit and id != NO_ENTRY:
            entry = self.entry(id)
            if (location_container(entry.location) == container
                    and entry.location & PIN_MASK == 0 and not entry.flags & ENTRY_EVICTING):
                entry.flags |= ENTRY_EVICTING
                out[got] = id
                got += 1
            id = entry.newer
        return got

    # Life of an entry.

    cdef int64_t insert(self, const uint8_t *key, size_t key_length, const uint8_t *metadata,
                        size_t metadata_length, uint64_t hash, uint64_t location, uint32_t length,
                        uint64_t check, uint64_t seq, uint32_t raw=0) except -1:
        """Publish an entry; an older one of the same key is removed and its slot given back.

        `raw` is the value's length where `length` compressed bytes are stored, else 0.
        """
        cdef uint64_t place, size
        cdef int64_t old
        cdef uint32_t id
        cdef Entry *entry
        cdef uint8_t *name
        if (self.live_count + 1) * 5 > self.table_size * 4:
            self.grow()
        id = self.take_entry()
        entry = self.entry(id)
        try:
            name = self.take_name(key_length + metadata_length + (4 if raw else 0))
        except MemoryError:
            entry.older = self.free_entry
            self.free_entry = id
            raise
        # Nothing below can fail.
        old = self.find(key, key_length, hash)
        if old >= 0:
            self.remove(<uint32_t>old)
        memcpy(name, key, key_length)
        if metadata_length:
            memcpy(name + key_length, metadata, metadata_length)
        if raw:
            memcpy(name + key_length + metadata_length, &raw, 4)
        entry.name = name
        entry.key_length = <uint8_t>key_length
        entry.metadata_length = <uint8_t>metadata_length
        entry.check = check
        entry.seq = seq
        entry.location = location & ~PIN_MASK
        entry.length = length
        entry.flags = ENTRY_LIVE | (ENTRY_COMPRESSED if raw else 0)
        size = self.table_size
        place = ((hash >> 32) * size) >> 32
        while self.table[place]:
            place = place + 1 if place + 1 < size else 0
        self.table[place] = ((hash >> 32) << 32) | (<uint64_t>id + 1)
        self.link_newest(id, entry)
        self.live_count += 1
        self.name_bytes += key_length + metadata_length
        self.stored_bytes += length
        self.live_slot_bytes += self.allocator.slot_bytes_of(location)
        if self.events is not None:
            self.tell(b'i', entry)
        return id

    cdef void remove(self, uint32_t id, bint suspect=False) noexcept:
        """Take a live entry out; its slot is free once nobody pins it.

        The record that frees the slot must be durable, unless the slot is `suspect`: then entry
        and slot stay until `acquit` or `condemn`.
        """
        cdef Entry *entry = self.entry(id)
        if self.events is not None:
            self.tell(b'r', entry)
        self.table_remove(id, hash_key(entry.name, entry.key_length))
        self.unlink(entry)
        self.live_count -= 1
        self.name_bytes -= <size_t>entry.key_length + entry.metadata_length
        self.stored_bytes -= entry.length
        self.live_slot_bytes -= self.allocator.slot_bytes_of(entry.location)
        entry.flags = (ENTRY_RELEASED | (ENTRY_SUSPECT if suspect else 0)
                       | (entry.flags & ENTRY_COMPRESSED))
        if suspect or entry.location & PIN_MASK:
            self.limbo_count += 1
        else:
            self.end(id)

    cdef void end(self, uint32_t id) noexcept:
        """Give an unpinned, removed entry's slot and memory back."""
        cdef uint64_t location = self.entry(id).location
        if self.holding:
            self.hold_slot(location)
        else:
            self.allocator.release(location)
        self.give_back(id)

    cdef void hold_slot(self, uint64_t location) noexcept:
        """Keep a slot in limbo until `let_go`; without memory for that, until the store ends."""
        cdef size_t room = 2 * self.held_room + 1024
        cdef uint64_t *grown
        self.limbo_count += 1
        if self.held_count == self.held_room:
            grown = <uint64_t *>realloc(self.held, room * sizeof(uint64_t))
            if grown == NULL:
                return
            self.held = grown
            self.held_room = room
        self.held[self.held_count] = location
        self.held_count += 1
        self.held_of[self.allocator.pool_of[location_container(location)]] += 1

    def hold(self):
        """Keep every slot that is freed from now on in limbo: its record is not durable."""
        self.holding = True

    def let_go(self):
        """Free the slots held, whose records are durable now; return how many there were."""
        cdef size_t at, count = self.held_count
        for at in range(count):
            self.allocator.release(self.held[at])
        self.limbo_count -= <uint32_t>count
        self.held_count = 0
        memset(self.held_of, 0, sizeof(self.held_of))
        self.holding = False
        return count

    def held_slots(self, uint32_t pool):
        """Return how many slots of a pool `let_go` would free."""
        return self.held_of[pool]

    cdef bint pin(self, uint32_t id) noexcept nogil:
        """Hold an entry's slot; False when the pin counter is at its limit."""
        cdef Entry *entry = self.entry(id)
        if entry.location & PIN_MASK == PIN_MASK:
            return False
        entry.location += 1
        return True

    cdef void unpin(self, uint32_t id) noexcept:
        cdef Entry *entry = self.entry(id)
        entry.location -= 1
        if (entry.flags & ENTRY_RELEASED and entry.location & PIN_MASK == 0
                and not entry.flags & ENTRY_SUSPECT):
            self.limbo_count -= 1
            self.end(id)

    # Python surface.

    cdef int64_t lookup(self, object key) except -2:
        if not PyBytes_Check(key):
            check_key(key)
        cdef const uint8_t *data = <const uint8_t *>PyBytes_AS_STRING(key)
        cdef size_t length = PyBytes_GET_SIZE(key)
        return self.find(data, length, hash_key(data, length))

    cdef tuple describe(self, uint32_t id):
        cdef Entry *entry = self.entry(id)
        metadata = None
        if entry.metadata_length:
            metadata = PyBytes_FromStringAndSize(<char *>entry.name + entry.key_length,
                                                 entry.metadata_length)
        return (location_container(entry.location), location_slot(entry.location), entry.length,
                entry.check, entry.seq, metadata)

    def __contains__(self, key):
        return self.lookup(key) >= 0

    def get(self, key):
        """Return (container, slot, stored length, checksum, seq, metadata) of a key, or None."""
        cdef int64_t id = self.lookup(key)
        return None if id < 0 else self.describe(<uint32_t>id)

    def stored_since(self, uint64_t seq, keys):
        """Say for each key whether it is present by a record after `seq`."""
        cdef int64_t id
        cdef list out = []
        for key in keys:
            id = self.lookup(key)
            out.append(id >= 0 and self.entry(<uint32_t>id).seq > seq)
        return out

    def rows(self, keys):
        """Return the fields of `tablespace.Entry` for each key, or None."""
        cdef int64_t id
        cdef list out = []
        for key in keys:
            id = self.lookup(key)
            out.append(None if id < 0 else self.row(<uint32_t>id))
        return out

    cdef tuple row(self, uint32_t id):
        container, slot, stored, check, seq, metadata = self.describe(id)
        return value_length(self.entry(id)), check, seq, container, slot, metadata, stored

    cdef int lookup_block(self, list keys, Py_ssize_t start, Py_ssize_t count,
                          int64_t *out) except -1:
        """Look up at most LOOKAHEAD keys, their cache misses overlapped."""
        cdef uint64_t hashes[LOOKAHEAD]
        cdef Py_ssize_t at
        cdef object key
        cdef const uint8_t *data
        cdef size_t length
        cdef uint64_t word
        for at in range(count):
            key = keys[start + at]
            if not PyBytes_Check(key):
                check_key(key)
            data = <const uint8_t *>PyBytes_AS_STRING(key)
            hashes[at] = hash_key(data, PyBytes_GET_SIZE(key))
            prefetch(&self.table[((hashes[at] >> 32) * self.table_size) >> 32])
        for at in range(count):
            word = self.table[((hashes[at] >> 32) * self.table_size) >> 32]
            if word >> 32 == hashes[at] >> 32 and word:
                prefetch(self.entry(<uint32_t>word - 1))
        for at in range(count):
            word = self.table[((hashes[at] >> 32) * self.table_size) >> 32]
            if word >> 32 == hashes[at] >> 32 and word:
                prefetch(self.entry(<uint32_t>word - 1).name)
        for at in range(count):
            key = keys[start + at]
            data = <const uint8_t *>PyBytes_AS_STRING(key)
            length = PyBytes_GET_SIZE(key)
            out[at] = self.find(data, length, hashes[at])
        return 0

    def contains_many(self, keys):
        """Return a list of bool, one a key, in one pass."""
        cdef list wanted = keys if type(keys) is list else list(keys)
        cdef Py_ssize_t total = len(wanted), start = 0, count, at
        cdef list out = [False] * total
        cdef int64_t found[LOOKAHEAD]
        while start < total:
            count = min(<Py_ssize_t>LOOKAHEAD, total - start)
            self.lookup_block(wanted, start, count, found)
            for at in range(count):
                if found[at] >= 0:
                    out[start + at] = True
            start += count
        return out

    def match_prefix(self, keys):
        """Return how many leading keys are present."""
        cdef list wanted = keys if type(keys) is list else list(keys)
        cdef Py_ssize_t total = len(wanted), start = 0, count, at
        cdef int64_t found[LOOKAHEAD]
        while start < total:
            count = min(<Py_ssize_t>LOOKAHEAD, total - start)
            self.lookup_block(wanted, start, count, found)
            for at in range(count):
                if found[at] < 0:
                    return start + at
            start += count
        return total

    def touch_many(self, keys):
        """Make keys the most recent, in the order given; return how many are present."""
        cdef list wanted = keys if type(keys) is list else list(keys)
        cdef Py_ssize_t total = len(wanted), start = 0, count, at
        cdef int64_t found[LOOKAHEAD]
        cdef Py_ssize_t present = 0
        while start < total:
            count = min(<Py_ssize_t>LOOKAHEAD, total - start)
            self.lookup_block(wanted, start, count, found)
            for at in range(count):
                if found[at] >= 0:
                    self.use(<uint32_t>found[at])
                    present += 1
            start += count
        return present

    def sized_keys(self):
        """Return (key, slot size) of all live entries, pool by pool, least recently used first."""
        keys, _, _, _, _, _, sizes, _ = self.columns()
        return list(zip(keys, sizes))

    def keys(self):
        """Return all live keys, pool by pool, least recently used first."""
        return self.keys_with_prefix(b"")

    def scan(self, uint32_t first, uint32_t count):
        """Return the live keys among `count` places from `first` on, and the place behind them.

        Places are in no order that means anything.  Taken one after another until the place
        behind is 0, they show every entry that was there all the time.
        """
        cdef list out = []
        cdef uint64_t places = <uint64_t>self.chunk_count * CHUNK_ENTRIES
        cdef uint64_t end = min(<uint64_t>first + count, places)
        cdef uint64_t id
        cdef Entry *entry
        for id in range(first, end):
            entry = self.entry(<uint32_t>id)
            if entry.flags & ENTRY_LIVE:
                out.append(PyBytes_FromStringAndSize(<char *>entry.name, entry.key_length))
        return out, (end if end < places else 0)

    def keys_with_prefix(self, bytes prefix not None):
        """Return all live keys that begin with `prefix`, pool by pool, least recent first."""
        cdef list out = []
        cdef uint32_t id, pool
        cdef Entry *entry
        cdef const uint8_t *start = <const uint8_t *>PyBytes_AS_STRING(prefix)
        cdef size_t length = PyBytes_GET_SIZE(prefix)
        for pool in range(self.allocator.pool_count):
            id = self.oldest[pool]
            while id != NO_ENTRY:
                entry = self.entry(id)
                if entry.key_length >= length and memcmp(entry.name, start, length) == 0:
                    out.append(PyBytes_FromStringAndSize(<char *>entry.name, entry.key_length))
                id = entry.newer
        return out

    def columns(self):
        """Return the live entries as a list of tuples' columns, pool by pool, least recent first.

        Returns
        -------
        tuple of list
            keys, containers, slots, the values' lengths, checksums, sequence numbers, slot
            sizes, stored lengths.
        """
        cdef list keys = [], containers = [], slots = [], lengths = [], checks = [], seqs = []
        cdef list sizes = [], stored = []
        cdef uint32_t id, pool
        cdef Entry *entry
        for pool in range(self.allocator.pool_count):
            id = self.oldest[pool]
            while id != NO_ENTRY:
                entry = self.entry(id)
                keys.append(PyBytes_FromStringAndSize(<char *>entry.name, entry.key_length))
                containers.append(location_container(entry.location))
                slots.append(location_slot(entry.location))
                lengths.append(value_length(entry))
                stored.append(entry.length)
                checks.append(entry.check)
                seqs.append(entry.seq)
                sizes.append(self.allocator.pool_bytes[pool])
                id = entry.newer
        return keys, containers, slots, lengths, checks, seqs, sizes, stored

    def restore(self, key, container, slot, length, check, seq, metadata=None, raw=0):
        """Put one entry back at recovery; `raw` as for a compressed value's record, else 0.

        Returns
        -------
        bool
            False when the slot belongs to another entry (nothing was changed).
        """
        cdef const uint8_t *data = <const uint8_t *>PyBytes_AS_STRING(key)
        cdef const uint8_t *extra = NULL
        cdef size_t key_length = PyBytes_GET_SIZE(key)
        cdef size_t extra_length = 0
        if metadata:
            extra = <const uint8_t *>PyBytes_AS_STRING(metadata)
            extra_length = PyBytes_GET_SIZE(metadata)
        return self.restore_entry(data, key_length, extra, extra_length, container, slot, length,
                                  check, seq, raw)

    cdef bint fits(self, uint32_t container, uint32_t slot, uint64_t length,
                   uint32_t raw=0) noexcept nogil:
        """Say whether a container belongs to a pool that has this slot, large enough.

        No compressed value is longer than the largest slot: that bounds what decompressing makes.
        """
        cdef int pool
        if raw > self.allocator.pool_bytes[self.allocator.pool_count - 1]:
            return False
        if container >= self.allocator.container_count:
            return False
        pool = self.allocator.pool_of[container]
        return (pool >= 0 and slot < self.allocator.pool_slots[pool]
                and length <= self.allocator.pool_bytes[pool])

    cdef bint restore_entry(self, const uint8_t *key, size_t key_length, const uint8_t *metadata,
                            size_t metadata_length, uint32_t container, uint32_t slot,
                            uint32_t length, uint64_t check, uint64_t seq,
                            uint32_t raw=0) except -1:
        if not self.fits(container, slot, length, raw):
            raise ValueError(f"slot {slot} of container {container} is outside the geometry")
        if not self.allocator.mark(container, slot):
            return False
        self.insert(key, key_length, metadata, metadata_length, hash_key(key, key_length),
                    pack_location(container, slot), length, check, seq, raw)
        return True

    cdef int64_t owner_of(self, uint32_t container, uint32_t slot) noexcept:
        """Find the live entry that owns a slot by looking at all of them; -1 when none does."""
        cdef uint64_t wanted = pack_location(container, slot)
        cdef int pool = self.allocator.pool_of[container]
        cdef uint32_t id = self.oldest[pool] if pool >= 0 else NO_ENTRY
        while id != NO_ENTRY:
            if self.entry(id).location & ~PIN_MASK == wanted:
                return id
            id = self.entry(id).newer
        return -1

    def evict_owner(self, uint32_t container, uint32_t slot):
        """Remove the entry that owns a slot; return whether there was one (salvage only)."""
        cdef int64_t id = self.owner_of(container, slot)
        if id < 0:
            return False
        self.remove(<uint32_t>id)
        return True

    def discard(self, key):
        """Remove a key at recovery or once its record is durable; return whether it was there."""
        cdef int64_t id = self.lookup(key)
        if id < 0:
            return False
        self.remove(<uint32_t>id)
        return True

    def drop_corrupt(self, key, seq):
        """Remove a key whose value failed its checksum; its slot waits for a test.

        Returns
        -------
        tuple or None
            (container, slot), or None when the key has been stored anew since (another `seq`).
        """
        cdef int64_t id = self.lookup(key)
        cdef Entry *entry
        if id < 0:
            return None
        entry = self.entry(<uint32_t>id)
        if entry.seq != seq:
            return None
        where = (location_container(entry.location), location_slot(entry.location))
        self.suspects[entry.location & ~PIN_MASK] = id
        self.remove(<uint32_t>id, True)
        return where

    # Suspects: entries that are gone, whose slots are to be tested before they are used again.

    cdef int64_t suspect_at(self, object container, object slot) except -2:
        found = self.suspects.get(pack_location(container, slot))
        return -1 if found is None else found

    @property
    def suspect_count(self):
        """Slots that wait for a test or for the record of its result."""
        return len(self.suspects)

    def confirm_drop(self, container, slot):
        """The record that drops a suspect is durable: its slot may be tested."""
        cdef int64_t id = self.suspect_at(container, slot)
        if id >= 0:
            self.entry(<uint32_t>id).flags |= ENTRY_DROPPED

    def testable_suspects(self, limit):
        """Return (container, slot) of up to `limit` slots that may be written over now.

        The record that dropped each is durable, nobody reads there, and it was not tested yet.
        """
        cdef list out = []
        cdef Entry *entry
        for location, id in list(self.suspects.items()):
            if len(out) >= limit:
                break
            entry = self.entry(<uint32_t>id)
            if (entry.flags & ENTRY_DROPPED and not entry.flags & ENTRY_BAD
                    and entry.location & PIN_MASK == 0):
                out.append((location_container(location), location_slot(location)))
        return out

    def postpone(self, container, slot):
        """Put a suspect behind the others: its test gave no answer."""
        location = pack_location(container, slot)
        id = self.suspects.pop(location, None)
        if id is not None:
            self.suspects[location] = id

    def acquit(self, container, slot):
        """A suspect's slot passed its test: it is free."""
        cdef int64_t id = self.suspect_at(container, slot)
        if id >= 0:
            del self.suspects[pack_location(container, slot)]
            self.limbo_count -= 1
            self.end(<uint32_t>id)

    def convict(self, container, slot):
        """A suspect's slot failed its test; the record of that is to be written."""
        cdef int64_t id = self.suspect_at(container, slot)
        if id >= 0:
            self.entry(<uint32_t>id).flags |= ENTRY_BAD

    def convicted(self):
        """Return (container, slot) of the slots that failed, whose records are not durable."""
        cdef list out = []
        for location, id in list(self.suspects.items()):
            if self.entry(<uint32_t>id).flags & ENTRY_BAD:
                out.append((location_container(location), location_slot(location)))
        return out

    def condemn(self, container, slot):
        """The record of a failed test is durable: the slot is out of use."""
        cdef int64_t id = self.suspect_at(container, slot)
        if id >= 0:
            self.allocator.quarantine(pack_location(container, slot))
            del self.suspects[pack_location(container, slot)]
            self.limbo_count -= 1
            self.give_back(<uint32_t>id)

    def containers_with_bad_slots(self):
        """Return the containers that have slots out of use or waiting for a test, as a set."""
        return {location_container(each)
                for each in (*self.suspects, *self.allocator.quarantined)}

    def memory_bytes(self):
        """Return the bytes of C memory held."""
        return (self.chunk_count * CHUNK_ENTRIES * sizeof(Entry) + self.table_size * 8
                + self.key_slab_count * KEY_SLAB_BYTES)


@cython.no_gc_clear  # __dealloc__ tells the index, which must still be there.
cdef class IndexCapture:
    """The live entries of an index as they are at one moment.

    Taking it copies the entries (48 bytes each) and nothing else: names are not copied, the index
    keeps those that are freed meanwhile as they are.  So it takes some 20 ms for a million
    entries, and the index goes on changing while the capture is read without the GIL.
    """

    def __cinit__(self, KeyIndex index not None):
        cdef uint32_t at, pool
        self.index = index
        self.live_count = index.live_count
        self.pool_count = index.allocator.pool_count
        for pool in range(self.pool_count):
            self.oldest[pool] = index.oldest[pool]
        self.chunks = <Entry **>calloc(max(1, index.chunk_count), sizeof(Entry *))
        if self.chunks == NULL:
            raise MemoryError()
        for at in range(index.chunk_count):
            self.chunks[at] = <Entry *>malloc(CHUNK_ENTRIES * sizeof(Entry))
            if self.chunks[at] == NULL:
                raise MemoryError()
            self.chunk_count += 1
            memcpy(self.chunks[at], index.chunks[at], CHUNK_ENTRIES * sizeof(Entry))
        index.captures += 1
        self.open = True

    def __dealloc__(self):
        self.drop()

    cdef void drop(self) noexcept:
        cdef uint32_t at
        for at in range(self.chunk_count):
            free(self.chunks[at])
        self.chunk_count = 0
        free(self.chunks)
        self.chunks = NULL
        if self.open:
            self.open = False
            self.index.end_capture()

    cdef Entry *entry(self, uint32_t id) noexcept nogil:
        return &self.chunks[id // CHUNK_ENTRIES][id % CHUNK_ENTRIES]

    def __len__(self):
        return self.live_count

    def close(self):
        """Free the copy; nothing may be reading it."""
        self.drop()
