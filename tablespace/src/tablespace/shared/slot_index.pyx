"""The shared index: an open-addressing table from key to slot, beside the slots' records.

One writer (the daemon's loop) lists and unlists slots; readers in other processes probe the
table without a lock. A table entry is a hint and proves nothing: a reader compares the
namespace, the whole key and the sequence in the slot's record. So the writer may move entries
while readers probe. What a reader misses by that it asks the daemon for.
"""

from cpython.buffer cimport (
    PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer,
)
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.stdint cimport uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

from tablespace._core.checksum cimport hash_key
from tablespace.shared.atomics cimport (
    ts_fence_acquire, ts_fence_seq_cst, ts_load_acquire, ts_load_relaxed, ts_prefetch,
    ts_store_relaxed, ts_store_release,
)
from tablespace.shared.clocks cimport boot_ns
from tablespace.shared.lane cimport Lane
from tablespace.shared.sequenced_slots cimport (
    WORD_CHECKSUM, WORD_EXPIRES, WORD_LENGTH, WORD_NAMESPACE, WORD_SEQUENCE, SequencedSlots,
)

cdef uint32_t NOWHERE = 0
cdef uint64_t MAX_OFFSET = <uint64_t>1 << 56
cdef uint64_t LOWER_HALF = 0xFFFFFFFF
cdef int ATTEMPTS = 4  # A record rewritten that often while being looked at is a miss.

KEYED_RECORD_BYTES = KEYED_SIZE
MAX_KEY_BYTES = KEY_SIZE_MAX
MAX_PROBES = PROBES_MAX


cdef uint64_t hash_of(uint64_t space, const char *key, size_t length) noexcept nogil:
    """Hash a key together with its namespace's id."""
    cdef uint64_t mixed = (
        hash_key(<const unsigned char *>key, length) ^ (space * <uint64_t>0x9E3779B97F4A7C15))
    # murmur3's own finalizer, so that low bits (the place) and high ones (the tag) depend on
    # all of both.
    mixed ^= mixed >> 33
    mixed *= <uint64_t>0xFF51AFD7ED558CCD
    mixed ^= mixed >> 33
    mixed *= <uint64_t>0xC4CEB9FE1A85EC53
    return mixed ^ (mixed >> 33)


cdef int seek(Sought *sought, uint64_t space, const char *key, size_t length) noexcept nogil:
    """Prepare a key for looking; 0 when it can be no key."""
    cdef size_t words = (length + 7) // 8
    if length < 1 or length > KEY_SIZE_MAX:
        return 0
    sought.space = space
    sought.length = length
    sought.words[words - 1] = 0
    memcpy(sought.words, key, length)
    sought.hash = hash_of(space, key, length)
    return 1


cdef class SlotIndex:
    """A table of hints over records that hold their keys.

    Parameters
    ----------
    slots : SequencedSlots
        The records, of at least `KEYED_RECORD_BYTES` each. Writable for the one writer.
    buffer : contiguous buffer
        Memory of the table, usually the same as the records'. Held until `close`.
    offset : int
        Where the table lies in `buffer`, in bytes; the address must be 8-aligned.
    entries : int
        A power of two, at least twice the slots.

    Attributes
    ----------
    listed, unlisted : int
        For the writer: slots in the table, and how often a slot found no place near enough.

    Notes
    -----
    Thread rule: as of SequencedSlots. A reader's methods are safe from any thread and process.
    """

    def __cinit__(self, SequencedSlots slots not None, buffer, *, Py_ssize_t offset,
                  Py_ssize_t entries):
        self._held = False
        self._table = NULL
        self._hashes = NULL
        self._places = NULL
        self._marks = NULL
        if slots._record_bytes < KEYED_SIZE:
            raise ValueError(
                f"records of {slots._record_bytes} bytes hold no key, {KEYED_SIZE} do")
        if entries < 2 or entries & (entries - 1) or entries > (1 << 31):
            raise ValueError(f"a table has a power of two of entries, not {entries}")
        if entries < 2 * slots._slot_count:
            raise ValueError(
                f"{slots._slot_count} slots need a table of twice as many entries, not {entries}")
        PyObject_GetBuffer(
            buffer, &self._view, PyBUF_WRITABLE if slots._writable else PyBUF_SIMPLE)
        self._held = True
        if offset < 0 or self._view.len < offset or (self._view.len - offset) // 8 < entries:
            raise ValueError(
                f"{entries} entries at offset {offset} do not lie in {self._view.len} bytes")
        if (<uintptr_t>self._view.buf + <uintptr_t>offset) % 8 != 0:
            raise ValueError("the table must begin at an 8-aligned address")
        self.slots = slots
        self._table = <uint64_t *>(<char *>self._view.buf + offset)
        self._mask = entries - 1
        if slots._writable:
            self._hashes = <uint64_t *>calloc(slots._slot_count + 1, sizeof(uint64_t))
            self._places = <uint32_t *>calloc(slots._slot_count + 1, sizeof(uint32_t))
            self._marks = <unsigned char *>calloc(slots._slot_count + 1, 1)
            if self._hashes == NULL or self._places == NULL or self._marks == NULL:
                raise MemoryError

    def __dealloc__(self):
        free(self._hashes)
        free(self._places)
        free(self._marks)
        if self._held:
            PyBuffer_Release(&self._view)

    @staticmethod
    def entries_for(Py_ssize_t slot_count):
        """Return how many entries a table for so many slots has."""
        cdef Py_ssize_t entries = 2
        while entries < 2 * slot_count:
            entries *= 2
        return entries

    cdef int _require_open(self) except -1:
        if self._table == NULL or self.slots._records == NULL:
            raise ValueError("the index is closed")
        return 0

    cdef int _require_writer(self) except -1:
        self._require_open()
        if not self.slots._writable:
            raise ValueError("this index was opened for reading only")
        return 0

    # -- the writer ----------------------------------------------------------------------------

    def publish(self, Py_ssize_t slot, uint64_t namespace_id, bytes key not None,
                uint64_t offset, uint64_t length, uint64_t checksum, uint64_t expires_ns=0):
        """Make a reserved slot readable under its key, list it, and return its new sequence.

        `offset` is where the value begins in the data memory. It belongs to the sequence as
        the key does: a reader has both of one publication, or neither.

        Raises
        ------
        ValueError
            When the slot is not reserved, is listed, the key has not 1 to 223 bytes, or the
            offset is beyond any address space.
        """
        self._require_writer()
        cdef uint64_t *record = self.slots._writable_record(slot)
        cdef Sought sought
        cdef size_t word
        if not ts_load_relaxed(record + WORD_SEQUENCE) & 1:
            raise ValueError(f"slot {slot} is published already")
        if self._places[slot] != NOWHERE:
            raise ValueError(f"slot {slot} is listed already")
        if not seek(&sought, namespace_id, PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key)):
            raise ValueError(f"a key has 1 to {KEY_SIZE_MAX} bytes, this has {len(key)}")
        if offset >= MAX_OFFSET:
            raise ValueError(f"offset {offset} is beyond any address space")
        ts_store_relaxed(record + WORD_PLACE, offset << KEY_LENGTH_BITS | sought.length)
        for word in range((sought.length + 7) // 8):
            ts_store_relaxed(record + WORD_KEY + word, sought.words[word])
        version = self.slots.publish(slot, length, checksum, namespace_id, expires_ns)
        self._list(slot, sought.hash)
        return version

    def remove(self, list slots not None, list lanes not None):
        """Make slots unreadable for good and unlist them.

        Parameters
        ----------
        slots : list of int
            Published ones; those that are not stay as they are.
        lanes : list of Lane
            Every lane that a reader may have.

        Returns
        -------
        list of bool
            Which slots a lane holds: their bytes must stay until `leased` says they are free.
        """
        self._require_writer()
        for slot in slots:
            self.slots.retire(slot)
            self._unlist(slot)
        return self.leased(slots, lanes)

    def withdraw(self, list slots not None):
        """First step of an eviction: make slots unreadable. Return the sequences they had.

        After it, whoever leases finds the odd sequence, or is found by `leased`.
        """
        self._require_writer()
        cdef uint64_t *record
        cdef uint64_t sequence
        cdef list before = []
        for slot in slots:
            record = self.slots._writable_record(slot)
            sequence = ts_load_relaxed(record + WORD_SEQUENCE)
            if sequence & 1:
                raise ValueError(f"slot {slot} is not published")
            before.append(sequence)
        for slot, version in zip(slots, before):
            ts_store_relaxed(self.slots._record(slot) + WORD_SEQUENCE, <uint64_t>version + 1)
        ts_fence_seq_cst()
        return before

    def leased(self, list slots not None, list lanes not None):
        """Return which of `slots` lie in a lane, each lane scanned once."""
        self._require_writer()
        cdef Py_ssize_t slot
        cdef list result = []
        for slot in slots:
            self.slots._record(slot)
        for slot in slots:
            self._marks[slot] = 1
        try:
            # The writes that made these slots unreadable come before every load below.
            ts_fence_seq_cst()
            self._mark_leased(lanes)
            for slot in slots:
                result.append(self._marks[slot] == 2)
        finally:
            for slot in slots:
                self._marks[slot] = 0
        return result

    def restore(self, Py_ssize_t slot, uint64_t version):
        """Last step for a leased slot: give it back the sequence that `withdraw` returned."""
        self._require_writer()
        cdef uint64_t *record = self.slots._writable_record(slot)
        if ts_load_relaxed(record + WORD_SEQUENCE) != version + 1 or version & 1:
            raise ValueError(f"slot {slot} was not withdrawn from version {version}")
        ts_store_release(record + WORD_SEQUENCE, version)

    def unlist(self, Py_ssize_t slot):
        """Last step for a slot that leaves: take it out of the table."""
        self._require_writer()
        self.slots._record(slot)
        self._unlist(slot)

    def evict(self, list slots not None, list lanes not None, Py_ssize_t limit):
        """Let up to `limit` of the published `slots` go that no lane holds; return which.

        The others are readable again, under the sequence they had.
        """
        cdef list versions = self.withdraw(slots)
        cdef list held = self.leased(slots, lanes)
        cdef list gone = []
        for slot, version, leased in zip(slots, versions, held):
            if leased or len(gone) >= limit:
                self.restore(slot, version)
            else:
                self.unlist(slot)
                gone.append(slot)
        return gone

    cdef Py_ssize_t _mark_leased(self, list lanes) except -1:
        cdef Lane lane
        for lane in lanes:
            lane.mark(self._marks, self.slots._slot_count)
        return 0

    cdef void _list(self, Py_ssize_t slot, uint64_t hash) noexcept nogil:
        cdef uint64_t place = hash & self._mask
        cdef int probe
        for probe in range(PROBES_MAX):
            if ts_load_relaxed(self._table + place) == 0:
                self._hashes[slot] = hash
                self._places[slot] = <uint32_t>place + 1
                ts_store_release(
                    self._table + place, (hash & ~LOWER_HALF) | <uint64_t>(slot + 1))
                self.listed += 1
                return
            place = (place + 1) & self._mask
            if probe >= <int>self._mask:
                break
        self.unlisted += 1

    cdef void _unlist(self, Py_ssize_t slot) noexcept nogil:
        """Close the gap: what lies behind moves up, so that no probe ever passes a grave."""
        if self._places[slot] == NOWHERE:
            return
        cdef uint64_t hole = self._places[slot] - 1
        cdef uint64_t place = hole
        cdef uint64_t entry, home
        cdef uint32_t other
        self._places[slot] = NOWHERE
        self.listed -= 1
        while True:
            place = (place + 1) & self._mask
            entry = ts_load_relaxed(self._table + place)
            if entry == 0:
                break
            other = <uint32_t>(entry & LOWER_HALF) - 1
            home = self._hashes[other] & self._mask
            # Not one whose own place lies behind the hole.
            if ((place - home) & self._mask) >= ((place - hole) & self._mask):
                ts_store_release(self._table + hole, entry)
                self._places[other] = <uint32_t>hole + 1
                hole = place
        ts_store_release(self._table + hole, 0)

    # -- readers -------------------------------------------------------------------------------

    cdef void prefetch_entry(self, uint64_t hash) noexcept nogil:
        ts_prefetch(self._table + (hash & self._mask))

    cdef void prefetch_record(self, uint64_t hash) noexcept nogil:
        cdef uint64_t slot = (ts_load_relaxed(self._table + (hash & self._mask)) & LOWER_HALF) - 1
        if slot < <uint64_t>self.slots._slot_count:
            ts_prefetch(self.slots._records + slot * self.slots._record_bytes)

    cdef bint look(self, const Sought *sought, Seen *seen) noexcept nogil:
        """Find the readable slot of a key now; False for a miss."""
        cdef uint64_t place = sought.hash & self._mask
        cdef uint64_t entry, slot
        cdef int probe, attempt, found
        for probe in range(PROBES_MAX):
            entry = ts_load_acquire(self._table + place)
            if entry == 0:
                return False
            slot = (entry & LOWER_HALF) - 1
            if ((entry ^ sought.hash) >> 32) == 0 and slot < <uint64_t>self.slots._slot_count:
                for attempt in range(ATTEMPTS):
                    found = _look_at(
                        <uint64_t *>(self.slots._records + slot * self.slots._record_bytes),
                        sought, seen)
                    if found > 0:
                        seen.slot = slot
                        return True
                    if found == 0:
                        break
            place = (place + 1) & self._mask
        return False

    def find(self, uint64_t namespace_id, bytes key not None):
        """Return (slot, version, length, checksum) of a key's readable slot, or None."""
        self._require_open()
        cdef Sought sought
        cdef Seen seen
        if not seek(&sought, namespace_id, PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key)):
            return None
        if not self.look(&sought, &seen):
            return None
        return seen.slot, seen.version, seen.length, seen.checksum

    def key_of(self, Py_ssize_t slot):
        """Return (namespace_id, key) of a readable slot, or None when it is not or changed."""
        self._require_open()
        cdef uint64_t *record = self.slots._record(slot)
        cdef uint64_t words[KEY_WORDS]
        cdef uint64_t before = ts_load_acquire(record + WORD_SEQUENCE)
        cdef uint64_t space = ts_load_relaxed(record + WORD_NAMESPACE)
        cdef uint64_t length = ts_load_relaxed(record + WORD_PLACE) & KEY_LENGTH_MASK
        cdef int word
        for word in range(KEY_WORDS):
            words[word] = ts_load_relaxed(record + WORD_KEY + word)
        ts_fence_acquire()
        if before & 1 or ts_load_relaxed(record + WORD_SEQUENCE) != before:
            return None
        if length > KEY_SIZE_MAX:
            return None
        return space, (<char *>words)[:length]

    def close(self):
        """Let the table's buffer go; the slots are closed by themselves."""
        if self._held:
            self._table = NULL
            self._held = False
            PyBuffer_Release(&self._view)


cdef int _look_at(const uint64_t *record, const Sought *sought, Seen *seen) noexcept nogil:
    """Compare one record: 1 it is the key's, 0 it is not, -1 it changed meanwhile."""
    cdef uint64_t sequence = ts_load_acquire(record + WORD_SEQUENCE)
    cdef uint64_t expires_ns, place
    cdef size_t word
    if sequence & 1:
        return 0
    if ts_load_relaxed(record + WORD_NAMESPACE) != sought.space:
        return 0
    place = ts_load_relaxed(record + WORD_PLACE)
    if place & KEY_LENGTH_MASK != sought.length:
        return 0
    for word in range((sought.length + 7) // 8):
        if ts_load_relaxed(record + WORD_KEY + word) != sought.words[word]:
            return 0
    seen.length = ts_load_relaxed(record + WORD_LENGTH)
    seen.checksum = ts_load_relaxed(record + WORD_CHECKSUM)
    expires_ns = ts_load_relaxed(record + WORD_EXPIRES)
    ts_fence_acquire()
    if ts_load_relaxed(record + WORD_SEQUENCE) != sequence:
        return -1
    if expires_ns and expires_ns <= boot_ns():
        return 0
    seen.version = sequence
    seen.offset = place >> KEY_LENGTH_BITS
    return 1
