# cython: boundscheck=False
# C arrays only; every read of input is bounded by the lengths checked first.
"""Snapshot chunks: up to 4096 entries a JSON line, one member a column, each column joined hex.

Entries stand in order of recency, least recent first.  docs/format.md specifies each column.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from tablespace._core.key_index cimport NO_ENTRY, Entry, KeyIndex
from tablespace._core.line_codec import seal
from tablespace._core.slot_allocator cimport SlotAllocator, location_container, location_slot

CHUNK_ENTRIES = 4096
cdef uint32_t CHUNK_LIMIT = 4096
cdef const char *HEX = b"0123456789abcdef"

cdef signed char[256] UNHEX
cdef int filled
for filled in range(256):
    UNHEX[filled] = -1
for filled in range(10):
    UNHEX[ord('0') + filled] = filled
for filled in range(6):
    UNHEX[ord('a') + filled] = 10 + filled


cdef inline char *put_bytes(char *out, const uint8_t *data, size_t length) noexcept nogil:
    cdef size_t at
    for at in range(length):
        out[2 * at] = HEX[data[at] >> 4]
        out[2 * at + 1] = HEX[data[at] & 15]
    return out + 2 * length


cdef inline char *put_number(char *out, uint64_t number, int digits) noexcept nogil:
    cdef int at
    for at in range(digits):
        out[at] = HEX[(number >> (4 * (digits - 1 - at))) & 15]
    return out + digits


cdef inline bint get_number(const char *data, int digits, uint64_t *out) noexcept nogil:
    cdef uint64_t number = 0
    cdef int at, digit
    for at in range(digits):
        digit = UNHEX[<uint8_t>data[at]]
        if digit < 0:
            return False
        number = number << 4 | <uint64_t>digit
    out[0] = number
    return True


cdef inline bint get_bytes(const char *data, size_t length, uint8_t *out) noexcept nogil:
    cdef size_t at
    cdef int high, low
    for at in range(length):
        high = UNHEX[<uint8_t>data[2 * at]]
        low = UNHEX[<uint8_t>data[2 * at + 1]]
        if high < 0 or low < 0:
            return False
        out[at] = <uint8_t>(high << 4 | low)
    return True


cdef bytes column(KeyIndex index, list ids, int which):
    """Return one column's hex text for the entries `ids`."""
    cdef size_t digits = 0
    cdef Entry *entry
    cdef uint32_t id
    cdef bytes out
    cdef char *at
    for id in ids:
        entry = index.entry(id)
        if which == 0:
            digits += 2 * <size_t>entry.key_length
        elif which == 1:
            digits += 2 * <size_t>entry.metadata_length
        elif which in (2, 3):
            digits += 2
        elif which == 4:
            digits += 12
        elif which == 5:
            digits += 8
        else:
            digits += 16
    out = PyBytes_FromStringAndSize(NULL, digits)
    at = PyBytes_AS_STRING(out)
    for id in ids:
        entry = index.entry(id)
        if which == 0:
            at = put_bytes(at, entry.name, entry.key_length)
        elif which == 1:
            at = put_bytes(at, entry.name + entry.key_length, entry.metadata_length)
        elif which == 2:
            at = put_number(at, entry.key_length, 2)
        elif which == 3:
            at = put_number(at, entry.metadata_length, 2)
        elif which == 4:
            at = put_number(at, location_container(entry.location), 6)
            at = put_number(at, location_slot(entry.location), 6)
        elif which == 5:
            at = put_number(at, entry.length, 8)
        elif which == 6:
            at = put_number(at, entry.check, 16)
        else:
            at = put_number(at, entry.seq, 16)
    return out


def encode_chunks(KeyIndex index not None, uint64_t seq):
    """Return the chunk lines of every live entry, as a list of bytes; `seq` names the snapshot."""
    cdef list lines = []
    cdef list ids = []
    cdef uint32_t pool, id
    for pool in range(index.allocator.pool_count):
        id = index.oldest[pool]
        while id != NO_ENTRY:
            ids.append(id)
            id = index.entry(id).newer
            if len(ids) == CHUNK_LIMIT:
                lines.append(encode_chunk(index, ids, len(lines), seq))
                ids = []
    if ids:
        lines.append(encode_chunk(index, ids, len(lines), seq))
    return lines


cdef bytes encode_chunk(KeyIndex index, list ids, int number, uint64_t seq):
    return seal(
        b'{"chunk":%d,"of":%d,"n":%d,"key_len":"%s","key":"%s","at":"%s","len":"%s",'
        b'"xxh3":"%s","seq":"%s","meta_len":"%s","meta":"%s"' % (
            number, seq, len(ids), column(index, ids, 2), column(index, ids, 0),
            column(index, ids, 4), column(index, ids, 5), column(index, ids, 6),
            column(index, ids, 7), column(index, ids, 3), column(index, ids, 1)))


def encode_pools(SlotAllocator allocator not None):
    """Return the pool of every container as two hex digits each, ``ff`` for none."""
    return bytes(
        [allocator.pool_of[at] & 0xFF for at in range(allocator.container_count)]).hex().encode()


def load_pools(SlotAllocator allocator not None, bytes pools not None, list numbers not None):
    """Assign containers as `encode_pools` said; return what is wrong, or None.

    Containers that the region has no more are passed over; ones it has got since have no pool.

    Parameters
    ----------
    numbers : list of int
        The allocator's pool for each pool number in the text.
    """
    try:
        listed = bytes.fromhex(pools.decode("ascii"))
    except ValueError as error:
        return f"pools are no hex: {error}"
    for container, pool in enumerate(listed[:allocator.container_count]):
        if pool != 0xFF:
            if pool >= len(numbers):
                return f"container {container} is of pool {pool}, there are {len(numbers)}"
            allocator.assign(container, numbers[pool])
    return None


def load_chunk(KeyIndex index not None, uint32_t count, list columns not None,
               uint32_t ghosts=0):
    """Restore the entries of one chunk into the index.

    Parameters
    ----------
    columns : list of bytes
        The hex text of key_len, key, at, len, xxh3, seq, meta_len, meta.
    ghosts : int
        Entries in containers below this number that the region has no more are passed over.

    Returns
    -------
    str or int
        How many entries were passed over when all was well; else what is wrong (entries before
        it are restored).
    """
    cdef bytes key_len, key, at, length, check, seq, meta_len, meta
    key_len, key, at, length, check, seq, meta_len, meta = columns
    cdef const char *key_lens = PyBytes_AS_STRING(key_len)
    cdef const char *keys = PyBytes_AS_STRING(key)
    cdef const char *places = PyBytes_AS_STRING(at)
    cdef const char *lengths = PyBytes_AS_STRING(length)
    cdef const char *checks = PyBytes_AS_STRING(check)
    cdef const char *seqs = PyBytes_AS_STRING(seq)
    cdef const char *meta_lens = PyBytes_AS_STRING(meta_len)
    cdef const char *metas = PyBytes_AS_STRING(meta)
    cdef size_t key_at = 0, meta_at = 0
    cdef uint64_t key_bytes, meta_bytes, container, slot, value_bytes, total, number
    cdef uint8_t name[256]
    cdef uint8_t extra[256]
    cdef uint32_t item, passed = 0
    if count > CHUNK_LIMIT or count == 0:
        return f"a chunk of {count} entries"
    if not (PyBytes_GET_SIZE(key_len) == 2 * count and PyBytes_GET_SIZE(at) == 12 * count
            and PyBytes_GET_SIZE(length) == 8 * count and PyBytes_GET_SIZE(check) == 16 * count
            and PyBytes_GET_SIZE(seq) == 16 * count and PyBytes_GET_SIZE(meta_len) == 2 * count):
        return "columns of different length"
    for item in range(count):
        if not (get_number(key_lens + 2 * item, 2, &key_bytes)
                and get_number(meta_lens + 2 * item, 2, &meta_bytes)
                and get_number(places + 12 * item, 6, &container)
                and get_number(places + 12 * item + 6, 6, &slot)
                and get_number(lengths + 8 * item, 8, &value_bytes)
                and get_number(checks + 16 * item, 16, &total)
                and get_number(seqs + 16 * item, 16, &number)):
            return f"entry {item}: not hex"
        if (key_bytes == 0 or key_at + 2 * key_bytes > <uint64_t>PyBytes_GET_SIZE(key)
                or meta_at + 2 * meta_bytes > <uint64_t>PyBytes_GET_SIZE(meta)):
            return f"entry {item}: names outside their column"
        if not (get_bytes(keys + key_at, key_bytes, name)
                and get_bytes(metas + meta_at, meta_bytes, extra)):
            return f"entry {item}: names not hex"
        key_at += 2 * key_bytes
        meta_at += 2 * meta_bytes
        if index.allocator.container_count <= container < ghosts:
            passed += 1
            continue
        if not index.fits(<uint32_t>container, <uint32_t>slot, value_bytes):
            return f"entry {item}: slot {slot} of container {container} is outside the geometry"
        if not index.restore_entry(name, key_bytes, extra, meta_bytes, <uint32_t>container,
                                   <uint32_t>slot, <uint32_t>value_bytes, total, number):
            return f"entry {item}: slot {slot} of container {container} is taken twice"
    return passed
