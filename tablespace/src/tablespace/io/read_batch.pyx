# cython: boundscheck=False
# C arrays only, every index below `count`.
"""Many reads in flight in one call, each verified as it completes."""

import os

cimport cython
from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport (
    PyBytes_AS_STRING,
    PyBytes_Check,
    PyBytes_FromStringAndSize,
    PyBytes_GET_SIZE,
)
from libc.errno cimport EAGAIN, EILSEQ, ENOMEM, ETIMEDOUT
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from posix.stdlib cimport posix_memalign

from tablespace._core.block_copy cimport copy_block
from tablespace._core.checksum cimport hash_key, xxh3_64
from tablespace._core.key_index cimport Entry, KeyIndex, raw_length
from tablespace._core.lending cimport Lending, Loan
from tablespace._core.key_index import check_key
from tablespace._core.slot_allocator cimport location_container, location_slot
from tablespace.io.deadline import timeout_error
from tablespace.io.device cimport (
    IO_READ,
    Completion,
    Device,
    IoContext,
    IoQueue,
    is_medium_error,
)
from tablespace.io.device import keep_for_ever

cdef uint64_t PAD_BYTES = 4096
# Stands in a list of buffers for "make a bytes object".
NEW_BYTES = object()
# Completed reads are replaced in the queue at the latest after this many.
cdef enum:
    REAP_LIMIT = 4

cdef struct Read:
    Py_buffer view         # the caller's buffer, while `held`
    bint held
    unsigned char *target  # where the value goes
    size_t room            # bytes that may be written at target
    uint64_t location
    uint64_t offset        # of the slot in its container
    uint64_t check
    uint64_t seq
    uint32_t length
    uint32_t raw           # the value's length where it is compressed, else 0
    int64_t entry          # the entry found (pinned, where the batch pins), or -1
    int64_t result         # bytes, or -errno; -EILSEQ: the checksum does not fit
    void *buffer           # where the transfer lands: target, or a staging frame
    int32_t frame


@cython.no_gc_clear  # __dealloc__ unpins in the index, which must still be there.
cdef class ReadBatch:
    """The reads of one call.

    Parameters
    ----------
    index : KeyIndex
    devices : list of Device
        One a container, in order.
    slot_bytes : int
        The largest slot: what one read needs of staging.
    verify : bool
        Whether to check each value's checksum.
    pin : bool
        Whether the slots are held while they are read. A follower holds nothing: the writer
        reuses slots without asking, and only the checksum tells.

    Notes
    -----
    `start` (GIL held) looks up and pins; `run` reads with the GIL released and unpins.  What was
    started and never run unpins when it is freed.

    Attributes
    ----------
    codec : tablespace.compression.Codec or None
        What unpacks compressed values; they are errors without it.
    describes : bool
        Whether to return the fields of each value's `tablespace.Entry` in place of its length.
    cached : bool
        Whether a value came through the page cache.
    """

    cdef KeyIndex index
    cdef list device_list
    cdef void **devices
    cdef uint64_t slot_bytes
    cdef bint verify
    cdef bint pins
    cdef Read *reads
    cdef readonly uint32_t count
    cdef list keys
    cdef list out
    cdef dict packed               # stored bytes of compressed values, by number
    cdef public object codec
    cdef bint stuck
    cdef public bint describes
    cdef readonly bint cached
    cdef list rows
    cdef readonly uint64_t bytes_read
    cdef readonly uint32_t hits

    def __cinit__(self, KeyIndex index not None, list devices not None, uint64_t slot_bytes,
                  bint verify, bint pin=True):
        cdef uint32_t at
        self.index = index
        self.device_list = devices
        self.devices = <void **>malloc(max(1, len(devices)) * sizeof(void *))
        if self.devices == NULL:
            raise MemoryError()
        for at in range(<uint32_t>len(devices)):
            self.devices[at] = <void *>devices[at]
        self.slot_bytes = slot_bytes
        self.verify = verify
        self.pins = pin
        self.packed = {}

    def __dealloc__(self):
        if not self.stuck:
            self.release()
        free(self.devices)
        free(self.reads)

    def abandon(self):
        """Keep pins and buffers for ever: the kernel may still write into them."""
        self.stuck = True
        keep_for_ever(self)

    def start(self, list keys not None, list buffers, bint use=True):
        """Look up and pin.

        Parameters
        ----------
        keys : list of bytes
        buffers : list of writable buffers or None
            One a key, or `NEW_BYTES`; None to get bytes objects for all.
        use : bool
            Whether this is a use, which makes the entries the most recent ones.

        Raises
        ------
        ValueError
            When a buffer is shorter than its value, naming both sizes; nothing stays pinned.
        """
        cdef uint32_t total = <uint32_t>len(keys)
        cdef Py_ssize_t at
        cdef Read *read
        cdef Entry *entry
        cdef int64_t id
        cdef object key, value
        cdef const uint8_t *data
        self.keys = keys
        self.out = [None] * total
        self.rows = [None] * total if self.describes else None
        self.reads = <Read *>calloc(max(1, total), sizeof(Read))
        if self.reads == NULL:
            raise MemoryError()
        try:
            for at in range(total):
                read = &self.reads[at]
                read.entry = -1
                read.frame = -1
                read.result = -EAGAIN
                self.count = <uint32_t>at + 1
                key = keys[at]
                if not PyBytes_Check(key):
                    check_key(key)
                data = <const uint8_t *>PyBytes_AS_STRING(key)
                id = self.index.find(data, PyBytes_GET_SIZE(key),
                                     hash_key(data, PyBytes_GET_SIZE(key)))
                if id < 0 or (self.pins and not self.index.pin(<uint32_t>id)):
                    continue
                read.entry = id
                entry = self.index.entry(<uint32_t>id)
                read.location = entry.location
                # Now: the container may change its pool under an entry that is not pinned.
                read.offset = (location_slot(entry.location)
                               * self.index.allocator.slot_bytes_of(entry.location))
                read.check = entry.check
                read.length = entry.length
                read.seq = entry.seq
                read.raw = raw_length(entry)
                if self.describes:
                    self.rows[at] = self.index.row(<uint32_t>id)
                # Before any Python code can run (an object's own buffer protocol may).
                if use:
                    self.index.use(<uint32_t>id)
                if read.raw:
                    self.codec.load()
                if buffers is not None and buffers[at] is not NEW_BYTES:
                    PyObject_GetBuffer(buffers[at], &read.view, PyBUF_WRITABLE)
                    read.held = True
                    read.target = <unsigned char *>read.view.buf
                    read.room = <size_t>read.view.len
                    if read.room < max(read.raw, read.length):
                        raise ValueError(
                            f"the buffer for key hex:{key.hex()} (number {at}) has {read.room} "
                            f"bytes, its value {read.raw or read.length}. Remedy: a longer buffer")
                if read.raw or not read.held:
                    value = PyBytes_FromStringAndSize(NULL, read.length)
                    read.target = <unsigned char *>PyBytes_AS_STRING(value)
                    read.room = read.length
                    if read.raw:
                        self.packed[at] = value
                    else:
                        self.out[at] = value
        except BaseException:
            self.release()
            raise

    def run(self, Lending readers not None):
        """Read everything pinned, in a context that is lent for it, and unpin.

        One step for callers, so that no signal's exception can strike between a loan and its end.

        Returns
        -------
        tuple
            As `finish`.

        Raises
        ------
        ClosedError, OSError, MemoryError
            No context could be had.
        OSError
            The queue itself broke: the context, and this with all that it holds, is never used
            again nor freed while transfers may be in flight.
        TimeoutError
            When nothing completed for as long as the queue's `timeout_ns`: the same.
        """
        cdef int code
        cdef Loan loan
        cdef IoContext context
        try:
            loan = readers.lend()
        except BaseException:
            self.release()
            raise
        context = <IoContext?>loan.item
        with nogil:
            code = self.read_all(context.queue, context.staging.data, context.staging.size_bytes)
        if code >= 0:
            loan.end()
            return self.finish()
        if context.queue.in_flight:
            self.abandon()
            context.abandon()
            loan.bury(self)
        else:
            loan.end()
            self.release()
        if code == -ETIMEDOUT:
            raise timeout_error(f"a read of {self.count} keys", context.queue.timeout_ns)
        raise OSError(-code, os.strerror(-code), "IO queue")

    cdef int read_all(self, IoQueue queue, unsigned char *staging,
                      size_t staging_bytes) noexcept nogil:
        cdef uint32_t frames = <uint32_t>(staging_bytes // self.slot_bytes)
        cdef uint32_t *stack = <uint32_t *>malloc((frames + 1) * sizeof(uint32_t))
        cdef uint32_t free_frames = frames, at
        cdef Completion done[REAP_LIMIT]
        cdef Read *read
        cdef int code = 0, got, item
        if stack == NULL or frames == 0:
            free(stack)
            return -ENOMEM
        for at in range(frames):
            stack[at] = frames - 1 - at
        at = self.fill(queue, 0, staging, stack, &free_frames)
        while queue.in_flight:
            code = queue.submit()
            if code < 0:
                break
            got = queue.reap(done, REAP_LIMIT, 1)
            if got < 0:
                code = got
                break
            # The next reads start before these are verified, so that the disk never waits for us.
            at = self.fill(queue, at, staging, stack, &free_frames)
            code = queue.submit()
            if code < 0:
                break
            for item in range(got):
                read = &self.reads[done[item].tag]
                self.complete(read, done[item].result)
                if read.frame >= 0:
                    stack[free_frames] = <uint32_t>read.frame
                    free_frames += 1
                    read.frame = -1
            if queue.in_flight == 0:
                at = self.fill(queue, at, staging, stack, &free_frames)
        free(stack)
        return code if code < 0 else 0

    cdef uint32_t fill(self, IoQueue queue, uint32_t at, unsigned char *staging, uint32_t *stack,
                       uint32_t *free_frames) noexcept nogil:
        """Push reads from number `at` on while queue and staging have room; return the next."""
        cdef Read *read
        cdef size_t padded
        cdef int code
        while at < self.count and queue.in_flight < queue.depth:
            read = &self.reads[at]
            if read.entry < 0:
                at += 1
                continue
            if read.length == 0:
                read.result = 0
                if self.verify and read.check != xxh3_64(b"", 0):
                    read.result = -EILSEQ
                at += 1
                continue
            padded = self.padded_length(read)
            if read.room >= padded and <size_t>read.target % self.memory_alignment(read) == 0:
                read.buffer = read.target
            elif free_frames[0]:
                free_frames[0] -= 1
                read.frame = <int32_t>stack[free_frames[0]]
                read.buffer = staging + read.frame * self.slot_bytes
            else:
                return at
            code = self.push(queue, read, padded, at)
            if code < 0:
                read.result = code
                if read.frame >= 0:
                    stack[free_frames[0]] = <uint32_t>read.frame
                    free_frames[0] += 1
                    read.frame = -1
            at += 1
        return at

    cdef size_t padded_length(self, Read *read) noexcept nogil:
        """What a transfer of this value must be long: whole blocks where the device is direct."""
        cdef uint32_t unit = (
            <Device>self.devices[location_container(read.location)]).alignment_bytes
        return (read.length + unit - 1) // unit * unit

    cdef uint64_t offset_of(self, Read *read) noexcept nogil:
        return read.offset

    cdef uint32_t memory_alignment(self, Read *read) noexcept nogil:
        return (<Device>self.devices[location_container(read.location)]).memory_alignment_bytes

    cdef int push(self, IoQueue queue, Read *read, size_t padded, uint64_t tag) noexcept nogil:
        return queue.push(<Device>self.devices[location_container(read.location)], IO_READ,
                          read.buffer, padded, self.offset_of(read), tag)

    cdef void complete(self, Read *read, int64_t result) noexcept nogil:
        """Finish a short read, verify, and copy out of staging."""
        cdef size_t padded = self.padded_length(read)
        cdef uint32_t at = location_container(read.location)
        if result != <int64_t>padded:
            result = (<Device>self.devices[at]).finish(
                IO_READ, read.buffer, padded, self.offset_of(read), result)
        if not (<Device>self.devices[at]).direct:
            self.cached = True
        if result < 0:
            read.result = result
        elif self.verify and xxh3_64(read.buffer, read.length) != read.check:
            self.read_again(read, padded)
        else:
            if read.buffer != read.target:
                copy_block(read.target, read.buffer, read.length)
            read.result = read.length

    cdef void read_again(self, Read *read, size_t padded) noexcept nogil:
        """Read once more into memory of our own: nobody else can have changed that.

        The first read may have gone straight into the caller's buffer, which other threads or
        processes may write to.  Only a second mismatch says that the medium is at fault.
        """
        cdef void *private = NULL
        cdef int64_t result
        if posix_memalign(&private, PAD_BYTES, padded) != 0:
            read.result = -ENOMEM
            return
        result = (<Device>self.devices[location_container(read.location)]).read(
            private, padded, self.offset_of(read))
        if result >= 0 and xxh3_64(private, read.length) != read.check:
            result = -EILSEQ
        if result >= 0:
            copy_block(read.target, private, read.length)
            result = read.length
        read.result = result
        free(private)

    def finish(self):
        """Unpack what is compressed, and unpin everything.

        Returns
        -------
        tuple
            (results, suspects, errors): results as the caller gets them (bytes or a length; None
            for a miss), suspects as (key, seq) of values that are damaged or unreadable (where the
            batch does not pin: unreadable for any reason), and the first other error as an errno
            or 0.
        """
        cdef uint32_t at
        cdef Read *read
        cdef list suspects = []
        cdef int first_error = 0
        try:
            for at in range(self.count):
                read = &self.reads[at]
                if read.entry < 0:
                    continue
                if read.raw and read.result >= 0:
                    self.unpack(at, read)
                if read.result >= 0:
                    self.hits += 1
                    self.bytes_read += read.length
                    if self.describes:
                        self.out[at] = self.rows[at]
                    elif read.held:
                        self.out[at] = read.raw or read.length
                else:
                    self.out[at] = None
                    if is_medium_error(read.result):
                        suspects.append((self.keys[at], read.seq))
                    else:
                        if not self.pins:
                            suspects.append((self.keys[at], read.seq))
                        if first_error == 0:
                            first_error = <int>-read.result
        finally:
            self.release()
        return self.out, suspects, first_error

    cdef int unpack(self, uint32_t at, Read *read) except -1:
        """Make the value of stored bytes; what is no compressed value of its length is damage."""
        value = self.codec.unpack(self.packed.pop(at), read.raw)
        if value is None:
            read.result = -EILSEQ
        elif read.held:
            copy_block(read.view.buf, PyBytes_AS_STRING(value), read.raw)
        else:
            self.out[at] = value
        return 0

    cdef void release(self):
        cdef uint32_t at
        cdef Read *read
        for at in range(self.count):
            read = &self.reads[at]
            if read.held:
                read.held = False
                PyBuffer_Release(&read.view)
            if read.entry >= 0 and self.pins:
                self.index.unpin(<uint32_t>read.entry)
            read.entry = -1
