"""Sequenced slots over any buffer, and the copies out of them.

Everything here works on memory that another process may be changing at the same time (a memfd
mapped by both). One writer owns the records; any number of readers copy values out and learn
from the sequence whether what they copied was whole.
"""

from cpython.buffer cimport (
    PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer,
)
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport uint64_t, uintptr_t

from tablespace.shared.atomics cimport (
    ts_fence_acquire, ts_fence_seq_cst, ts_load_acquire, ts_load_relaxed, ts_store_relaxed,
    ts_store_release,
)
from tablespace.shared.foreign_copy cimport check_window, copy_releasing_gil

RECORD_BYTES = RECORD_SIZE
TORN = SLOT_TORN


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
    record_bytes : int
        Distance of two records, a multiple of 64. What follows a record's first 40 bytes
        belongs to whoever made it longer (`SlotIndex` keeps the key there).

    Notes
    -----
    Thread rule: reading methods are safe from any thread and process. Writing methods
    (`initialise`, `reserve`, `publish`, `set_expires`, `retire`) belong to one thread of one
    process.
    """

    def __cinit__(self, buffer, Py_ssize_t slot_count, *, Py_ssize_t offset=0,
                  bint writable=False, Py_ssize_t record_bytes=RECORD_SIZE):
        self._held = False
        self._records = NULL
        self._active = 0
        if slot_count < 0 or offset < 0:
            raise ValueError(
                f"slot_count and offset must not be negative, got {slot_count} and {offset}")
        if record_bytes < RECORD_SIZE or record_bytes % RECORD_SIZE:
            raise ValueError(
                f"record_bytes is {record_bytes}, it must be a multiple of {RECORD_SIZE}")
        if slot_count > (<Py_ssize_t>0x7fffffffffffffff) // record_bytes:
            raise ValueError(f"slot_count {slot_count} is beyond any address space")
        PyObject_GetBuffer(
            buffer, &self._view, PyBUF_WRITABLE if writable else PyBUF_SIMPLE)
        self._held = True
        if self._view.len < offset or self._view.len - offset < slot_count * record_bytes:
            raise ValueError(
                f"{slot_count} records at offset {offset} need "
                f"{offset + slot_count * record_bytes} bytes, the buffer has {self._view.len}")
        if (<uintptr_t>self._view.buf + <uintptr_t>offset) % 8 != 0:
            raise ValueError("records must begin at an 8-aligned address")
        self._records = <char *>self._view.buf + offset
        self._slot_count = slot_count
        self._record_bytes = record_bytes
        self._writable = writable

    def __dealloc__(self):
        if self._held:
            PyBuffer_Release(&self._view)

    @staticmethod
    def bytes_for(Py_ssize_t slot_count, Py_ssize_t record_bytes=RECORD_SIZE):
        """Return the bytes that `slot_count` records take."""
        return slot_count * record_bytes

    def __len__(self):
        return self._slot_count

    cdef uint64_t *_record(self, Py_ssize_t slot) except NULL:
        if self._records == NULL:
            raise ValueError("the slots are closed")
        if slot < 0 or slot >= self._slot_count:
            raise IndexError(f"slot {slot} is outside 0..{self._slot_count - 1}")
        return <uint64_t *>(self._records + slot * self._record_bytes)

    cdef uint64_t *_writable_record(self, Py_ssize_t slot) except NULL:
        if not self._writable:
            raise ValueError("these slots were opened for reading only")
        return self._record(slot)

    def initialise(self, Py_ssize_t first=0, count=None):
        """Make records empty: sequence 1 (not readable), all other words zero.

        All from `first` on, or `count` of them. Never those that were in use: a sequence that
        begins anew could be one that a reader knows.
        """
        cdef Py_ssize_t slot
        cdef Py_ssize_t end = self._slot_count if count is None else first + count
        cdef int word
        cdef uint64_t *record
        for slot in range(first, end):
            record = self._writable_record(slot)
            ts_store_relaxed(record + WORD_SEQUENCE, 1)
            for word in range(1, self._record_bytes // 8):
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
            return SLOT_TORN
        cdef uint64_t length = ts_load_relaxed(record + WORD_LENGTH)
        # The length is only worth checking if it belongs to the version asked for.
        ts_fence_acquire()
        if ts_load_relaxed(record + WORD_SEQUENCE) != version:
            return SLOT_TORN
        cdef Py_buffer target
        cdef Py_buffer origin
        PyObject_GetBuffer(destination, &target, PyBUF_WRITABLE)
        try:
            if <uint64_t>target.len < length:
                raise ValueError(
                    f"the value has {length} bytes, the buffer only {target.len}")
            PyObject_GetBuffer(source, &origin, PyBUF_SIMPLE)
            try:
                check_window(source_offset, length, origin.len)
                self._active += 1
                copy_releasing_gil(target.buf, <char *>origin.buf + source_offset, length)
                self._active -= 1
            finally:
                PyBuffer_Release(&origin)
        finally:
            PyBuffer_Release(&target)
        ts_fence_acquire()
        if ts_load_relaxed(record + WORD_SEQUENCE) != version:
            return SLOT_TORN
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
            check_window(source_offset, length, origin.len)
            value = PyBytes_FromStringAndSize(NULL, length)
            self._active += 1
            copy_releasing_gil(
                PyBytes_AS_STRING(value), <char *>origin.buf + source_offset, length)
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
