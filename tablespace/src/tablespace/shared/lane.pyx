"""A lane: what one session says to the daemon in shared memory, without a word on the wire.

Leases (slots whose bytes must stay), a ring of touches (slots that were used, and when), and
two counters. Only the session's process writes. The daemon trusts none of it: it knows the
lane's size itself, checks every slot it reads against its own count, and reads a bounded
number of words.
"""

from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free, malloc

from tablespace.shared.atomics cimport (
    ts_load_acquire, ts_load_relaxed, ts_store_relaxed, ts_store_release,
)
from tablespace.shared.clocks cimport coarse_ns

MAX_LEASES = LEASES_MAX
MAX_TOUCHES = TOUCHES_MAX
# No process copies so much between two looks: beyond it a counter is nonsense.
cdef uint64_t MAX_STEP = <uint64_t>1 << 50
cdef uint64_t TOUCH_CLOCK_NS = 1_000_000
cdef uint64_t LOWER_HALF = 0xFFFFFFFF


cdef class Lane:
    """One session's lane over a buffer that the daemon maps too.

    Parameters
    ----------
    buffer : writable contiguous buffer
        Zeros at first. Held until `close`.
    leases : int
        How many leases it holds, 1 to `MAX_LEASES`.
    touches : int
        How many touches the ring holds: a power of two, at most `MAX_TOUCHES`.

    Notes
    -----
    Thread rule: methods hold the GIL; any thread of the one process whose lane it is, and any
    of the daemon's, each over a mapping and an object of its own.
    """

    def __cinit__(self, buffer, *, Py_ssize_t leases, Py_ssize_t touches):
        cdef Py_ssize_t place
        self._held = False
        self._head = NULL
        self._free = NULL
        if not 1 <= leases <= LEASES_MAX:
            raise ValueError(f"a lane holds 1 to {LEASES_MAX} leases, not {leases}")
        if not 1 <= touches <= TOUCHES_MAX or touches & (touches - 1):
            raise ValueError(
                f"a lane's ring holds a power of two of touches up to {TOUCHES_MAX}, "
                f"not {touches}")
        PyObject_GetBuffer(buffer, &self._view, PyBUF_WRITABLE)
        self._held = True
        if self._view.len < Lane.bytes_for(leases, touches):
            raise ValueError(
                f"a lane of {leases} leases and {touches} touches needs "
                f"{Lane.bytes_for(leases, touches)} bytes, the buffer has {self._view.len}")
        if <uintptr_t>self._view.buf % 8 != 0:
            raise ValueError("a lane must begin at an 8-aligned address")
        self._free = <uint32_t *>malloc(leases * sizeof(uint32_t))
        if self._free == NULL:
            raise MemoryError
        for place in range(leases):
            # The lowest on top: the daemon scans up to the highest ever used.
            self._free[place] = <uint32_t>(leases - 1 - place)
        self._free_count = leases
        self.lease_count = leases
        self.touch_count = touches
        self._head = <uint64_t *>self._view.buf
        self._leases = self._head + HEAD_SIZE // 8
        self._ring = self._leases + leases
        self._last_touch = 0
        self.is_shut = False

    def __dealloc__(self):
        free(self._free)
        if self._held:
            PyBuffer_Release(&self._view)

    @staticmethod
    def bytes_for(Py_ssize_t leases, Py_ssize_t touches):
        """Return the bytes of a lane."""
        return HEAD_SIZE + 8 * (leases + touches)

    cdef int _require_open(self) except -1:
        if self._head == NULL:
            raise ValueError("the lane is closed")
        return 0

    # -- the session's side --------------------------------------------------------------------

    @property
    def held(self):
        """Return how many leases this object gave out and did not take back."""
        return self.lease_count - self._free_count

    @property
    def is_full(self):
        """Return whether there is no lease left to give."""
        return self._free_count == 0

    def shut_if_idle(self):
        """Refuse every further lease if there are none now; return whether that is so."""
        if self._free_count == self.lease_count:
            self.is_shut = True
        return bool(self.is_shut)

    def take(self, Py_ssize_t slot):
        """Write a slot into a free lease and return its place, or -1 when there is none.

        First step of a lease: the sequence must be read again behind a full fence before the
        lease counts.
        """
        self._require_open()
        return self.claim(slot)

    def give_back(self, Py_ssize_t place):
        """End a lease."""
        self._require_open()
        if not 0 <= place < self.lease_count or ts_load_relaxed(self._leases + place) == 0:
            raise IndexError(f"there is no lease {place}")
        self.let_go(place)

    def touch(self, Py_ssize_t slot):
        """Note that a slot was used now."""
        self._require_open()
        self.push(slot, coarse_ns())

    cdef Py_ssize_t claim(self, uint64_t slot) noexcept nogil:
        cdef Py_ssize_t place
        if self._free_count == 0 or self.is_shut:
            return -1
        self._free_count -= 1
        place = self._free[self._free_count]
        ts_store_relaxed(self._leases + place, slot + 1)
        if ts_load_relaxed(self._head + WORD_HIGH_WATER) < <uint64_t>(place + 1):
            ts_store_relaxed(self._head + WORD_HIGH_WATER, place + 1)
        return place

    cdef void let_go(self, Py_ssize_t place) noexcept nogil:
        # Release: whatever was read under the lease was read before.
        ts_store_release(self._leases + place, 0)
        self._free[self._free_count] = <uint32_t>place
        self._free_count += 1

    cdef void push(self, uint64_t slot, uint64_t now_ns) noexcept nogil:
        cdef uint64_t word = ((now_ns // TOUCH_CLOCK_NS) << 32) | (slot & LOWER_HALF)
        cdef uint64_t at
        if word == self._last_touch:
            return
        self._last_touch = word
        at = ts_load_relaxed(self._head + WORD_TOUCHES)
        ts_store_relaxed(self._ring + (at & <uint64_t>(self.touch_count - 1)), word)
        ts_store_release(self._head + WORD_TOUCHES, at + 1)

    cdef void count(self, uint64_t hits, uint64_t size_bytes) noexcept nogil:
        ts_store_relaxed(
            self._head + WORD_HITS, ts_load_relaxed(self._head + WORD_HITS) + hits)
        ts_store_relaxed(
            self._head + WORD_HIT_BYTES,
            ts_load_relaxed(self._head + WORD_HIT_BYTES) + size_bytes)

    # -- the daemon's side ---------------------------------------------------------------------

    cdef void mark(self, unsigned char *marks, uint64_t slot_count) noexcept nogil:
        """Turn the marks of leased slots from 1 to 2."""
        cdef uint64_t high, place, slot
        if self._head == NULL:
            return
        high = ts_load_relaxed(self._head + WORD_HIGH_WATER)
        if high > <uint64_t>self.lease_count:
            high = self.lease_count
        for place in range(high):
            # Acquire: what the holder of an ended lease read, it has read.
            slot = ts_load_acquire(self._leases + place) - 1
            if slot < slot_count and marks[slot]:
                marks[slot] = 2

    def leases(self, Py_ssize_t slot_count):
        """Return the slots under lease now, each once."""
        self._require_open()
        cdef uint64_t high = ts_load_relaxed(self._head + WORD_HIGH_WATER)
        cdef uint64_t place, slot
        cdef set found = set()
        for place in range(min(high, <uint64_t>self.lease_count)):
            slot = ts_load_acquire(self._leases + place) - 1
            if slot < <uint64_t>slot_count:
                found.add(slot)
        return found

    def drain(self, Py_ssize_t slot_count):
        """Return the touches since the last call as (milliseconds << 32 | slot), oldest first.

        At most as many as the ring holds: older ones were overwritten, which only costs
        recency. Slots that do not exist are left out.
        """
        self._require_open()
        cdef list touches = []
        self.drain_into(touches, slot_count)
        return touches

    cdef int drain_into(self, list touches, Py_ssize_t slot_count) except -1:
        cdef uint64_t head = ts_load_acquire(self._head + WORD_TOUCHES)
        cdef uint64_t at, word
        if head - self._drained > <uint64_t>self.touch_count:
            # Also when a hostile head went back.
            self._drained = head - <uint64_t>self.touch_count
            if self._drained > head:
                self._drained = 0
        at = self._drained
        while at != head:
            word = ts_load_relaxed(self._ring + (at & <uint64_t>(self.touch_count - 1)))
            if (word & LOWER_HALF) < <uint64_t>slot_count:
                touches.append(word)
            at += 1
        self._drained = head
        return 0

    def take_counts(self):
        """Return (hits, bytes) counted since the last call; (0, 0) for nonsense."""
        self._require_open()
        cdef uint64_t hits = ts_load_relaxed(self._head + WORD_HITS)
        cdef uint64_t size_bytes = ts_load_relaxed(self._head + WORD_HIT_BYTES)
        cdef uint64_t more_hits = hits - self._hits_seen
        cdef uint64_t more_bytes = size_bytes - self._bytes_seen
        self._hits_seen = hits
        self._bytes_seen = size_bytes
        if more_hits > MAX_STEP or more_bytes > MAX_STEP:
            return 0, 0
        return more_hits, more_bytes

    def close(self):
        """Let the buffer go; whoever is asked later finds no lease here."""
        if self._held:
            self._head = NULL
            self._held = False
            PyBuffer_Release(&self._view)


def drain_lanes(list lanes not None, Py_ssize_t slot_count):
    """Return the slots touched in any lane since the last call, each once, oldest first.

    Recency by the sessions' own word: one that lies about the time only changes what is
    evicted first.
    """
    cdef Lane lane
    cdef list touches = []
    cdef dict newest = {}
    for lane in lanes:
        lane._require_open()
        lane.drain_into(touches, slot_count)
    if not touches:
        return touches
    touches.sort(reverse=True)
    for word in touches:
        newest.setdefault(<uint64_t>word & LOWER_HALF, None)
    slots = list(newest)
    slots.reverse()
    return slots
