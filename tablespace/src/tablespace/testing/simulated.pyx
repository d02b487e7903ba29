"""Devices and queues over a simulated disk: only the hooks are overridden.

Every check, short-transfer loop and error translation of `Device` and `IoQueue` is the
production code.  A queue completes its transfers in an order shuffled by seed, copies the source
of a write when it is pushed and compares it at the completion (a changed buffer is a violation
and junk on the disk), and fills the target of a read with junk until then.
"""

import random

from cpython.bytearray cimport PyByteArray_AS_STRING
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.errno cimport EIO, ENOSPC, ESTALE, ETIMEDOUT
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, memset

from tablespace.testing.bad_sectors import fails, garbled

from tablespace.io.device cimport IO_READ, Completion, Device, IoKind, IoQueue

cdef extern from "Python.h":
    void PyErr_SetInterrupt()

cdef int JUNK = 0xA5


cdef void interrupt(object disk) noexcept:
    """Raise SIGINT where a fault planned it: last in a hook, so that the engine's code gets it."""
    if disk.interrupting:
        disk.interrupting = False
        PyErr_SetInterrupt()


cdef int64_t fetch(object disk, object node, void *buffer, size_t length,
                   uint64_t offset) except? -1:
    """Copy visible bytes of a file; return how many there were, or -errno."""
    cdef bytearray live = disk.files.get(node)
    cdef size_t total
    if live is None:
        # Of a file that the crash of a server took away under a client that has it open.
        return -ESTALE
    total = len(live)
    if offset >= total:
        return 0
    if length > total - offset:
        length = total - offset
    memcpy(buffer, PyByteArray_AS_STRING(live) + offset, length)
    if disk.bad:
        for at in garbled(disk.bad, node, offset, length):
            (<unsigned char *>buffer)[<size_t>at] ^= 0xFF
    return <int64_t>length


cdef tuple plan(object disk, str kind, str label, size_t length, object node, uint64_t offset):
    """Return (bytes that really move, the result reported, when): 0, 1 for last, 2 for never."""
    fault = disk.meet(kind, label)
    if disk.bad and fails(disk.bad, kind, node, offset, length):
        return 0, -EIO, False
    if fault is None:
        return length, length, 0
    if fault.lose:
        return length, length, 2
    if fault.errno:
        # A failed write may have reached the medium in part.
        return (length // 2 if kind == "write" else 0), -fault.errno, fault.delay
    if fault.short and length > 1:
        part = max(1, length // 2)
        return part, part, fault.delay
    return length, length, fault.delay


cdef class SimulatedDevice(Device):
    """One file of a simulated disk.

    Parameters
    ----------
    disk : Disk
    node : int
    path : str
    direct : bool
        Whether the engine is to believe that O_DIRECT is in force (alignment is then checked).
    alignment_bytes, memory_alignment_bytes : int
    read_only : bool
    """

    def __init__(self, disk, node, str path, bint direct=False, uint32_t alignment_bytes=4096,
                 uint32_t memory_alignment_bytes=4096, bint read_only=False):
        self.disk = disk
        self.node = node
        self.identity = node
        self.read_only = read_only
        self.path = path
        self.label = disk.labels[node]
        self.direct = direct
        if direct:
            self.alignment_bytes = alignment_bytes
            self.memory_alignment_bytes = memory_alignment_bytes
        self.size_bytes = len(disk.files[node])

    cdef int64_t do_read(self, void *buffer, size_t length, uint64_t offset) noexcept nogil:
        with gil:
            try:
                part, result, _ = plan(self.disk, "read", self.label, length, self.node, offset)
                if result < 0:
                    return result
                return fetch(self.disk, self.node, buffer, part, offset)
            except BaseException as error:
                self.disk.violations.append(f"read {self.label}: {error!r}")
                return -EIO

    cdef int64_t do_write(self, const void *buffer, size_t length,
                          uint64_t offset) noexcept nogil:
        with gil:
            try:
                part, result, _ = plan(self.disk, "write", self.label, length, self.node, offset)
                room = max(0, self.disk.room(self.node, offset + part) - offset)
                if room < part:
                    # What still fits is written, as a kernel does.
                    part = room
                    result = part if part else -ENOSPC
                if part:
                    data = PyBytes_FromStringAndSize(<const char *>buffer, part)
                    ident = self.disk.begin_write(self.node, offset, data)
                    self.disk.finish_write(self.node, offset, data, ident)
                interrupt(self.disk)
                return result
            except BaseException as error:
                self.disk.violations.append(f"write {self.label}: {error!r}")
                return -EIO

    cdef int do_sync(self) noexcept nogil:
        with gil:
            try:
                code = self.disk.sync_file(self.node, self.label)
                interrupt(self.disk)
                return code
            except BaseException as error:
                self.disk.violations.append(f"sync {self.label}: {error!r}")
                return -EIO

    cdef int do_truncate(self, uint64_t size_bytes) noexcept nogil:
        return resize(self, size_bytes)

    cdef int do_allocate(self, uint64_t size_bytes) noexcept nogil:
        cdef int code = keep(self, size_bytes)
        return resize(self, size_bytes) if code == 0 else code

    cdef int do_reserve(self, uint64_t size_bytes) noexcept nogil:
        return keep(self, size_bytes)

    cdef int64_t do_first_hole(self, uint64_t offset) noexcept nogil:
        with gil:
            return self.disk.first_hole(self.node, offset)

    cdef int do_close(self) noexcept nogil:
        with gil:
            if self.disk.locks.get(self.node) is self:
                del self.disk.locks[self.node]
        return 0


cdef int resize(SimulatedDevice device, uint64_t size_bytes) noexcept with gil:
    try:
        fault = device.disk.meet("length", device.label)
        if fault is not None and fault.errno:
            return -fault.errno
        device.disk.set_length(device.node, size_bytes)
        interrupt(device.disk)
        return 0
    except BaseException as error:
        device.disk.violations.append(f"length {device.label}: {error!r}")
        return -EIO


cdef int keep(SimulatedDevice device, uint64_t size_bytes) noexcept with gil:
    try:
        fault = device.disk.meet("reserve", device.label)
        if fault is not None and fault.errno:
            return -fault.errno
        code = device.disk.reserve(device.node, size_bytes)
        interrupt(device.disk)
        return code
    except BaseException as error:
        device.disk.violations.append(f"reserve {device.label}: {error!r}")
        return -EIO


cdef class Transfer:
    """One transfer in flight."""

    cdef SimulatedDevice device
    cdef IoKind kind
    cdef void *buffer         # borrowed from the caller until the completion is reaped
    cdef size_t length
    cdef uint64_t offset
    cdef uint64_t tag
    cdef bytes copy           # of a write's source, all of it
    cdef size_t part          # bytes that move
    cdef int64_t result
    cdef int late             # 1: completes after all others, 2: never
    cdef object ident

    cdef int complete(self) except -1:
        cdef object disk = self.device.disk
        if self.kind == IO_READ:
            if self.result >= 0:
                self.result = fetch(disk, self.device.node, self.buffer, self.part, self.offset)
            return 0
        data = self.copy
        if memcmp(PyBytes_AS_STRING(self.copy), self.buffer, self.length):
            disk.violations.append(
                f"the source of a write of {self.length} bytes at {self.offset} of "
                f"{self.device.label} changed in flight")
            data = bytes([JUNK]) * self.length
        if self.part:
            disk.finish_write(self.device.node, self.offset, data[:self.part], self.ident)
        return 0


cdef class SimulatedQueue(IoQueue):
    """Transfers to simulated devices, completed in an order shuffled by the disk's seed.

    Parameters
    ----------
    disk : Disk
    depth : int
    engine : str
        The name to report.
    """

    def __init__(self, disk, uint32_t depth=32, str engine="simulated"):
        self.disk = disk
        self.depth = depth
        self.engine = engine
        self.random = random.Random(disk.random.random())
        self.waiting = []

    cdef int do_push(self, Device device, IoKind kind, void *buffer, size_t length,
                     uint64_t offset, uint64_t tag) noexcept nogil:
        with gil:
            try:
                return self.add(<SimulatedDevice?>device, kind, buffer, length, offset, tag)
            except BaseException as error:
                self.disk.violations.append(f"push: {error!r}")
                return -EIO

    cdef int add(self, SimulatedDevice device, IoKind kind, void *buffer, size_t length,
                 uint64_t offset, uint64_t tag) except? -1:
        cdef Transfer transfer = Transfer.__new__(Transfer)
        transfer.device = device
        transfer.kind = kind
        transfer.buffer = buffer
        transfer.length = length
        transfer.offset = offset
        transfer.tag = tag
        transfer.part, transfer.result, transfer.late = plan(
            self.disk, "read" if kind == IO_READ else "write", device.label, length,
            device.node, offset)
        if kind == IO_READ:
            memset(buffer, JUNK, length)
        else:
            transfer.copy = PyBytes_FromStringAndSize(<const char *>buffer, length)
            if transfer.part:
                transfer.ident = self.disk.begin_write(device.node, offset,
                                                       transfer.copy[:transfer.part])
        self.waiting.append(transfer)
        return 0

    cdef int do_submit(self) noexcept nogil:
        with gil:
            try:
                fault = self.disk.meet("submit", "")
                interrupt(self.disk)
                return -fault.errno if fault is not None else 0
            except BaseException as error:
                self.disk.violations.append(f"submit: {error!r}")
                return -EIO

    cdef int do_reap(self, Completion *out, uint32_t limit, uint32_t wait_for) noexcept nogil:
        with gil:
            try:
                got = self.collect(out, limit, wait_for)
                interrupt(self.disk)
                return got
            except BaseException as error:
                self.disk.violations.append(f"reap: {error!r}")
                return -EIO

    cdef int collect(self, Completion *out, uint32_t limit, uint32_t wait_for) except? -1:
        cdef Transfer transfer
        cdef uint32_t got = 0, wanted
        fault = self.disk.meet("reap", "")
        if fault is not None and fault.errno:
            return -fault.errno
        wanted = self.random.randint(wait_for, max(wait_for, min(limit, len(self.waiting))))
        wanted = min(wanted, limit)
        while got < wanted and self.waiting:
            prompt = [at for at in range(len(self.waiting))
                      if not (<Transfer>self.waiting[at]).late]
            late = [at for at in range(len(self.waiting)) if (<Transfer>self.waiting[at]).late < 2]
            if prompt:
                at = self.random.choice(prompt)
            elif got < wait_for and late:
                at = late[0]
            elif got or not wait_for:
                break
            elif self.timeout_ns:
                return -ETIMEDOUT
            else:
                self.disk.violations.append("a wait without end")
                return -EIO
            transfer = self.waiting.pop(at)
            transfer.complete()
            out[got].tag = transfer.tag
            out[got].result = transfer.result
            got += 1
        return <int>got

    @property
    def waiting_count(self):
        """Number of transfers pushed and not reaped."""
        return len(self.waiting)

    def close(self):
        """Free the queue; a transfer still in flight is a violation."""
        if self.waiting:
            self.disk.violations.append(f"a queue was closed with {len(self.waiting)} in flight")
        self.waiting = []
