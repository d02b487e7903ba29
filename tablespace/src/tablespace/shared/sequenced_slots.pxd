"""The C surface of a slot's record: what the index and the arena's reader share with it."""

from libc.stdint cimport uint64_t

cdef enum:
    # One cache line a record at least, so that two slots never share one between writer and
    # reader.
    RECORD_SIZE = 64
    # The fields of a record, as 64-bit words.
    WORD_SEQUENCE = 0
    WORD_LENGTH = 1
    WORD_CHECKSUM = 2
    WORD_NAMESPACE = 3
    WORD_EXPIRES = 4
    SLOT_TORN = -1


cdef class SequencedSlots:
    # Owns a buffer export: `_view.obj` keeps the memory alive until `close` or deallocation.
    cdef Py_buffer _view
    cdef bint _held
    cdef bint _writable
    # Copies under way with the GIL released; `close` refuses while there are any.
    cdef Py_ssize_t _active
    # Borrowed from `_view`.
    cdef char *_records
    cdef Py_ssize_t _slot_count
    cdef Py_ssize_t _record_bytes

    cdef uint64_t *_record(self, Py_ssize_t slot) except NULL
    cdef uint64_t *_writable_record(self, Py_ssize_t slot) except NULL
