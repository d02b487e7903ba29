"""Events of an index, in runs of one kind: what a policy is told in one call."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport uint32_t
from libc.string cimport memcpy

# Before the key: the event's letter and the size of its slot, see `KeyIndex.tell`.
cdef Py_ssize_t HEAD_BYTES = 5


def next_run(events not None, Py_ssize_t limit):
    """Take the oldest events off a queue, as long as they are of one kind.

    Parameters
    ----------
    events : deque of bytes
        As `KeyIndex` queues them. Others may append meanwhile; only one may take.
    limit : int
        Take no more than so many.

    Returns
    -------
    (list of bytes, list of int)
        The keys and, of insertions, the bytes of their slots.
    """
    cdef list keys = [], sizes = []
    cdef bytes event
    cdef uint32_t slot_bytes
    cdef char kind = 0
    take = events.popleft
    while len(keys) < limit and events:
        event = take()
        if kind == 0:
            kind = PyBytes_AS_STRING(event)[0]
        elif kind != PyBytes_AS_STRING(event)[0]:
            events.appendleft(event)
            break
        if kind == b'i':
            memcpy(&slot_bytes, PyBytes_AS_STRING(event) + 1, 4)
            sizes.append(slot_bytes)
        keys.append(PyBytes_FromStringAndSize(
            PyBytes_AS_STRING(event) + HEAD_BYTES, PyBytes_GET_SIZE(event) - HEAD_BYTES))
    return keys, sizes
