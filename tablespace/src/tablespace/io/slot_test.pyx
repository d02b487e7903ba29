# cython: boundscheck=False
# C arrays only, every index below the piece's length.
"""Test a slot that failed: write a pattern over it, sync, read it back, compare."""

import enum

from libc.errno cimport ENOMEM
from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memset

from tablespace._core.aligned_buffer cimport AlignedBuffer
from tablespace.io.device cimport Device, is_medium_error

# What is written or read at a time: slots may be as large as 1 GiB.
cdef uint64_t PIECE_BYTES = 1 << 20


class Verdict(enum.IntEnum):
    """What a test says of a slot."""

    GOOD = 0
    BAD = 1
    UNKNOWN = 2     # something other than the medium failed, such as a full disk


cdef enum:
    VERDICT_GOOD = 0
    VERDICT_BAD = 1
    VERDICT_UNKNOWN = 2


cdef inline uint64_t mixed(uint64_t number) noexcept nogil:
    """Mix the bits of a number (the finaliser of splitmix64), so that no two words repeat."""
    number = (number ^ (number >> 30)) * <uint64_t>0xBF58476D1CE4E5B9
    number = (number ^ (number >> 27)) * <uint64_t>0x94D049BB133111EB
    return number ^ (number >> 31)


cdef void fill_pattern(uint64_t *words, uint64_t count, uint64_t seed,
                       uint64_t first) noexcept nogil:
    cdef uint64_t at
    for at in range(count):
        words[at] = mixed(seed + (first + at + 1) * <uint64_t>0x9E3779B97F4A7C15)


cdef bint is_pattern(const uint64_t *words, uint64_t count, uint64_t seed,
                     uint64_t first) noexcept nogil:
    cdef uint64_t at
    for at in range(count):
        if words[at] != mixed(seed + (first + at + 1) * <uint64_t>0x9E3779B97F4A7C15):
            return False
    return True


cdef int judge(int64_t code) noexcept nogil:
    return VERDICT_BAD if is_medium_error(code) else VERDICT_UNKNOWN


cdef int run_test(Device device, unsigned char *memory, uint64_t offset, uint64_t length,
                  uint64_t seed, int *code) noexcept nogil:
    cdef uint64_t done = 0, piece
    cdef int verdict = VERDICT_GOOD
    cdef int64_t result
    while done < length and verdict == VERDICT_GOOD:
        piece = min(PIECE_BYTES, length - done)
        fill_pattern(<uint64_t *>memory, piece // 8, seed, done // 8)
        result = device.write(memory, piece, offset + done)
        if result < 0:
            code[0] = <int>result
            verdict = judge(result)
        done += piece
    # Also after a failed write: what was written must not fail a later sync of somebody's data.
    result = device.sync()
    if result < 0:
        code[0] = <int>result
        # Whatever the reason: a sync is not tried again and called good.
        return VERDICT_BAD
    if verdict != VERDICT_GOOD:
        return verdict
    device.forget(offset, length)
    done = 0
    while done < length:
        piece = min(PIECE_BYTES, length - done)
        # What a transfer leaves as it was must not pass for the pattern just compared.
        memset(memory, 0, piece)
        result = device.read(memory, piece, offset + done)
        if result < 0:
            code[0] = <int>result
            return judge(result)
        if not is_pattern(<uint64_t *>memory, piece // 8, seed, done // 8):
            return VERDICT_BAD
        done += piece
    return VERDICT_GOOD


def try_slot(Device device not None, uint64_t offset, uint64_t length, uint64_t seed):
    """Write over a slot that nothing refers to, durably, and read it back.

    Nothing else in the file may be waiting for a sync: an error of this test's own sync is the
    slot's, and is not reported again.

    Parameters
    ----------
    offset, length : int
        The slot's place in bytes; multiples of 4096.
    seed : int
        Another one for each test of the same slot, so that no older pattern passes.

    Returns
    -------
    tuple
        (Verdict, -errno or 0).
    """
    cdef AlignedBuffer memory
    cdef int verdict, code = 0
    cdef uint64_t start = mixed(seed ^ mixed(offset + 1))
    try:
        memory = AlignedBuffer(min(PIECE_BYTES, length))
    except MemoryError:
        return Verdict.UNKNOWN, -ENOMEM
    with nogil:
        verdict = run_test(device, memory.data, offset, length, start, &code)
    memory.close()
    return Verdict(verdict), code
