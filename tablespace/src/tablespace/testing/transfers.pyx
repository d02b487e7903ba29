"""Drive an `IoQueue` from Python: what the engine does without the GIL, for tests of devices."""

from cpython.buffer cimport (
    PyBUF_SIMPLE,
    PyBUF_WRITABLE,
    PyBuffer_Release,
    PyObject_GetBuffer,
)
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free

from tablespace.io.device cimport IO_READ, IO_WRITE, Completion, Device, IoQueue


def transfer(IoQueue queue not None, transfers):
    """Push transfers, submit them, and reap every one that was accepted.

    Parameters
    ----------
    queue : IoQueue
        With nothing in flight.
    transfers : sequence of (Device, str, buffer, int)
        Device, ``"read"`` or ``"write"``, a contiguous buffer, the offset in bytes.

    Returns
    -------
    tuple
        (what `push` answered to each: 0 or -errno, completions as they came: (position in
        `transfers`, bytes moved or -errno)).  A result may be short: the caller of a queue
        finishes it.
    """
    cdef uint32_t count = <uint32_t>len(transfers), at, held = 0, accepted = 0
    cdef Py_buffer *views = <Py_buffer *>calloc(max(1, count), sizeof(Py_buffer))
    cdef Completion *done = <Completion *>calloc(max(1, count), sizeof(Completion))
    cdef Device device
    cdef uint64_t offset
    cdef int code, got
    cdef bint reading
    pushed = []
    finished = []
    try:
        if views == NULL or done == NULL:
            raise MemoryError()
        for at in range(count):
            reading = transfers[at][1] == "read"
            PyObject_GetBuffer(transfers[at][2], &views[at],
                               PyBUF_WRITABLE if reading else PyBUF_SIMPLE)
            held += 1
        for at in range(count):
            device, kind, _, offset = transfers[at]
            reading = kind == "read"
            with nogil:
                code = queue.push(device, IO_READ if reading else IO_WRITE, views[at].buf,
                                  <size_t>views[at].len, offset, at)
            pushed.append(code)
            accepted += code == 0
        with nogil:
            code = queue.submit()
        if code < 0:
            raise OSError(-code, "submit")
        while accepted:
            with nogil:
                got = queue.reap(done, count, 1)
            if got <= 0:
                raise OSError(-got, f"reap, with {accepted} in flight")
            for at in range(<uint32_t>got):
                finished.append((done[at].tag, done[at].result))
            accepted -= <uint32_t>got
    finally:
        # Memory that a broken queue may still write to is never let go.
        if accepted == 0:
            for at in range(held):
                PyBuffer_Release(&views[at])
            free(views)
        free(done)
    return pushed, finished
