"""The io_uring engine, on liburing's C functions resolved at import.

The `liburing` distribution's shared object exports the whole C API (inline helpers too); its
Python wrapper is never called.  Where that object lacks the symbols, the system's
`liburing-ffi.so.2` is tried.  Nothing is trusted before one NOP has gone through a ring.
"""

from libc.errno cimport (
    EACCES,
    EAGAIN,
    EBUSY,
    EINTR,
    EIO,
    EMFILE,
    ENFILE,
    ENOMEM,
    ENOSYS,
    EPERM,
    ETIME,
    ETIMEDOUT,
)
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec
from posix.unistd cimport getpid

from tablespace._core.symbols cimport SharedObject
from tablespace._core.symbols import locate_extension
from tablespace.io.device cimport IO_READ, Completion, Device, IoKind, IoQueue
from tablespace.io.device import os_error

# Kernel ABI (io_uring(7), struct io_uring_cqe); fixed since Linux 5.1.
cdef struct cqe_t:
    uint64_t user_data
    int32_t res
    uint32_t flags

# struct __kernel_timespec, of the same ABI.
cdef struct kernel_timespec:
    int64_t tv_sec
    int64_t tv_nsec

# What liburing marks its own timeouts with on kernels before 5.11, which have no other way.
cdef uint64_t TIMEOUT_MARK = <uint64_t>-1

# struct io_uring is 216 bytes in liburing 2.15 and has only ever grown at its end; liburing fills
# it and we never look inside.
cdef enum:
    RING_BYTES = 1024
    REAP_BATCH = 64

ctypedef int (*queue_init_t)(unsigned entries, void *ring, unsigned flags) noexcept nogil
ctypedef void (*queue_exit_t)(void *ring) noexcept nogil
ctypedef void *(*get_sqe_t)(void *ring) noexcept nogil
ctypedef void (*prep_rw_t)(void *sqe, int fd, void *buffer, unsigned length,
                           uint64_t offset) noexcept nogil
ctypedef void (*prep_nop_t)(void *sqe) noexcept nogil
ctypedef void (*set_data_t)(void *sqe, uint64_t data) noexcept nogil
ctypedef int (*submit_t)(void *ring) noexcept nogil
ctypedef int (*submit_and_wait_t)(void *ring, unsigned wait_for) noexcept nogil
ctypedef int (*submit_and_wait_timeout_t)(void *ring, cqe_t **cqe, unsigned wait_for,
                                          kernel_timespec *limit, void *mask) noexcept nogil
ctypedef unsigned (*peek_batch_t)(void *ring, cqe_t **cqes, unsigned count) noexcept nogil
ctypedef void (*cq_advance_t)(void *ring, unsigned count) noexcept nogil

cdef queue_init_t queue_init
cdef queue_exit_t queue_exit
cdef get_sqe_t get_sqe
cdef prep_rw_t prep_read, prep_write
cdef prep_nop_t prep_nop
cdef set_data_t set_data
cdef submit_t submit_ring
cdef submit_and_wait_t submit_and_wait
cdef submit_and_wait_timeout_t submit_and_wait_timeout
cdef peek_batch_t peek_batch
cdef cq_advance_t cq_advance
cdef bint loaded = False

# Where the functions come from, or why there are none; for `info`.
source = None
missing = None


cdef int resolve_all(SharedObject library) except -1:
    global queue_init, queue_exit, get_sqe, prep_read, prep_write, prep_nop, set_data
    global submit_ring, submit_and_wait, submit_and_wait_timeout, peek_batch, cq_advance
    queue_init = <queue_init_t>library.resolve("io_uring_queue_init")
    queue_exit = <queue_exit_t>library.resolve("io_uring_queue_exit")
    get_sqe = <get_sqe_t>library.resolve("io_uring_get_sqe")
    prep_read = <prep_rw_t>library.resolve("io_uring_prep_read")
    prep_write = <prep_rw_t>library.resolve("io_uring_prep_write")
    prep_nop = <prep_nop_t>library.resolve("io_uring_prep_nop")
    set_data = <set_data_t>library.resolve("io_uring_sqe_set_data64")
    submit_ring = <submit_t>library.resolve("io_uring_submit")
    submit_and_wait = <submit_and_wait_t>library.resolve("io_uring_submit_and_wait")
    submit_and_wait_timeout = <submit_and_wait_timeout_t>library.resolve(
        "io_uring_submit_and_wait_timeout")
    peek_batch = <peek_batch_t>library.resolve("io_uring_peek_batch_cqe")
    cq_advance = <cq_advance_t>library.resolve("io_uring_cq_advance")
    return 0


cdef uint64_t now_ns() noexcept nogil:
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return <uint64_t>now.tv_sec * 1000000000 + <uint64_t>now.tv_nsec


def load():
    """Resolve liburing's functions; return where from, or None with `missing` saying why."""
    global loaded, source, missing
    if loaded or missing is not None:
        return source
    reasons = []
    for name in (locate_extension("liburing.liburing"), "liburing-ffi.so.2"):
        if name is None:
            reasons.append("the distribution 'liburing' is not installed (pip install liburing)")
            continue
        try:
            resolve_all(SharedObject(name))
        except ImportError as error:
            reasons.append(str(error))
            continue
        loaded = True
        source = name
        return source
    missing = "; ".join(reasons)
    return None


def probe():
    """Send one NOP through each of two rings, as large as a store's and there together.

    One small ring proves little: locked memory is counted by user, and rings after the first, or
    larger ones, may be refused.

    Returns
    -------
    str or None
        None when io_uring works; else the reason, with its remedy.
    """
    cdef UringQueue queue
    cdef list queues = []
    if load() is None:
        return f"no liburing: {missing}"
    try:
        queues.append(UringQueue(64))
        queues.append(UringQueue(32))
    except OSError as error:
        return refusal("io_uring_setup", error)
    finally:
        code = 0
        for queue in queues:
            code = code or queue.nop()
            queue.close()
    return None if code == 0 else refusal("io_uring_enter (a NOP)", os_error(code, "io_uring"))


def refusal(str call, error):
    """Return what was refused, what may have refused it, and what to change."""
    said = f"{call}: {error.strerror} (errno {error.errno})"
    if error.errno in (EPERM, EACCES):
        return (f"{said}, by a seccomp profile or the sysctl kernel.io_uring_disabled. Remedy: "
                "allow io_uring in the container's seccomp profile, set the sysctl to 0")
    if error.errno == ENOSYS:
        return (f"{said}: an old kernel, or a seccomp profile that hides the call. Remedy: allow "
                "io_uring in the container's seccomp profile")
    if error.errno == ENOMEM:
        return (f"{said}: before kernel 5.12 rings are locked memory, counted by user. Remedy: "
                "raise RLIMIT_MEMLOCK (ulimit -l)")
    if error.errno in (EMFILE, ENFILE):
        return f"{said}. Remedy: raise RLIMIT_NOFILE (ulimit -n)"
    return said


cdef class UringQueue(IoQueue):
    """Transfers on an io_uring of this queue's own."""

    cdef void *ring          # owned; RING_BYTES of memory holding a struct io_uring
    cdef bint live
    cdef int owner_pid       # a forked child leaves the ring alone: it is the parent's
    cdef uint32_t unsent     # pushed, not yet taken by the kernel

    def __init__(self, uint32_t depth=64):
        cdef int code
        if load() is None:
            raise OSError(0, f"no liburing: {missing}")
        self.depth = depth
        self.engine = "uring"
        self.ring = calloc(1, RING_BYTES)
        if self.ring == NULL:
            raise MemoryError()
        code = queue_init(depth, self.ring, 0)
        if code < 0:
            raise os_error(code, "io_uring")
        self.owner_pid = getpid()
        self.live = True

    def __dealloc__(self):
        if self.live and self.owner_pid == getpid():
            queue_exit(self.ring)
        free(self.ring)

    def close(self):
        """Free the ring."""
        if self.live and self.owner_pid == getpid():
            self.live = False
            with nogil:
                queue_exit(self.ring)

    def nop(self):
        """Send one NOP and wait for it; return 0 or -errno."""
        cdef Completion done
        cdef int code
        cdef void *sqe = get_sqe(self.ring)
        if sqe == NULL:
            return -EBUSY
        prep_nop(sqe)
        set_data(sqe, 77)
        self.unsent += 1
        self.in_flight += 1
        with nogil:
            code = self.reap(&done, 1, 1)
        if code < 0:
            return code
        return <int>done.result if code == 1 and done.tag == 77 else -EIO

    cdef int do_push(self, Device device, IoKind kind, void *buffer, size_t length,
                     uint64_t offset, uint64_t tag) noexcept nogil:
        cdef void *sqe = get_sqe(self.ring)
        if sqe == NULL:
            return -EAGAIN
        if kind == IO_READ:
            prep_read(sqe, device.fd, buffer, <unsigned>length, offset)
        else:
            prep_write(sqe, device.fd, buffer, <unsigned>length, offset)
        set_data(sqe, tag)
        self.unsent += 1
        return 0

    cdef int do_submit(self) noexcept nogil:
        cdef int sent = 0
        while self.unsent:
            sent = submit_ring(self.ring)
            if sent == -EINTR or sent == -EAGAIN or sent == -EBUSY:
                # The kernel is short of memory or completions wait: reaping makes room.
                return 0
            if sent < 0:
                return sent
            self.unsent -= <uint32_t>sent
        return 0

    cdef int do_reap(self, Completion *out, uint32_t limit, uint32_t wait_for) noexcept nogil:
        cdef cqe_t *cqes[REAP_BATCH]
        cdef uint32_t got = 0, at, batch
        cdef int sent
        cdef uint64_t end = now_ns() + self.timeout_ns if self.timeout_ns and wait_for else 0
        while True:
            batch = limit - got
            if batch > REAP_BATCH:
                batch = REAP_BATCH
            batch = peek_batch(self.ring, cqes, batch)
            for at in range(batch):
                if cqes[at].user_data == TIMEOUT_MARK:
                    continue
                out[got].tag = cqes[at].user_data
                out[got].result = cqes[at].res
                got += 1
            if batch:
                cq_advance(self.ring, batch)
            if got >= wait_for or got == limit:
                return <int>got
            if batch:
                continue
            if end and now_ns() >= end:
                return <int>got if got else -ETIMEDOUT
            sent = self.wait(wait_for - got, end)
            if sent >= 0:
                self.unsent -= <uint32_t>sent
            elif sent != -EINTR and sent != -EAGAIN and sent != -EBUSY and sent != -ETIME:
                return sent

    cdef int wait(self, uint32_t wait_for, uint64_t end) noexcept nogil:
        """Wait for completions until a time, or for ever; return how many were submitted."""
        cdef kernel_timespec limit
        cdef cqe_t *first = NULL
        cdef uint64_t now, left
        if end == 0:
            return submit_and_wait(self.ring, wait_for)
        now = now_ns()
        left = end - now if end > now else 1
        limit.tv_sec = <int64_t>(left // 1000000000)
        limit.tv_nsec = <int64_t>(left % 1000000000)
        return submit_and_wait_timeout(self.ring, &first, wait_for, &limit, NULL)
