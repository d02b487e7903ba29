"""What one caller wants stored: its keys, and its buffers held until the commit is over."""

import os

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.errno cimport EAGAIN, EDQUOT, ENOSPC
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from tablespace._core.block_copy cimport copy_block
from tablespace._core.checksum cimport xxh3_64
from tablespace._core.commit_queue cimport Request
from tablespace._core.key_index import check_key
from tablespace.errors import FullError, ValueTooLargeError
from tablespace.io.frame_pool cimport FramePool
from tablespace.layout import MAX_METADATA_BYTES


# Requests of at most this many blocks are copied and summed by their callers, at the same time as
# others' are written; in larger ones copying a block overlaps the writing of those before it.
cdef uint32_t PREPARED_BLOCKS = 4
cdef uint64_t PAD_BYTES = 4096


def checked_item(item):
    """Return an item of a `put_many`.

    Raises
    ------
    TypeError
        For what is neither a pair nor a triple.
    """
    if not isinstance(item, (tuple, list)) or not 2 <= len(item) <= 3:
        raise TypeError(
            "an item is (key, value) or (key, value, metadata), not "
            + (f"{len(item)} values" if isinstance(item, (tuple, list)) else type(item).__name__)
            + ". Remedy: of a dict, its items()"
        )
    return item


cdef class PutRequest(Request):
    """What one caller wants stored: at most `limit` blocks.

    The caller's buffers are held (and must not change) until `release`.
    """

    def __cinit__(self, uint64_t slot_bytes, uint32_t limit):
        self.limit = limit
        self.slot_bytes = slot_bytes
        self.blocks = <Block *>calloc(max(1, limit), sizeof(Block))
        if self.blocks == NULL:
            raise MemoryError()
        self.keys = []
        self.metadata = []
        self.joins = True

    def __dealloc__(self):
        self.let_go()
        free(self.blocks)

    def release(self):
        """Give the caller's buffers back now; only the outcome can be asked for afterwards.

        Not left to the end of this object's life: an exception's traceback may keep it alive.
        """
        if not self.stuck and not self.orphaned:
            self.let_go()

    cdef void let_go(self) noexcept:
        cdef uint32_t at
        if self.stuck:
            return
        for at in range(self.held):
            if self.blocks[at].frame != NULL and self.frames is not None:
                self.frames.give(self.blocks[at].frame)
                self.blocks[at].frame = NULL
            PyBuffer_Release(&self.blocks[at].view)
        self.held = 0

    def borrow(self, FramePool frames not None):
        """Let a small request be copied in its caller's thread, as far as there are frames."""
        cdef uint32_t at
        cdef Block *block
        if self.count > PREPARED_BLOCKS:
            return
        self.frames = frames
        for at in range(self.count):
            block = &self.blocks[at]
            if (0 < block.length <= frames.frame_bytes
                    and (<size_t>block.view.buf | block.length) % PAD_BYTES):
                block.frame = frames.take()

    cdef void prepare(self) noexcept nogil:
        """Copy and sum before it is this request's turn; aligned values are left as they are."""
        cdef uint32_t at
        cdef Block *block
        cdef size_t padded
        if self.frames is None:
            return
        for at in range(self.count):
            block = &self.blocks[at]
            if block.frame != NULL:
                padded = (block.length + PAD_BYTES - 1) // PAD_BYTES * PAD_BYTES
                copy_block(block.frame, block.view.buf, block.length)
                memset(block.frame + block.length, 0, padded - block.length)
                block.check = xxh3_64(block.frame, block.length)
                block.summed = True

    def add_packed(self, key, packed, metadata, uint32_t raw):
        """Add one block whose value of `raw` bytes is compressed to `packed`."""
        self.add(key, packed, metadata)
        self.blocks[self.count - 1].raw = raw

    def add(self, key, value, metadata=None):
        """Add one block.

        Raises
        ------
        TypeError, ValueError
            For a key that is not bytes of 1..255, or metadata over 255 bytes.
        ValueTooLargeError
            For a value larger than a slot.
        """
        self.append(key, value, metadata)

    def add_many(self, items not None):
        """Add one block an item, (key, value) or (key, value, metadata).

        Raises
        ------
        TypeError, ValueError
            As `add`, and for an item that is neither a pair nor a triple.
        ValueTooLargeError
            As `add`.
        """
        for item in items:
            if type(item) is tuple and len(<tuple>item) == 2:
                self.append((<tuple>item)[0], (<tuple>item)[1], None)
            else:
                self.add(*checked_item(item))

    cdef int append(self, key, value, metadata) except -1:
        cdef Block *block
        if self.count == self.limit:
            raise ValueError(f"a group holds at most {self.limit} blocks")
        if type(key) is not bytes or not 1 <= PyBytes_GET_SIZE(key) <= 255:
            check_key(key)
        if metadata is not None:
            if not isinstance(metadata, bytes):
                raise TypeError(f"metadata is bytes, not {type(metadata).__name__}")
            if len(metadata) > MAX_METADATA_BYTES:
                raise ValueError(
                    f"metadata has at most {MAX_METADATA_BYTES} bytes, not {len(metadata)}")
        block = &self.blocks[self.count]
        PyObject_GetBuffer(value, &block.view, PyBUF_SIMPLE)
        if <uint64_t>block.view.len > self.slot_bytes:
            length = block.view.len
            PyBuffer_Release(&block.view)
            raise ValueTooLargeError(key, length, self.slot_bytes)
        self.keys.append(key)
        block.key = <const uint8_t *>PyBytes_AS_STRING(key)
        block.key_length = <uint32_t>PyBytes_GET_SIZE(key)
        block.metadata = NULL
        block.metadata_length = 0
        if metadata:
            self.metadata.append(metadata)
            block.metadata = <const uint8_t *>PyBytes_AS_STRING(metadata)
            block.metadata_length = <uint32_t>PyBytes_GET_SIZE(metadata)
        block.length = <uint32_t>block.view.len
        block.result = -EAGAIN
        self.count += 1
        self.held = self.count
        return 0

    def copies(self):
        """Return (key, value, metadata) of each block, the values copied."""
        cdef uint32_t at
        cdef Block *block
        cdef list out = []
        for at in range(self.count):
            block = &self.blocks[at]
            metadata = None
            if block.metadata_length:
                metadata = PyBytes_FromStringAndSize(<char *>block.metadata,
                                                     block.metadata_length)
            out.append((PyBytes_FromStringAndSize(<char *>block.key, block.key_length),
                        PyBytes_FromStringAndSize(<char *>block.view.buf, block.view.len),
                        metadata))
        return out

    def outcome(self):
        """Return a list of bool, False where no slot was free.

        Raises
        ------
        OSError, FullError
            For the first block whose write failed; the other blocks are stored.
        """
        cdef uint32_t at
        cdef list out = [True] * self.count
        for at in range(self.count):
            if not self.blocks[at].placed:
                out[at] = False
            elif self.blocks[at].result < 0:
                code = <int>-self.blocks[at].result
                which = f"block {at} of the put (key hex:{self.keys[at].hex()})"
                if code == ENOSPC or code == EDQUOT:
                    raise FullError(f"{os.strerror(code)} while writing {which}; it is not "
                                    "stored. Remedy: free space on that file system")
                raise OSError(code, os.strerror(code), which)
        return out
