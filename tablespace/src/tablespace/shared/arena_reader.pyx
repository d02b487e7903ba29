"""A client's side of the arena: lookups, copies and leases without asking the daemon."""

from cpython.buffer cimport (
    PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer,
)
from cpython.bytes cimport (
    PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_FromStringAndSize, PyBytes_GET_SIZE,
)
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.sequence cimport PySequence_GetSlice
from libc.stdint cimport int64_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc

from tablespace.shared.atomics cimport (
    ts_fence_acquire, ts_fence_seq_cst, ts_load_acquire, ts_load_relaxed,
)
from tablespace.shared.clocks cimport coarse_ns
from tablespace.shared.foreign_copy cimport GIL_RELEASE_BYTES, copy_foreign
from tablespace.shared.lane cimport Lane
from tablespace.shared.sequenced_slots cimport WORD_SEQUENCE
from tablespace.shared.slot_index cimport Seen, SlotIndex, Sought, seek

cdef enum:
    ATTEMPTS = 4  # One and three more: a slot rewritten that often while copied is a miss.
    WINDOW = 32  # Keys whose cache misses are overlapped.
    MISS_CODE = -1
    SHORT_CODE = -2

MISS = MISS_CODE


def are_keys(list keys not None, Py_ssize_t max_bytes):
    """Return whether all are bytes of 1 to `max_bytes`; it costs nanoseconds a key."""
    cdef object key
    for key in keys:
        if not PyBytes_CheckExact(key) or not 1 <= PyBytes_GET_SIZE(key) <= max_bytes:
            return False
    return True


cdef class ArenaReader:
    """Looks keys up in the index, and copies or leases what it finds.

    Parameters
    ----------
    index : SlotIndex
        Over the daemon's index.
    data : contiguous buffer
        The memory the values lie in, each where its record says. Held until `close`.
    lane : Lane or None
        This session's. Without one nothing can be leased, and hits are not counted.
    heartbeat : contiguous buffer
        Where the daemon writes CLOCK_MONOTONIC in nanoseconds, 8 bytes, 8-aligned. Held.
    stale_ns, unchecked_ns : int
        How old the heartbeat may be, and for how long `checked` holds.

    Attributes
    ----------
    retries : int
        How often a copy was thrown away because the slot changed meanwhile.

    Notes
    -----
    Safe from any thread. Nothing in here asks whether the daemon lives: the caller asks
    `is_current` first.
    """

    cdef object __weakref__
    cdef readonly SlotIndex index
    cdef readonly Lane lane
    cdef object _readonly
    cdef Py_buffer _data
    cdef Py_buffer _heartbeat
    cdef int _held
    cdef Py_ssize_t _active
    cdef uint64_t _stale_ns
    cdef uint64_t _unchecked_ns
    cdef uint64_t _checked_at
    cdef bint _stopped
    cdef readonly uint64_t retries

    def __cinit__(self, SlotIndex index not None, data, *, Lane lane, heartbeat,
                  uint64_t stale_ns, uint64_t unchecked_ns):
        self._held = 0
        self._stopped = False
        PyObject_GetBuffer(data, &self._data, PyBUF_SIMPLE)
        self._held = 1
        PyObject_GetBuffer(heartbeat, &self._heartbeat, PyBUF_SIMPLE)
        self._held = 2
        if self._heartbeat.len != 8 or <uintptr_t>self._heartbeat.buf % 8 != 0:
            raise ValueError("the heartbeat is one 8-aligned word")
        self.index = index
        self.lane = lane
        self._readonly = memoryview(data).toreadonly()
        self._stale_ns = stale_ns
        self._unchecked_ns = unchecked_ns
        self._checked_at = 0

    def __dealloc__(self):
        self._let_buffers_go()

    cdef void _let_buffers_go(self):
        if self._held > 1:
            PyBuffer_Release(&self._heartbeat)
        if self._held > 0:
            PyBuffer_Release(&self._data)
        self._held = 0

    # -- whether to look -----------------------------------------------------------------------

    def heartbeat_age_ns(self):
        """Return how long ago the daemon wrote its heartbeat, by the coarse clock."""
        self._require_open()
        return self._age()

    cpdef bint is_current(self):
        """Return whether the heartbeat is fresh and `checked` was called a short time ago."""
        cdef uint64_t now
        if self._stopped or self._held < 2:
            return False
        now = coarse_ns()
        return now - self._checked_at <= self._unchecked_ns and self._age() <= self._stale_ns

    def checked(self):
        """Note that the daemon was seen to be there now."""
        self._checked_at = coarse_ns()

    def stop(self):
        """Refuse every further lookup and lease: the daemon is gone."""
        self._stopped = True

    cdef uint64_t _age(self) noexcept nogil:
        cdef uint64_t beat = ts_load_relaxed(<uint64_t *>self._heartbeat.buf)
        cdef uint64_t now = coarse_ns()
        # The coarse clock may be behind the clock that wrote it.
        return now - beat if now > beat else 0

    cdef int _require_open(self) except -1:
        if self._held < 2:
            raise ValueError("the reader is closed")
        self.index._require_open()
        return 0

    # -- looking -------------------------------------------------------------------------------

    def contains_many(self, uint64_t namespace_id, list keys not None):
        """Return which keys have a readable slot.

        Returns
        -------
        list of bool
        """
        self._require_open()
        cdef Py_ssize_t count = PyList_GET_SIZE(keys)
        cdef Py_ssize_t first, i, part
        cdef Sought sought[WINDOW]
        cdef Seen seen
        cdef list present = [False] * count
        for first in range(0, count, WINDOW):
            part = min(<Py_ssize_t>WINDOW, count - first)
            self._seek_part(sought, namespace_id, keys, first, part)
            for i in range(part):
                if self.index.look(&sought[i], &seen):
                    present[first + i] = True
        return present

    def match_prefix(self, uint64_t namespace_id, list keys not None):
        """Return how many leading keys have a readable slot."""
        self._require_open()
        cdef Py_ssize_t count = PyList_GET_SIZE(keys)
        cdef Py_ssize_t first, i, part
        cdef Sought sought[WINDOW]
        cdef Seen seen
        for first in range(0, count, WINDOW):
            part = min(<Py_ssize_t>WINDOW, count - first)
            self._seek_part(sought, namespace_id, keys, first, part)
            for i in range(part):
                if not self.index.look(&sought[i], &seen):
                    return first + i
        return count

    cdef int _seek_part(self, Sought *sought, uint64_t namespace_id, list keys,
                        Py_ssize_t first, Py_ssize_t part) except -1:
        """Hash some keys and have their entries and records on the way into the cache."""
        cdef Py_ssize_t i
        for i in range(part):
            _seek_key(&sought[i], namespace_id, <object>PyList_GET_ITEM(keys, first + i))
            self.index.prefetch_entry(sought[i].hash)
        for i in range(part):
            self.index.prefetch_record(sought[i].hash)
        return 0

    # -- copying -------------------------------------------------------------------------------

    cpdef int64_t get_into(self, uint64_t namespace_id, key, buffer) except? -2:
        """Copy a block into a buffer; return its length, or -1 for a miss.

        Raises
        ------
        ValueError
            When the buffer is shorter than the block; names both sizes.
        """
        self._require_open()
        cdef Sought sought
        cdef Seen seen
        cdef Py_buffer target
        cdef int64_t length
        _seek_key(&sought, namespace_id, key)
        if not self.index.look(&sought, &seen):
            return MISS_CODE
        PyObject_GetBuffer(buffer, &target, PyBUF_WRITABLE)
        try:
            self._active += 1
            if seen.length < GIL_RELEASE_BYTES:
                length = self._copy(&sought, &seen, target.buf, target.len)
            else:
                with nogil:
                    length = self._copy(&sought, &seen, target.buf, target.len)
            self._active -= 1
            if length == SHORT_CODE:
                raise ValueError(
                    f"the value has {seen.length} bytes, the buffer only {target.len}")
        finally:
            PyBuffer_Release(&target)
        if length >= 0:
            self._count(&seen)
        return length

    def get_into_if_current(self, uint64_t namespace_id, key, buffer):
        """Do what `get_into` does, but miss where `is_current` would say no; in one call."""
        return self.get_into(namespace_id, key, buffer) if self.is_current() else MISS_CODE

    def get_bytes(self, uint64_t namespace_id, key):
        """Return a block's bytes, or None for a miss."""
        self._require_open()
        cdef Sought sought
        cdef Seen seen
        cdef int attempt
        cdef bint whole
        cdef char *target
        _seek_key(&sought, namespace_id, key)
        for attempt in range(ATTEMPTS):
            if not self.index.look(&sought, &seen) or not self._is_inside(&seen):
                return None
            value = PyBytes_FromStringAndSize(NULL, seen.length)
            target = PyBytes_AS_STRING(value)
            self._active += 1
            if seen.length < GIL_RELEASE_BYTES:
                whole = self._copy_once(&seen, target)
            else:
                with nogil:
                    whole = self._copy_once(&seen, target)
            self._active -= 1
            if whole:
                self._count(&seen)
                return value
            self.retries += 1
        return None

    def get_many_into(self, uint64_t namespace_id, list keys not None, list buffers not None):
        """Copy blocks into buffers, with the GIL given away once for all of them.

        Returns
        -------
        list of int
            Each block's length, or -1 for a miss.

        Raises
        ------
        ValueError
            When a buffer is shorter than its block; what comes before it was copied.
        """
        self._require_open()
        cdef Py_ssize_t count = PyList_GET_SIZE(keys)
        cdef Py_ssize_t held = 0
        cdef Py_ssize_t i
        cdef Py_ssize_t short_one = -1
        cdef Py_buffer *targets
        cdef Sought *sought
        cdef Seen *seen
        cdef int64_t *lengths
        if PyList_GET_SIZE(buffers) != count:
            raise ValueError(f"{count} keys for {len(buffers)} buffers")
        if count == 0:
            return []
        targets = <Py_buffer *>calloc(count, sizeof(Py_buffer))
        sought = <Sought *>malloc(count * sizeof(Sought))
        seen = <Seen *>malloc(count * sizeof(Seen))
        lengths = <int64_t *>malloc(count * sizeof(int64_t))
        try:
            if targets == NULL or sought == NULL or seen == NULL or lengths == NULL:
                raise MemoryError
            for i in range(count):
                _seek_key(&sought[i], namespace_id, <object>PyList_GET_ITEM(keys, i))
                self.index.prefetch_entry(sought[i].hash)
            for i in range(count):
                PyObject_GetBuffer(
                    <object>PyList_GET_ITEM(buffers, i), &targets[i], PyBUF_WRITABLE)
                held += 1
            self._active += 1
            with nogil:
                for i in range(count):
                    lengths[i] = MISS_CODE
                    if short_one < 0 and self.index.look(&sought[i], &seen[i]):
                        lengths[i] = self._copy(
                            &sought[i], &seen[i], targets[i].buf, targets[i].len)
                        if lengths[i] == SHORT_CODE:
                            short_one = i
            self._active -= 1
            if short_one >= 0:
                raise ValueError(
                    f"the value has {seen[short_one].length} bytes, the buffer only "
                    f"{targets[short_one].len}")
            for i in range(count):
                if lengths[i] >= 0:
                    self._count(&seen[i])
            return [lengths[i] for i in range(count)]
        finally:
            for i in range(held):
                PyBuffer_Release(&targets[i])
            free(targets)
            free(sought)
            free(seen)
            free(lengths)

    cdef bint _copy_once(self, const Seen *seen, void *target) noexcept nogil:
        """Copy a slot that was just looked at; True when it still is the same."""
        copy_foreign(
            target, <char *>self._data.buf + seen.offset, seen.length)
        ts_fence_acquire()
        return ts_load_relaxed(self._sequence(seen.slot)) == seen.version

    cdef int64_t _copy(self, const Sought *sought, Seen *seen, void *target,
                       Py_ssize_t room) noexcept nogil:
        """Copy what was looked at, looking again when it changes."""
        cdef int attempt
        for attempt in range(ATTEMPTS):
            if not self._is_inside(seen):
                return MISS_CODE
            if seen.length > <uint64_t>room:
                return SHORT_CODE
            if self._copy_once(seen, target):
                return seen.length
            self.retries += 1
            if attempt + 1 < ATTEMPTS and not self.index.look(sought, seen):
                break
        return MISS_CODE

    cdef bint _is_inside(self, const Seen *seen) noexcept nogil:
        """Say whether a value lies in the data, whatever its record says."""
        cdef uint64_t size = <uint64_t>self._data.len
        return seen.length <= size and seen.offset <= size - seen.length

    cdef uint64_t *_sequence(self, uint64_t slot) noexcept nogil:
        return <uint64_t *>(
            self.index.slots._records + slot * self.index.slots._record_bytes) + WORD_SEQUENCE

    cdef void _count(self, const Seen *seen):
        if self.lane is not None and self.lane._head != NULL:
            self.lane.push(seen.slot, coarse_ns())
            self.lane.count(1, seen.length)

    # -- leasing -------------------------------------------------------------------------------

    def lease_many(self, uint64_t namespace_id, list keys not None, list places not None):
        """Lease blocks' slots and return read-only views of their values, None for each miss.

        None also when no lease is free. The places of the leases are appended to `places` in
        the same breath: an exception of a signal handler cannot come between. Until `release`
        of its place the bytes of a view stay.

        Returns
        -------
        list of memoryview or None
        """
        self._require_open()
        cdef Py_ssize_t count = PyList_GET_SIZE(keys)
        cdef Py_ssize_t i
        cdef Sought sought
        cdef Seen seen
        cdef list views = [None] * count
        if self.lane is None or self._stopped:
            return views
        for i in range(count):
            _seek_key(&sought, namespace_id, <object>PyList_GET_ITEM(keys, i))
            if self._lease(&sought, &seen, places):
                views[i] = self._view_of(<Py_ssize_t>seen.offset, seen.length)
        return views

    cdef bint _lease(self, const Sought *sought, Seen *seen, list places) except -1:
        """Pin what is found now; False for a miss."""
        cdef int attempt
        cdef Py_ssize_t place
        for attempt in range(ATTEMPTS):
            if not self.index.look(sought, seen) or not self._is_inside(seen):
                return False
            place = self._pin(seen.slot, seen.version)
            if place >= 0:
                places.append(place)
                self._count(seen)
                return True
            if place == MISS_CODE:
                return False
            self.retries += 1
        return False

    cdef object _view_of(self, Py_ssize_t offset, Py_ssize_t length):
        return PySequence_GetSlice(self._readonly, offset, offset + length)

    def lease_slot(self, Py_ssize_t slot, uint64_t version, list places not None):
        """Lease a slot that the daemon named, if it still is that version; return whether."""
        self._require_open()
        cdef Py_ssize_t place
        self.index.slots._record(slot)
        if self.lane is None or self._stopped or version & 1:
            return False
        place = self._pin(slot, version)
        if place < 0:
            return False
        places.append(place)
        return True

    def release(self, list places not None):
        """End leases, and take them off the list."""
        while places:
            self.lane.give_back(places.pop())

    cdef Py_ssize_t _pin(self, uint64_t slot, uint64_t version):
        """Return the place of a lease that holds; -1 without room, -2 when the slot changed."""
        cdef Py_ssize_t place
        if self.lane._head == NULL:
            return MISS_CODE
        place = self.lane.claim(slot)
        if place < 0:
            return MISS_CODE
        # Either the daemon, which makes the sequence odd and then scans the lanes, finds the
        # lease, or the load behind this fence finds the odd sequence.
        ts_fence_seq_cst()
        if ts_load_acquire(self._sequence(slot)) != version:
            self.lane.let_go(place)
            return SHORT_CODE
        return place

    def close(self):
        """Let the buffers go. Refused with BufferError while a copy is under way."""
        if self._active:
            raise BufferError(f"{self._active} copies are under way")
        self._stopped = True
        self._readonly = None
        self._let_buffers_go()


cdef int _seek_key(Sought *sought, uint64_t namespace_id, object key) except -1:
    if not PyBytes_CheckExact(key) and not isinstance(key, bytes):
        raise TypeError(f"a key is bytes, not {type(key).__name__}")
    if not seek(sought, namespace_id, PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key)):
        raise ValueError(f"a key has 1 to 223 bytes, this has {len(key)}")
    return 0
