"""Copies, sums and single words of memory that other processes map."""

from cpython.buffer cimport (
    PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer,
)
from libc.stdint cimport uint64_t, uintptr_t
from libc.stdlib cimport calloc, free

from tablespace._core.checksum cimport xxh3_64
from tablespace.shared.atomics cimport ts_load_acquire, ts_store_release
from tablespace.shared.foreign_copy cimport check_window, copy_releasing_gil


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
            check_window(offset, origin.len, target.len)
            copy_releasing_gil(<char *>target.buf + offset, origin.buf, origin.len)
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
    check_window(offset, 8, view.len)
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
