"""Memory for O_DIRECT: page-aligned, on huge pages where the kernel gives them, not forked."""

from cpython.buffer cimport PyBUF_FORMAT, PyBUF_ND, PyBUF_STRIDES
from libc.errno cimport errno
from libc.string cimport strerror

from tablespace.layout import ceil_to

cdef extern from *:
    """
    #include <unistd.h>
    static inline int this_process(void) { return (int)getpid(); }
    static inline void write_back(volatile unsigned char *at) { *at = *at; }
    """
    int this_process() nogil
    void write_back(unsigned char *at) noexcept nogil

cdef extern from "sys/mman.h" nogil:
    void *mmap(void *addr, size_t length, int prot, int flags, int fd, long offset)
    int munmap(void *addr, size_t length)
    int madvise(void *addr, size_t length, int advice)
    int PROT_READ, PROT_WRITE, MAP_PRIVATE, MAP_ANONYMOUS, MADV_HUGEPAGE, MADV_DONTFORK
    void *MAP_FAILED

cdef const char *BYTE_FORMAT = b"B"
cdef size_t PAGE_BYTES = 4096
cdef size_t HUGE_PAGE_BYTES = 2 << 20


cdef class AlignedBuffer:
    """A writable buffer whose address suits O_DIRECT.

    Parameters
    ----------
    size_bytes : int
        Length, rounded up to whole 4 KiB pages in memory; the buffer exports exactly this many.

    Notes
    -----
    The mapping is private and MADV_DONTFORK: a fork while a direct read is in flight would
    otherwise let parent and child see different pages (open(2), O_DIRECT and fork).  From 2 MiB
    on it is aligned to, and asks for, huge pages: with 4 KiB pages a 64 KiB transfer has sixteen
    segments.  Not safe to close while views are out; `close` then raises BufferError.
    """

    def __cinit__(self, size_t size_bytes):
        cdef size_t want, slack, head
        cdef void *raw
        if size_bytes == 0:
            raise ValueError("size_bytes must be at least 1")
        want = ceil_to(size_bytes, PAGE_BYTES)
        slack = 0
        self.alignment_bytes = PAGE_BYTES
        if want >= HUGE_PAGE_BYTES:
            want = ceil_to(size_bytes, HUGE_PAGE_BYTES)
            slack = HUGE_PAGE_BYTES
            self.alignment_bytes = HUGE_PAGE_BYTES
        raw = mmap(NULL, want + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
        if raw == MAP_FAILED:
            raise MemoryError(
                f"cannot map {size_bytes} bytes: {strerror(errno).decode(errors='replace')}")
        if slack:
            head = <size_t>(-<Py_ssize_t><size_t>raw) % HUGE_PAGE_BYTES
            if head:
                munmap(raw, head)
            if slack - head:
                munmap(<unsigned char *>raw + head + want, slack - head)
            raw = <unsigned char *>raw + head
            madvise(raw, want, MADV_HUGEPAGE)
        madvise(raw, want, MADV_DONTFORK)
        self.owner_pid = this_process()
        self.data = <unsigned char *>raw
        self.mapped_bytes = want
        self.size_bytes = size_bytes
        self.shape[0] = <Py_ssize_t>size_bytes
        self.strides[0] = 1

    def __dealloc__(self):
        self.unmap()

    cdef void unmap(self) noexcept:
        # MADV_DONTFORK: in a child the range is not ours, and may hold other mappings by now.
        if self.data != NULL and self.owner_pid == this_process():
            munmap(self.data, self.mapped_bytes)
        self.data = NULL

    def populate(self):
        """Touch every page, so that all of it is resident from now on. What it holds stays."""
        cdef size_t at
        if self.data == NULL or self.owner_pid != this_process():
            raise ValueError("the buffer is closed, or belongs to the parent of this process")
        for at in range(0, self.mapped_bytes, PAGE_BYTES):
            write_back(self.data + at)

    def close(self):
        """Unmap the memory; refused with BufferError while a view is out."""
        if self.views:
            raise BufferError(f"{self.views} view(s) of this buffer are still in use")
        self.unmap()

    def __len__(self):
        return self.size_bytes

    def __getbuffer__(self, Py_buffer *view, int flags):
        if self.data == NULL or self.owner_pid != this_process():
            raise ValueError("the buffer is closed, or belongs to the parent of this process")
        view.buf = self.data
        view.obj = self
        view.len = <Py_ssize_t>self.size_bytes
        view.itemsize = 1
        view.readonly = 0
        view.ndim = 1
        view.format = NULL
        if flags & PyBUF_FORMAT:
            view.format = <char *>BYTE_FORMAT
        view.shape = self.shape if flags & PyBUF_ND else NULL
        view.strides = self.strides if flags & PyBUF_STRIDES == PyBUF_STRIDES else NULL
        view.suboffsets = NULL
        view.internal = NULL
        self.views += 1

    def __releasebuffer__(self, Py_buffer *view):
        self.views -= 1
