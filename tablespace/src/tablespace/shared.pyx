"""Shared-memory primitives over any buffer: sequenced slots and the copies in and out of them.

Everything here works on memory that another process may be changing at the same time (a memfd
mapped by both). One writer owns the records; any number of readers copy values out and learn
from the sequence whether what they copied was whole.
"""

from cpython.buffer cimport (
    PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer,
)
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport uint64_t, uintptr_t
from libc.stdlib cimport calloc, free

from tablespace._core.block_copy cimport copy_block
from tablespace._core.checksum cimport xxh3_64

cdef extern from *:
    """
    #include <stdint.h>
    /* C11 orders by the compiler's builtins: the memory is foreign, so it has no _Atomic type. */
    static inline uint64_t ts_load_acquire(const uint64_t *p)
    { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
    static inline uint64_t ts_load_relaxed(const uint64_t *p)
    { return __atomic_load_n(p, __ATOMIC_RELAXED); }
    static inline void ts_store_relaxed(uint64_t *p, uint64_t v)
    { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
    static inline void ts_store_release(uint64_t *p, uint64_t v)
    { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
    static inline void ts_fence_acquire(void) { __atomic_thread_fence(__ATOMIC_ACQUIRE); }
    static inline void ts_fence_seq_cst(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
    """
    uint64_t ts_load_acquire(const uint64_t *p) noexcept nogil
    uint64_t ts_load_relaxed(const uint64_t *p) noexcept nogil
    void ts_store_relaxed(uint64_t *p, uint64_t v) noexcept nogil
    void ts_store_release(uint64_t *p, uint64_t v) noexcept nogil
    void ts_fence_acquire() noexcept nogil
    void ts_fence_seq_cst() noexcept nogil


cdef enum:
    # One cache line a record, so that two slots never share one between writer and reader.
    RECORD_SIZE = 64
    # The fields of a record, as 64-bit words.
    WORD_SEQUENCE = 0
    WORD_LENGTH = 1
    WORD_CHECKSUM = 2
    WORD_NAMESPACE = 3
    WORD_EXPIRES = 4
    # Below this a copy is cheaper than giving the GIL away and taking it back.
    GIL_RELEASE_BYTES = 4096

RECORD_BYTES = RECORD_SIZE
TORN = -1


cdef inline void _copy(void *target, const void *source, size_t size) noexcept:
    """Copy bytes, with the GIL released when that pays."""
    if size < GIL_RELEASE_BYTES:
        copy_block(target, source, size)
    else:
        with nogil:
            copy_block(target, source, size)


cdef class SequencedSlots:
    """Per-slot records with a sequence number, over a buffer that other processes map.

    A slot is readable while its sequence is even. It is odd while the slot is free, reserved,
    being written or being read into. Every change of contents passes through an odd number, so
    an equal even sequence before and after a copy proves the copy whole.

    Parameters
    ----------
    buffer : contiguous buffer
        Memory of the records. Held (and, for a writer, held writable) until `close`.
    slot_count : int
        Number of records.
    offset : int
        Where the first record lies in `buffer`, in bytes; the address must be 8-aligned.
    writable : bool
        True for the one writer. A reader may hand in read-only memory.

    Notes
    -----
    Thread rule: reading methods are safe from any thread and process. Writing methods
    (`initialise`, `reserve`, `publish`, `set_expires`, `retire`) belong to one thread of one
    process.
    """

    # Owns a buffer export: `_view.obj` keeps the memory alive until `close` or deallocation.
    cdef Py_buffer _view
    cdef bint _held
    cdef bint _writable
    # Copies under way with the GIL released; `close` refuses while there are any.
    cdef Py_ssize_t _active
    # Borrowed from `_view`.
    cdef char *_records
    cdef Py_ssize_t _slot_count

    def __cinit__(self, buffer, Py_ssize_t slot_count, *, Py_ssize_t offset=0,
                  bint writable=False):
        self._held = False
        self._records = NULL
        self._active = 0
        if slot_count < 0 or offset < 0:
            raise ValueError(
                f"slot_count and offset must not be negative, got {slot_count} and {offset}")
        if slot_count > (<Py_ssize_t>0x7fffffffffffffff) // RECORD_SIZE:
            raise ValueError(f"slot_count {slot_count} is beyond any address space")
        PyObject_GetBuffer(
            buffer, &self._view, PyBUF_WRITABLE if writable else PyBUF_SIMPLE)
        self._held = True
        if self._view.len < offset or self._view.len - offset < slot_count * RECORD_SIZE:
            raise ValueError(
                f"{slot_count} records at offset {offset} need "
                f"{offset + slot_count * RECORD_SIZE} bytes, the buffer has {self._view.len}")
        if (<uintptr_t>self._view.buf + <uintptr_t>offset) % 8 != 0:
            raise ValueError("records must begin at an 8-aligned address")
        self._records = <char *>self._view.buf + offset
        self._slot_count = slot_count
        self._writable = writable

    def __dealloc__(self):
        if self._held:
            PyBuffer_Release(&self._view)

    @staticmethod
    def bytes_for(Py_ssize_t slot_count):
        """Return the bytes that `slot_count` records take."""
        return slot_count * RECORD_SIZE

    def __len__(self):
        return self._slot_count

    cdef uint64_t *_record(self, Py_ssize_t slot) except NULL:
        if self._records == NULL:
            raise ValueError("the slots are closed")
        if slot < 0 or slot >= self._slot_count:
            raise IndexError(f"slot {slot} is outside 0..{self._slot_count - 1}")
        return <uint64_t *>(self._records + slot * RECORD_SIZE)

    cdef uint64_t *_writable_record(self, Py_ssize_t slot) except NULL:
        if not self._writable:
            raise ValueError("these slots were opened for reading only")
        return self._record(slot)

    def initialise(self):
        """Make every record empty: sequence 1 (not readable), all other words zero."""
        cdef Py_ssize_t slot
        cdef int word
        cdef uint64_t *record
        for slot in range(self._slot_count):
            record = self._writable_record(slot)
            ts_store_relaxed(record + WORD_SEQUENCE, 1)
            for word in range(1, RECORD_SIZE // 8):
                ts_store_relaxed(record + word, 0)
        ts_fence_seq_cst()

    def version(self, Py_ssize_t slot):
        """Return the slot's sequence now: even while readable, odd while not."""
        return ts_load_acquire(self._record(slot) + WORD_SEQUENCE)

    def record(self, Py_ssize_t slot):
        """Return (version, length, checksum, namespace_id, expires_ns), or None when torn.

        None also while the slot is not readable.
        """
        cdef uint64_t *record = self._record(slot)
        cdef uint64_t before = ts_load_acquire(record + WORD_SEQUENCE)
        if before & 1:
            return None
        cdef uint64_t length = ts_load_relaxed(record + WORD_LENGTH)
        cdef uint64_t checksum = ts_load_relaxed(record + WORD_CHECKSUM)
        cdef uint64_t namespace_id = ts_load_relaxed(record + WORD_NAMESPACE)
        cdef uint64_t expires_ns = ts_load_relaxed(record + WORD_EXPIRES)
        ts_fence_acquire()
        if ts_load_relaxed(record + WORD_SEQUENCE) != before:
            return None
        return before, length, checksum, namespace_id, expires_ns

    def reserve(self, Py_ssize_t slot):
        """Make a slot unreadable for a new writer and return its new, odd sequence.

        Always a fresh number, also for a slot that was odd before: it names this reservation.
        """
        cdef uint64_t *record = self._writable_record(slot)
        cdef uint64_t sequence = ts_load_relaxed(record + WORD_SEQUENCE)
        sequence += 2 if sequence & 1 else 1
        ts_store_relaxed(record + WORD_SEQUENCE, sequence)
        # Before any byte of the new value can be seen, every reader must see the odd number.
        ts_fence_seq_cst()
        return sequence

    def publish(self, Py_ssize_t slot, uint64_t length, uint64_t checksum,
                uint64_t namespace_id, uint64_t expires_ns=0):
        """Make a reserved slot readable and return its new, even sequence.

        Raises
        ------
        ValueError
            When the slot is not reserved: its contents are readable and may be in use.
        """
        cdef uint64_t *record = self._writable_record(slot)
        cdef uint64_t sequence = ts_load_relaxed(record + WORD_SEQUENCE)
        if not sequence & 1:
            raise ValueError(f"slot {slot} is published already (sequence {sequence})")
        ts_store_relaxed(record + WORD_LENGTH, length)
        ts_store_relaxed(record + WORD_CHECKSUM, checksum)
        ts_store_relaxed(record + WORD_NAMESPACE, namespace_id)
        ts_store_relaxed(record + WORD_EXPIRES, expires_ns)
        ts_store_release(record + WORD_SEQUENCE, sequence + 1)
        return sequence + 1

    def set_expires(self, Py_ssize_t slot, uint64_t expires_ns):
        """Change when a published slot expires. The sequence stays: the value is the same."""
        ts_store_relaxed(self._writable_record(slot) + WORD_EXPIRES, expires_ns)

    def retire(self, Py_ssize_t slot):
        """Make a slot unreadable for good: its block left. Return the new, odd sequence."""
        cdef uint64_t *record = self._writable_record(slot)
        cdef uint64_t sequence = ts_load_relaxed(record + WORD_SEQUENCE)
        if not sequence & 1:
            sequence += 1
            ts_store_relaxed(record + WORD_SEQUENCE, sequence)
            ts_fence_seq_cst()
        return sequence

    def copy_out(self, Py_ssize_t slot, uint64_t version, source, Py_ssize_t source_offset,
                 destination):
        """Copy a slot's value out of shared memory, if it still is the given version.

        Parameters
        ----------
        slot : int
            Which record to check.
        version : int
            The even sequence the caller was told.
        source : contiguous buffer
            The memory the values lie in.
        source_offset : int
            Where this slot's value begins in `source`, in bytes.
        destination : writable contiguous buffer
            Takes the value; at least as long as it.

        Returns
        -------
        int
            Bytes copied, or -1 when the slot changed before or during the copy (what lies in
            `destination` then is worth nothing).

        Raises
        ------
        ValueError
            When the destination is shorter than the value, or the value would lie outside the
            source.
        """
        cdef uint64_t *record = self._record(slot)
        if version & 1 or ts_load_acquire(record + WORD_SEQUENCE) != version:
            return TORN
        cdef uint64_t length = ts_load_relaxed(record + WORD_LENGTH)
        # The length is only worth checking if it belongs to the version asked for.
        ts_fence_acquire()
        if ts_load_relaxed(record + WORD_SEQUENCE) != version:
            return TORN
        cdef Py_buffer target
        cdef Py_buffer origin
        PyObject_GetBuffer(destination, &target, PyBUF_WRITABLE)
        try:
            if <uint64_t>target.len < length:
                raise ValueError(
                    f"the value has {length} bytes, the buffer only {target.len}")
            PyObject_GetBuffer(source, &origin, PyBUF_SIMPLE)
            try:
                _check_window(source_offset, length, origin.len)
                self._active += 1
                _copy(target.buf, <char *>origin.buf + source_offset, length)
                self._active -= 1
            finally:
                PyBuffer_Release(&origin)
        finally:
            PyBuffer_Release(&target)
        ts_fence_acquire()
        if ts_load_relaxed(record + WORD_SEQUENCE) != version:
            return TORN
        return length

    def copy_bytes(self, Py_ssize_t slot, uint64_t version, source, Py_ssize_t source_offset):
        """Copy a slot's value into a new bytes object; None when the slot changed."""
        cdef uint64_t *record = self._record(slot)
        if version & 1 or ts_load_acquire(record + WORD_SEQUENCE) != version:
            return None
        cdef uint64_t length = ts_load_relaxed(record + WORD_LENGTH)
        ts_fence_acquire()
        if ts_load_relaxed(record + WORD_SEQUENCE) != version:
            return None
        cdef Py_buffer origin
        PyObject_GetBuffer(source, &origin, PyBUF_SIMPLE)
        try:
            _check_window(source_offset, length, origin.len)
            value = PyBytes_FromStringAndSize(NULL, length)
            self._active += 1
            _copy(PyBytes_AS_STRING(value), <char *>origin.buf + source_offset, length)
            self._active -= 1
        finally:
            PyBuffer_Release(&origin)
        ts_fence_acquire()
        if ts_load_relaxed(record + WORD_SEQUENCE) != version:
            return None
        return value

    def close(self):
        """Let the buffer go. Refused with BufferError while a copy is under way."""
        if self._active:
            raise BufferError(f"{self._active} copies are under way")
        if self._held:
            self._records = NULL
            self._held = False
            PyBuffer_Release(&self._view)


cdef int _check_window(Py_ssize_t offset, uint64_t length, Py_ssize_t size) except -1:
    if offset < 0 or offset > size or length > <uint64_t>(size - offset):
        raise ValueError(
            f"{length} bytes at offset {offset} do not lie inside the {size} bytes given")
    return 0


def copy_in(destination, Py_ssize_t offset, source):
    """Copy `source` into `destination` at `offset`, with the GIL released for long copies.

    Parameters
    ----------
    destination : writable contiguous buffer
        Usually a mapping of shared memory.
    offset : int
        Where to write, in bytes.
    source : contiguous buffer
        What to write.

    Returns
    -------
    int
        Bytes copied.
    """
    cdef Py_buffer target
    cdef Py_buffer origin
    PyObject_GetBuffer(source, &origin, PyBUF_SIMPLE)
    try:
        PyObject_GetBuffer(destination, &target, PyBUF_WRITABLE)
        try:
            _check_window(offset, origin.len, target.len)
            _copy(<char *>target.buf + offset, origin.buf, origin.len)
            return origin.len
        finally:
            PyBuffer_Release(&target)
    finally:
        PyBuffer_Release(&origin)


def checksum_many(list buffers not None):
    """Return the checksum64 of each buffer, giving the GIL away once for all of them.

    One call a buffer would take the GIL back as often, and each time may wait for a busy
    thread's whole switch interval.

    Parameters
    ----------
    buffers : list of contiguous buffers
        Held, so that their memory stays, until the call returns.

    Returns
    -------
    list of int
    """
    cdef Py_ssize_t count = len(buffers)
    cdef Py_ssize_t held = 0
    cdef Py_ssize_t i
    if count == 0:
        return []
    cdef Py_buffer *views = <Py_buffer *>calloc(count, sizeof(Py_buffer))
    cdef uint64_t *sums = <uint64_t *>calloc(count, sizeof(uint64_t))
    try:
        if views == NULL or sums == NULL:
            raise MemoryError
        for i in range(count):
            PyObject_GetBuffer(buffers[i], &views[i], PyBUF_SIMPLE)
            held += 1
        with nogil:
            for i in range(count):
                sums[i] = xxh3_64(views[i].buf, views[i].len)
        return [sums[i] for i in range(count)]
    finally:
        for i in range(held):
            PyBuffer_Release(&views[i])
        free(views)
        free(sums)


cdef uint64_t *_word(Py_buffer *view, Py_ssize_t offset) except NULL:
    _check_window(offset, 8, view.len)
    if (<uintptr_t>view.buf + <uintptr_t>offset) % 8 != 0:
        raise ValueError(f"offset {offset} is not 8-aligned")
    return <uint64_t *>(<char *>view.buf + offset)


def load_u64(buffer, Py_ssize_t offset):
    """Load a 64-bit word of shared memory with acquire order."""
    cdef Py_buffer view
    PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
    try:
        return ts_load_acquire(_word(&view, offset))
    finally:
        PyBuffer_Release(&view)


def store_u64(buffer, Py_ssize_t offset, uint64_t value):
    """Store a 64-bit word of shared memory with release order."""
    cdef Py_buffer view
    PyObject_GetBuffer(buffer, &view, PyBUF_WRITABLE)
    try:
        ts_store_release(_word(&view, offset), value)
    finally:
        PyBuffer_Release(&view)
