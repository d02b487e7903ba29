"""The C surface of the shared index: how the arena's reader looks keys up without the GIL."""

from libc.stdint cimport uint32_t, uint64_t

from tablespace.shared.sequenced_slots cimport SequencedSlots

cdef enum:
    # The fields of a keyed record, behind those of every record, as 64-bit words.
    # Where the value lies in the data memory, above; the key's length, in the lowest 8 bits.
    WORD_PLACE = 5
    KEY_LENGTH_BITS = 8
    KEY_LENGTH_MASK = 255
    WORD_KEY = 6
    KEY_SIZE_MAX = 223
    KEY_WORDS = 28
    # 6 words and 28 of key, in whole cache lines.
    KEYED_SIZE = 320
    # At a load of at most a half, one key in 10^11 lies further from its place. It is not
    # listed then: the daemon still knows it.
    PROBES_MAX = 128


cdef struct Sought:
    # A key as it is compared: padded with zeros to whole words.
    uint64_t space
    uint64_t hash
    uint64_t length
    uint64_t words[KEY_WORDS]


cdef struct Seen:
    # What one look at a readable record found.
    uint64_t slot
    uint64_t version
    uint64_t offset
    uint64_t length
    uint64_t checksum


cdef int seek(Sought *sought, uint64_t space, const char *key, size_t length) noexcept nogil
cdef uint64_t hash_of(uint64_t space, const char *key, size_t length) noexcept nogil


cdef class SlotIndex:
    cdef readonly SequencedSlots slots
    cdef Py_buffer _view
    cdef bint _held
    # Borrowed from `_view`: entries of (upper half of the hash, slot + 1); 0 is empty.
    cdef uint64_t *_table
    cdef uint64_t _mask
    # The writer's own, by slot. Never read back from shared memory.
    cdef uint64_t *_hashes
    # Place + 1, 0 for nowhere: zeros cost no memory where nothing was listed yet.
    cdef uint32_t *_places
    cdef unsigned char *_marks
    cdef readonly Py_ssize_t listed
    cdef readonly Py_ssize_t unlisted

    cdef int _require_writer(self) except -1
    cdef int _require_open(self) except -1
    cdef bint look(self, const Sought *sought, Seen *seen) noexcept nogil
    cdef void prefetch_entry(self, uint64_t hash) noexcept nogil
    cdef void prefetch_record(self, uint64_t hash) noexcept nogil
    cdef void _list(self, Py_ssize_t slot, uint64_t hash) noexcept nogil
    cdef void _unlist(self, Py_ssize_t slot) noexcept nogil
    cdef Py_ssize_t _mark_leased(self, list lanes) except -1
