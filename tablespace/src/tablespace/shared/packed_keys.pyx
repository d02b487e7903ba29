"""Looks keys up as they come off a socket, without an object for each.

The packed form is a MessagePack array of `bin 8`, as any encoder writes short byte strings.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport uint64_t

from tablespace.shared.slot_index cimport KEY_SIZE_MAX, Seen, SlotIndex, Sought, seek

cdef enum:
    WINDOW = 32  # Keys whose cache misses are overlapped.
    FIX_ARRAY = 0x90
    ARRAY_16 = 0xDC
    BIN_8 = 0xC4


def contains_packed(SlotIndex index not None, uint64_t namespace_id, packed, Py_ssize_t most):
    """Return which keys have a readable slot now.

    Parameters
    ----------
    index : SlotIndex
    namespace_id : int
    packed : contiguous buffer
        The array, and nothing behind it.
    most : int
        How many keys there may be.

    Returns
    -------
    list of bool or None
        One a key. None where the buffer is anything but up to `most` keys of 1 to 223 bytes in
        the shortest form: what it is then is for a decoder to find out.
    """
    cdef Py_buffer view
    cdef const unsigned char *data
    cdef const unsigned char *at
    cdef const unsigned char *end
    cdef Py_ssize_t count, first, part, i, length
    cdef Sought sought[WINDOW]
    cdef Seen seen
    cdef list present
    index._require_open()
    PyObject_GetBuffer(packed, &view, PyBUF_SIMPLE)
    try:
        data = <const unsigned char *>view.buf
        end = data + view.len
        if view.len >= 1 and data[0] & 0xF0 == FIX_ARRAY:
            count = data[0] & 0x0F
            at = data + 1
        elif view.len >= 3 and data[0] == ARRAY_16:
            count = data[1] << 8 | data[2]
            at = data + 3
        else:
            return None
        # The length is checked before a list of it is made.
        if count > most or end - at < 3 * count:
            return None
        present = [False] * count
        for first in range(0, count, WINDOW):
            part = min(<Py_ssize_t>WINDOW, count - first)
            for i in range(part):
                if end - at < 2 or at[0] != BIN_8:
                    return None
                length = at[1]
                at += 2
                if not 1 <= length <= KEY_SIZE_MAX or end - at < length:
                    return None
                seek(&sought[i], namespace_id, <const char *>at, length)
                index.prefetch_entry(sought[i].hash)
                at += length
            for i in range(part):
                index.prefetch_record(sought[i].hash)
            for i in range(part):
                if index.look(&sought[i], &seen):
                    present[first + i] = True
        return present if at == end else None
    finally:
        PyBuffer_Release(&view)
