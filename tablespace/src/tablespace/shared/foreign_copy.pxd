"""The one copy of memory that another process may be changing meanwhile."""

from libc.stdint cimport uint64_t

from tablespace._core.block_copy cimport copy_block

cdef enum:
    # Below this a copy is cheaper than giving the GIL away and taking it back.
    GIL_RELEASE_BYTES = 4096


cdef inline void copy_foreign(void *target, const void *source, size_t size) noexcept nogil:
    """Copy bytes that may change meanwhile; the caller finds out by the slot's sequence."""
    copy_block(target, source, size)


cdef inline void copy_releasing_gil(void *target, const void *source, size_t size) noexcept:
    """Copy bytes, with the GIL released when that pays."""
    if size < GIL_RELEASE_BYTES:
        copy_foreign(target, source, size)
    else:
        with nogil:
            copy_foreign(target, source, size)


cdef inline int check_window(Py_ssize_t offset, uint64_t length, Py_ssize_t size) except -1:
    if offset < 0 or offset > size or length > <uint64_t>(size - offset):
        raise ValueError(
            f"{length} bytes at offset {offset} do not lie inside the {size} bytes given")
    return 0
