"""Files as the kernel gives them, and the posix engine: a few threads with pread and pwrite."""

import os

from libc.errno cimport EINVAL, ENOMEM, ESTALE, ETIMEDOUT, errno
from libc.stdint cimport int64_t, uint32_t, uint64_t

from tablespace.io.device cimport IO_WRITE, Completion, Device, IoKind, IoQueue

cdef extern from "fcntl.h" nogil:
    int fcntl(int fd, int command, ...)
    int fallocate(int fd, int mode, long offset, long length)
    int posix_fadvise(int fd, long offset, long length, int advice)
    int F_GETFL, F_SETFL, O_DIRECT, POSIX_FADV_DONTNEED
    int FALLOC_FL_KEEP_SIZE

cdef extern from "unistd.h" nogil:
    ssize_t pread(int fd, void *buffer, size_t length, long offset)
    ssize_t pwrite(int fd, const void *buffer, size_t length, long offset)
    int fdatasync(int fd)
    int ftruncate(int fd, long length)
    long lseek(int fd, long offset, int whence)
    int SEEK_HOLE
    int c_close "close"(int fd)

cdef extern from "sys/stat.h" nogil:
    cdef struct stat_found "stat":
        unsigned long st_nlink
    int fstat(int fd, stat_found *found)
    cdef struct statx_found "statx":
        uint32_t stx_nlink
    int statx(int directory, const char *path, int flags, unsigned int wanted,
              statx_found *found)
    unsigned int STATX_NLINK
    int AT_EMPTY_PATH "0x1000"
    int AT_FDCWD "-100"

cdef extern from "sys/syscall.h" nogil:
    long syscall(long number, ...)
    long SYS_statx

from posix.unistd cimport getpid

cdef extern from "posix_pool.h" nogil:
    ctypedef struct pool_completion:
        uint64_t tag
        int64_t result
    ctypedef struct pool_job:
        int fd
        int is_write
        void *buffer
        size_t length
        uint64_t offset
        uint64_t tag
    ctypedef struct posix_pool:
        pass
    posix_pool *pool_create(uint32_t depth, uint32_t threads)
    void pool_destroy(posix_pool *pool)
    void pool_push(posix_pool *pool, pool_job job)
    void pool_abandon(posix_pool *pool)
    uint32_t pool_reap(posix_pool *pool, pool_completion *out, uint32_t limit, uint32_t wait_for,
                       uint64_t timeout_ns)


def statx_refusal():
    """Return the errno with which the kernel, or a sandbox, refuses statx; 0 where it does not.

    Asked past the C library, which would answer from fstat in the kernel's place.
    """
    cdef char[1024] found
    if syscall(SYS_statx, AT_FDCWD, <const char *>b".", 0, STATX_NLINK, found) < 0:
        return errno
    return 0


# Enough to keep a SATA or network disk busy; an NVMe disk has io_uring.
cdef uint32_t POOL_THREADS = 8


cdef class PosixDevice(Device):
    """A file.

    Parameters
    ----------
    path : str
        For messages only.
    fd : int
        Open for writing too unless `read_only`; owned from here on.
    direct : bool
        Whether `fd` has O_DIRECT.
    alignment_bytes, memory_alignment_bytes : int
        What direct transfers need; ignored when not direct.
    read_only : bool
    """

    def __init__(self, str path, int fd, bint direct=False, uint32_t alignment_bytes=4096,
                 uint32_t memory_alignment_bytes=512, bint read_only=False):
        self.path = path
        self.fd = fd
        self.read_only = read_only
        found = os.fstat(fd)
        self.size_bytes = found.st_size
        self.identity = (found.st_dev, found.st_ino)
        self.direct = direct
        if direct:
            self.alignment_bytes = alignment_bytes
            self.memory_alignment_bytes = memory_alignment_bytes

    def __dealloc__(self):
        # No fork check: closing a descriptor in a child leaves the parent's alone.
        if self.fd >= 0 and not self.closed:
            c_close(self.fd)

    def fileno(self):
        """Return the descriptor, which stays owned by the device."""
        return self.fd

    def drop_cached(self, uint64_t offset, size_t length):
        """Let the page cache forget a range that is clean (posix_fadvise, DONTNEED)."""
        if not self.closed:
            os.posix_fadvise(self.fd, offset, length, os.POSIX_FADV_DONTNEED)

    cdef int leave_direct(self) noexcept nogil:
        """Turn O_DIRECT off on the descriptor, for a file system that refuses it at transfer."""
        cdef int flags = fcntl(self.fd, F_GETFL)
        if flags < 0 or fcntl(self.fd, F_SETFL, flags & ~O_DIRECT) < 0:
            return -errno
        self.direct = False
        return 0

    cdef int64_t do_read(self, void *buffer, size_t length, uint64_t offset) noexcept nogil:
        cdef ssize_t moved = pread(self.fd, buffer, length, <long>offset)
        if moved < 0 and errno == EINVAL and self.direct and self.leave_direct() == 0:
            moved = pread(self.fd, buffer, length, <long>offset)
        return -errno if moved < 0 else moved

    cdef int64_t do_write(self, const void *buffer, size_t length,
                          uint64_t offset) noexcept nogil:
        cdef ssize_t moved = pwrite(self.fd, buffer, length, <long>offset)
        if moved < 0 and errno == EINVAL and self.direct and self.leave_direct() == 0:
            moved = pwrite(self.fd, buffer, length, <long>offset)
        return -errno if moved < 0 else moved

    cdef int do_sync(self) noexcept nogil:
        cdef statx_found found
        cdef stat_found older
        if fdatasync(self.fd) < 0:
            return -errno
        # Not fstat: where anybody has looked at the file's times, the next write must change them,
        # and the next sync must write the inode as well (docs/decisions/no-times.md).
        if statx(self.fd, b"", AT_EMPTY_PATH, STATX_NLINK, &found) < 0:
            # A sandbox that does not know the call (EPERM, ENOSYS) says nothing of the sync.
            if fstat(self.fd, &older) < 0:
                return -errno
            found.stx_nlink = <uint32_t>older.st_nlink
        # Durable, but under no name: whoever removed the file took the bytes with it.
        return -ESTALE if found.stx_nlink == 0 else 0

    cdef void do_forget(self, uint64_t offset, uint64_t length) noexcept nogil:
        posix_fadvise(self.fd, <long>offset, <long>length, POSIX_FADV_DONTNEED)

    cdef int do_truncate(self, uint64_t size_bytes) noexcept nogil:
        return -errno if ftruncate(self.fd, <long>size_bytes) < 0 else 0

    cdef int do_allocate(self, uint64_t size_bytes) noexcept nogil:
        # Not posix_fallocate: where the file system cannot, glibc writes every page instead.
        return -errno if fallocate(self.fd, 0, 0, <long>size_bytes) < 0 else 0

    cdef int do_reserve(self, uint64_t size_bytes) noexcept nogil:
        cdef int code = fallocate(self.fd, FALLOC_FL_KEEP_SIZE, 0, <long>size_bytes)
        return -errno if code < 0 else 0

    cdef int64_t do_first_hole(self, uint64_t offset) noexcept nogil:
        # An extent that is allocated and unwritten counts as a hole.
        cdef long found = lseek(self.fd, <long>offset, SEEK_HOLE)
        return -errno if found < 0 else found

    cdef int do_close(self) noexcept nogil:
        cdef int fd = self.fd
        # The number may name another file at once: nothing may reach it through this object.
        self.fd = -1
        return -errno if c_close(fd) < 0 else 0


cdef class PosixQueue(IoQueue):
    """Transfers on a few threads of this queue's own."""

    cdef posix_pool *pool   # owned; NULL once closed
    cdef int owner_pid      # its threads do not exist in a forked child

    def __init__(self, uint32_t depth=32):
        self.depth = depth
        self.engine = "posix"
        self.pool = pool_create(depth, min(POOL_THREADS, depth))
        self.owner_pid = getpid()
        if self.pool == NULL:
            raise OSError(ENOMEM, "cannot start the threads of the posix IO engine")

    def __dealloc__(self):
        self.stop()

    def close(self):
        """Stop the threads."""
        self.stop()

    def abandon(self):
        """Let the threads end when their transfers do; they are never joined."""
        cdef posix_pool *pool = self.pool
        self.pool = NULL
        if pool != NULL and self.owner_pid == getpid():
            with nogil:
                pool_abandon(pool)

    cdef void stop(self) noexcept:
        cdef posix_pool *pool = self.pool
        self.pool = NULL
        # In a child there is nobody to join, and the mutex may be held for ever.
        if pool != NULL and self.owner_pid == getpid():
            with nogil:
                pool_destroy(pool)

    cdef int do_push(self, Device device, IoKind kind, void *buffer, size_t length,
                     uint64_t offset, uint64_t tag) noexcept nogil:
        cdef pool_job job
        job.fd = device.fd
        job.is_write = kind == IO_WRITE
        job.buffer = buffer
        job.length = length
        job.offset = offset
        job.tag = tag
        pool_push(self.pool, job)
        return 0

    cdef int do_submit(self) noexcept nogil:
        return 0

    cdef int do_reap(self, Completion *out, uint32_t limit, uint32_t wait_for) noexcept nogil:
        cdef uint32_t got = pool_reap(self.pool, <pool_completion *>out, limit, wait_for,
                                      self.timeout_ns)
        return <int>got if got or not wait_for else -ETIMEDOUT
