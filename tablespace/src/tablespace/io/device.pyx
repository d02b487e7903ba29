"""The seam to bytes: `Device` is one file's bytes, `IoQueue` is where many transfers fly at once.

Public methods check bounds, finish short transfers and translate errors; hooks (`do_*`) do the
work and know nothing else.  Real and simulated devices override only hooks, so every check below
also runs in tests.  Errors below Python are values: bytes moved, or a negative errno.
"""

import os

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.exc cimport PyErr_CheckSignals
from cpython.ref cimport Py_INCREF
from libc.errno cimport (
    EAGAIN,
    EBADF,
    EDQUOT,
    EINTR,
    EINVAL,
    EIO,
    ENOSPC,
    ENOSYS,
    ENXIO,
    ESTALE,
)
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memset

cdef char[65536] FILLER
memset(FILLER, 10, sizeof(FILLER))

# A transfer that stays short this often in a row is an error, not a slow disk.
cdef int MAX_PIECES = 64


def os_error(int code, str path):
    """Return the OSError (Python picks the subclass) for a negative errno."""
    text = os.strerror(-code)
    if -code == ESTALE:
        text += ", or removed while it was open"
    return OSError(-code, text, path)


def keep_for_ever(thing):
    """Never free an object: the kernel may still read or write memory that it holds.

    Not by a reference in some list, which ends with the module at the latest.
    """
    Py_INCREF(thing)


cdef class Device:
    """The bytes of one file.

    Attributes
    ----------
    size_bytes : int
        Length; reads and writes beyond it are refused.
    alignment_bytes, memory_alignment_bytes : int
        What direct transfers need of offsets and lengths, and of addresses; 1 where any will do.
    direct : bool
        Whether O_DIRECT is in force now (a refusal at write time turns it off).
    read_only : bool
        Whether it was opened for reading alone: whatever would change the file fails with EBADF.
    identity : object
        Equal for two open devices exactly when they are of the same file.

    Notes
    -----
    Methods may be called from several threads at once; the kernel orders nothing between them.
    """

    def __cinit__(self, *args, **kwargs):
        self.fd = -1
        self.alignment_bytes = 1
        self.memory_alignment_bytes = 1

    cdef int64_t do_read(self, void *buffer, size_t length, uint64_t offset) noexcept nogil:
        return -ENOSYS

    cdef int64_t do_write(self, const void *buffer, size_t length,
                          uint64_t offset) noexcept nogil:
        return -ENOSYS

    cdef int do_sync(self) noexcept nogil:
        return -ENOSYS

    cdef void do_forget(self, uint64_t offset, uint64_t length) noexcept nogil:
        pass

    cdef int do_truncate(self, uint64_t size_bytes) noexcept nogil:
        return -ENOSYS

    cdef int do_allocate(self, uint64_t size_bytes) noexcept nogil:
        return -ENOSYS

    cdef int do_reserve(self, uint64_t size_bytes) noexcept nogil:
        return -ENOSYS

    cdef int64_t do_first_hole(self, uint64_t offset) noexcept nogil:
        return -ENOSYS

    cdef int do_close(self) noexcept nogil:
        return 0

    cdef int64_t fits(self, size_t length, uint64_t offset) noexcept nogil:
        if self.closed:
            return -ENXIO
        if length > self.size_bytes or offset > self.size_bytes - length:
            return -EINVAL
        return 0

    cdef int64_t finish(self, IoKind kind, void *buffer, size_t length, uint64_t offset,
                        int64_t result) noexcept nogil:
        """Turn one transfer's first result into a whole transfer or an error, with a bound.

        A read that meets the end of the file is an error here: every caller knows how long the
        file is, so a shorter one has lost bytes.
        """
        cdef size_t done = 0
        cdef int pieces = 0
        while True:
            if result > 0:
                done += <size_t>result
                if done > length:
                    return -EIO
                if done == length:
                    return <int64_t>length
            elif result == 0:
                return -EIO
            elif result != -EINTR and result != -EAGAIN:
                # A first -EINVAL may be O_DIRECT refused late: the hook leaves it and tries again
                # (another transfer's may have done so already, hence no look at `direct`).
                if result != -EINVAL or pieces:
                    return result
            pieces += 1
            if pieces > MAX_PIECES:
                return -EIO
            if kind == IO_READ:
                result = self.do_read(<char *>buffer + done, length - done, offset + done)
            else:
                result = self.do_write(<char *>buffer + done, length - done, offset + done)

    cdef int64_t read(self, void *buffer, size_t length, uint64_t offset) noexcept nogil:
        """Read exactly `length` bytes; return them, or -errno (-EIO where the file is shorter)."""
        cdef int64_t code = self.fits(length, offset)
        if code < 0 or length == 0:
            return code
        return self.finish(IO_READ, buffer, length, offset, self.do_read(buffer, length, offset))

    cdef int64_t write(self, const void *buffer, size_t length, uint64_t offset) noexcept nogil:
        """Write exactly `length` bytes within the file's size; return them, or -errno."""
        cdef int64_t code = -EBADF if self.read_only else self.fits(length, offset)
        if code < 0 or length == 0:
            return code
        return self.finish(IO_WRITE, <void *>buffer, length, offset,
                           self.do_write(buffer, length, offset))

    cdef int sync(self) noexcept nogil:
        if self.closed:
            return -ENXIO
        return -EBADF if self.read_only else self.do_sync()

    cdef void forget(self, uint64_t offset, uint64_t length) noexcept nogil:
        """Drop synced bytes from the page cache where possible, so that a read asks the medium."""
        if not self.closed and not self.direct:
            self.do_forget(offset, length)

    cdef uint64_t end(self) noexcept nogil:
        """Where the next append goes: the file's length less its filler."""
        return self.size_bytes - self.slack_bytes

    cdef int64_t extend(self, const void *buffer, size_t length) noexcept nogil:
        """Write at the end, over filler where there is some; return the bytes, or -errno.

        On an error what lies behind the end is undefined; `cut` removes it.
        """
        cdef uint64_t start = self.end()
        cdef int64_t code
        if self.closed:
            return -ENXIO
        if self.read_only:
            return -EBADF
        if length == 0:
            return 0
        if length > self.slack_bytes and self.filler_bytes:
            self.lay_filler()
        code = self.finish(IO_WRITE, <void *>buffer, length, start,
                           self.do_write(buffer, length, start))
        if code < 0:
            return code
        if length <= self.slack_bytes:
            self.slack_bytes -= length
        else:
            self.size_bytes = start + length
            self.slack_bytes = 0
        return code

    cdef int make_room(self, size_t length) noexcept nogil:
        """Get the space for an append before any of it is written; 0, -ENOSPC or -EDQUOT.

        So an append that does not fit leaves nothing to cut, and the file keeps its space.
        """
        cdef int code
        if self.closed or length <= self.slack_bytes:
            return 0
        if self.filler_bytes:
            self.lay_filler()
        if length <= self.slack_bytes:
            return 0
        code = self.do_reserve(self.end() + length)
        return code if code == -ENOSPC or code == -EDQUOT else 0

    cdef void lay_filler(self) noexcept nogil:
        """Write newlines behind the end, so that the appends to come change no length.

        A sync after a growing append also writes the file's new length.  Where there is no room
        the file simply grows.
        """
        cdef uint64_t at = self.size_bytes
        cdef size_t left = self.filler_bytes, piece
        while left:
            piece = min(left, sizeof(FILLER))
            if self.finish(IO_WRITE, FILLER, piece, at, self.do_write(FILLER, piece, at)) < 0:
                return
            at += piece
            left -= piece
            self.size_bytes += piece
            self.slack_bytes += piece

    cdef int cut(self, uint64_t size_bytes) noexcept nogil:
        """Shorten the file, durably; 0, or -errno."""
        cdef int code
        if self.closed:
            return -ENXIO
        if self.read_only:
            return -EBADF
        code = self.do_truncate(size_bytes)
        if code == 0:
            self.size_bytes = size_bytes
            self.slack_bytes = 0
            code = self.do_sync()
        return code

    # The same from Python, raising OSError: for what is not on the hot path.

    def read_at(self, uint64_t offset, size_t length):
        """Read exactly `length` bytes at `offset`."""
        cdef bytes out = PyBytes_FromStringAndSize(NULL, length)
        cdef char *data = PyBytes_AS_STRING(out)
        cdef int64_t code
        with nogil:
            code = self.read(data, length, offset)
        if code < 0:
            raise os_error(<int>code, self.path)
        return out

    def read_into(self, uint64_t offset, buffer):
        """Fill a whole writable buffer from `offset` on."""
        cdef Py_buffer view
        cdef int64_t code
        PyObject_GetBuffer(buffer, &view, PyBUF_WRITABLE)
        try:
            with nogil:
                code = self.read(view.buf, view.len, offset)
        finally:
            PyBuffer_Release(&view)
        if code < 0:
            raise os_error(<int>code, self.path)

    def write_at(self, uint64_t offset, data):
        """Write a whole buffer at `offset`, within the file's size."""
        cdef Py_buffer view
        cdef int64_t code
        PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
        try:
            with nogil:
                code = self.write(view.buf, view.len, offset)
        finally:
            PyBuffer_Release(&view)
        if code < 0:
            raise os_error(<int>code, self.path)

    def append(self, data):
        """Write a buffer at the end of the file, which grows by it (or by whole filler).

        On an error what lies behind the end is undefined.
        """
        cdef Py_buffer view
        cdef int64_t code
        PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
        try:
            with nogil:
                code = self.extend(view.buf, view.len)
        finally:
            PyBuffer_Release(&view)
        if code < 0:
            raise os_error(<int>code, self.path)

    def sync_data(self):
        """Make all written bytes durable (fdatasync)."""
        cdef int code
        with nogil:
            code = self.sync()
        if code < 0:
            raise os_error(code, self.path)

    def truncate(self, uint64_t size_bytes):
        """Set the file's length."""
        cdef int code = -EBADF if self.read_only else -ENXIO
        if not self.closed and not self.read_only:
            with nogil:
                code = self.do_truncate(size_bytes)
        if code < 0:
            raise os_error(code, self.path)
        self.size_bytes = size_bytes
        self.slack_bytes = 0

    @property
    def end_bytes(self):
        """The length without filler: where the next append goes."""
        return self.end()

    def allocate(self, uint64_t size_bytes):
        """Make the file `size_bytes` long with its space reserved on the disk."""
        cdef int code = -EBADF if self.read_only else -ENXIO
        cdef int tries
        if not self.closed and not self.read_only:
            for tries in range(MAX_PIECES):
                with nogil:
                    code = self.do_allocate(size_bytes)
                if code != -EINTR:
                    break
                PyErr_CheckSignals()
        if code < 0:
            raise os_error(code, self.path)
        self.size_bytes = size_bytes

    def drop_cached(self, uint64_t offset, size_t length):
        """Let a cache of this machine forget a range, so that the next read asks the medium."""

    def reserve(self, uint64_t size_bytes):
        """Reserve space on the disk up to `size_bytes`; the file's length stays as it is."""
        cdef int code = -ENXIO
        cdef int tries
        if self.read_only:
            code = -EBADF
        elif not self.closed:
            for tries in range(MAX_PIECES):
                with nogil:
                    code = self.do_reserve(size_bytes)
                if code != -EINTR:
                    break
                PyErr_CheckSignals()
        if code < 0:
            raise os_error(code, self.path)

    def first_hole(self, uint64_t offset):
        """Return where the first part from `offset` on begins that was never written.

        The file's size where all of it was.
        """
        cdef int64_t found = -ENXIO
        if not self.closed:
            with nogil:
                found = self.do_first_hole(offset)
        if found < 0:
            raise os_error(<int>found, self.path)
        return found

    def count_as_filler(self):
        """Let appends begin at the start of the file, over what is there."""
        self.slack_bytes = self.size_bytes

    def close(self):
        """Close the file; further calls fail with ENXIO."""
        if not self.closed:
            self.closed = True
            with nogil:
                self.do_close()


cdef class IoQueue:
    """Transfers in flight together; completions come in any order.

    One thread at a time may use a queue.  `push` borrows the buffer until the transfer's
    completion has been reaped.
    """

    def __cinit__(self, *args, **kwargs):
        self.engine = "none"

    cdef int do_push(self, Device device, IoKind kind, void *buffer, size_t length,
                     uint64_t offset, uint64_t tag) noexcept nogil:
        return -ENOSYS

    cdef int do_submit(self) noexcept nogil:
        return -ENOSYS

    cdef int do_reap(self, Completion *out, uint32_t limit, uint32_t wait_for) noexcept nogil:
        return -ENOSYS

    cdef int push(self, Device device, IoKind kind, void *buffer, size_t length, uint64_t offset,
                  uint64_t tag) noexcept nogil:
        """Add a transfer; it may start before `submit`. -EAGAIN when `depth` are in flight."""
        cdef int64_t code = device.fits(length, offset)
        if code < 0:
            return <int>code
        if kind == IO_WRITE and device.read_only:
            return -EBADF
        if self.in_flight >= self.depth:
            return -EAGAIN
        if device.direct and (offset % device.alignment_bytes or length % device.alignment_bytes
                              or <size_t>buffer % device.memory_alignment_bytes):
            return -EINVAL
        code = self.do_push(device, kind, buffer, length, offset, tag)
        if code == 0:
            self.in_flight += 1
        return <int>code

    cdef int submit(self) noexcept nogil:
        """Start everything pushed so far."""
        return self.do_submit()

    cdef int reap(self, Completion *out, uint32_t limit, uint32_t wait_for) noexcept nogil:
        """Collect up to `limit` completions, waiting for at least `wait_for`; return how many.

        Fewer when `timeout_ns` is over first, and -ETIMEDOUT when there were none until then.
        """
        cdef int got
        if wait_for > self.in_flight:
            wait_for = self.in_flight
        if self.in_flight == 0 or limit == 0:
            return 0
        got = self.do_reap(out, limit, wait_for)
        if got > 0:
            self.in_flight -= got
        return got

    def close(self):
        """Free the queue; nothing may be in flight."""

    def abandon(self):
        """Start nothing more of what was pushed: what is in flight may never end."""


cdef class IoContext:
    """What one thread needs for a batch of transfers: a queue and aligned staging memory."""

    def __init__(self, IoQueue queue not None, AlignedBuffer staging not None):
        self.queue = queue
        self.staging = staging

    def close(self):
        self.queue.close()
        self.staging.close()

    def abandon(self):
        """Leave queue and memory to transfers that may be in flight for ever."""
        self.queue.abandon()
        keep_for_ever(self)
