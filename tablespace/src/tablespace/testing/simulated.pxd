from libc.stdint cimport uint32_t, uint64_t

from tablespace.io.device cimport Completion, Device, IoKind, IoQueue


cdef class SimulatedDevice(Device):
    cdef public object disk      # tablespace.testing.disk.Disk; another after a server's crash
    cdef readonly object node
    cdef readonly str label


cdef class SimulatedQueue(IoQueue):
    cdef readonly object disk
    cdef object random           # random.Random of the shuffle
    cdef list waiting            # pushed transfers, not reaped; each keeps its device alive
    cdef int add(self, SimulatedDevice device, IoKind kind, void *buffer, size_t length,
                 uint64_t offset, uint64_t tag) except? -1
    cdef int collect(self, Completion *out, uint32_t limit, uint32_t wait_for) except? -1
