# cython: boundscheck=False
# C arrays only; every read of input is bounded by the lengths checked first.
"""Snapshot chunks: up to 4096 entries a JSON line, one member a column, each column joined hex.

Entries stand in order of recency, least recent first.  docs/format.md specifies each column.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport uint8_t, uint32_t, uint64_t

from tablespace._core.hex_text cimport get_bytes, get_number, put_bytes, put_number
from tablespace._core.key_index cimport (
    ENTRY_COMPRESSED,
    NO_ENTRY,
    Entry,
    IndexCapture,
    KeyIndex,
    raw_length,
)
from tablespace._core.line_codec import seal
from tablespace._core.slot_allocator cimport SlotAllocator, location_container, location_slot

CHUNK_ENTRIES = 4096
cdef uint32_t CHUNK_LIMIT = 4096

# The columns after the names, in the order of the line, with the digits of a value.
cdef enum Column:
    KEY_LENGTH = 0
    KEY = 1
    PLACE = 2
    LENGTH = 3
    CHECK = 4
    SEQ = 5
    METADATA_LENGTH = 6
    METADATA = 7
    RAW = 8               # only in chunks that hold a compressed value


cdef size_t column_digits(Entry **entries, uint32_t count, Column column) noexcept nogil:
    cdef size_t digits = 0
    cdef uint32_t at
    if column == KEY:
        for at in range(count):
            digits += 2 * <size_t>entries[at].key_length
    elif column == METADATA:
        for at in range(count):
            digits += 2 * <size_t>entries[at].metadata_length
    elif column == KEY_LENGTH or column == METADATA_LENGTH:
        digits = 2 * <size_t>count
    elif column == PLACE:
        digits = 12 * <size_t>count
    elif column == LENGTH or column == RAW:
        digits = 8 * <size_t>count
    else:
        digits = 16 * <size_t>count
    return digits


cdef void fill_column(Entry **entries, uint32_t count, Column column, char *out) noexcept nogil:
    cdef Entry *entry
    cdef uint32_t at
    for at in range(count):
        entry = entries[at]
        if column == KEY_LENGTH:
            out = put_number(out, entry.key_length, 2)
        elif column == KEY:
            out = put_bytes(out, entry.name, entry.key_length)
        elif column == PLACE:
            out = put_number(out, location_container(entry.location), 6)
            out = put_number(out, location_slot(entry.location), 6)
        elif column == LENGTH:
            out = put_number(out, entry.length, 8)
        elif column == RAW:
            out = put_number(out, raw_length(entry), 8)
        elif column == CHECK:
            out = put_number(out, entry.check, 16)
        elif column == SEQ:
            out = put_number(out, entry.seq, 16)
        elif column == METADATA_LENGTH:
            out = put_number(out, entry.metadata_length, 2)
        else:
            out = put_bytes(out, entry.name + entry.key_length, entry.metadata_length)


cdef bytes encode_column(Entry **entries, uint32_t count, Column column):
    """Return one column's hex text; the GIL is released while it is written."""
    cdef bytes out = PyBytes_FromStringAndSize(NULL, column_digits(entries, count, column))
    cdef char *text = PyBytes_AS_STRING(out)
    with nogil:
        fill_column(entries, count, column, text)
    return out


def encode_chunks(IndexCapture capture not None, uint64_t seq):
    """Yield the chunk lines of a captured index; `seq` names the snapshot."""
    cdef Entry *entries[4096]
    cdef uint32_t pool, id, count = 0
    cdef int number = 0
    for pool in range(capture.pool_count):
        id = capture.oldest[pool]
        while id != NO_ENTRY:
            entries[count] = capture.entry(id)
            id = entries[count].newer
            count += 1
            if count == CHUNK_LIMIT:
                yield encode_chunk(entries, count, number, seq)
                number += 1
                count = 0
    if count:
        yield encode_chunk(entries, count, number, seq)


cdef bytes encode_chunk(Entry **entries, uint32_t count, int number, uint64_t seq):
    cdef list columns = [
        encode_column(entries, count, <Column>column) for column in range(METADATA + 1)]
    return seal(
        b'{"chunk":%d,"of":%d,"n":%d,"key_len":"%s","key":"%s","at":"%s","len":"%s",'
        b'"xxh3":"%s","seq":"%s","meta_len":"%s","meta":"%s"%s'
        % (number, seq, count, *columns, encode_raw(entries, count)))


cdef bytes encode_raw(Entry **entries, uint32_t count):
    """Return the member of the values' lengths; nothing where none is compressed."""
    cdef uint32_t at
    for at in range(count):
        if entries[at].flags & ENTRY_COMPRESSED:
            return b',"lz4":"%s"' % encode_column(entries, count, RAW)
    return b""


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


def load_quarantine(SlotAllocator allocator not None, uint32_t count, str places not None):
    """Take slots out of use as a snapshot says; return what is wrong, or None.

    Containers that the region has no more are passed over.

    Parameters
    ----------
    places : str
        For each slot 6 hex digits of its container and 6 of its number.
    """
    cdef bytes text
    cdef const char *digits
    cdef uint64_t container, slot
    cdef uint32_t at
    if not places.isascii() or len(places) != 12 * <Py_ssize_t>count:
        return f"{len(places)} digits for {count} slots"
    text = places.encode("ascii")
    digits = PyBytes_AS_STRING(text)
    for at in range(count):
        if not (get_number(digits + 12 * at, 6, &container)
                and get_number(digits + 12 * at + 6, 6, &slot)):
            return f"slot {at}: not hex"
        if container >= allocator.container_count:
            continue
        if not allocator.has_slot(container, slot):
            return f"slot {slot} of container {container} is outside the geometry"
        if not allocator.quarantine_slot(container, slot):
            return f"slot {slot} of container {container} is taken twice"
    return None


def load_chunk(KeyIndex index not None, uint32_t count, list columns not None):
    """Restore the entries of one chunk into the index.

    Parameters
    ----------
    columns : list of bytes
        The hex text of key_len, key, at, len, xxh3, seq, meta_len, meta, and lz4 where there is.

    Returns
    -------
    str or None
        None when all was well; else what is wrong (entries before it are restored).
    """
    cdef bytes key_len, key, at, length, check, seq, meta_len, meta
    cdef bytes raw = columns[8] if len(columns) > 8 else None
    key_len, key, at, length, check, seq, meta_len, meta = columns[:8]
    cdef const char *key_lens = PyBytes_AS_STRING(key_len)
    cdef const char *keys = PyBytes_AS_STRING(key)
    cdef const char *places = PyBytes_AS_STRING(at)
    cdef const char *lengths = PyBytes_AS_STRING(length)
    cdef const char *checks = PyBytes_AS_STRING(check)
    cdef const char *seqs = PyBytes_AS_STRING(seq)
    cdef const char *meta_lens = PyBytes_AS_STRING(meta_len)
    cdef const char *metas = PyBytes_AS_STRING(meta)
    cdef const char *raws = NULL if raw is None else PyBytes_AS_STRING(raw)
    cdef size_t key_at = 0, meta_at = 0
    cdef uint64_t key_bytes, meta_bytes, container, slot, value_bytes, total, number
    cdef uint64_t raw_bytes = 0
    cdef uint8_t name[256]
    cdef uint8_t extra[256]
    cdef uint32_t item
    if count > CHUNK_LIMIT or count == 0:
        return f"a chunk of {count} entries"
    if not (PyBytes_GET_SIZE(key_len) == 2 * count and PyBytes_GET_SIZE(at) == 12 * count
            and PyBytes_GET_SIZE(length) == 8 * count and PyBytes_GET_SIZE(check) == 16 * count
            and PyBytes_GET_SIZE(seq) == 16 * count and PyBytes_GET_SIZE(meta_len) == 2 * count):
        return "columns of different length"
    if raw is not None and PyBytes_GET_SIZE(raw) != 8 * count:
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
        if raws != NULL and not get_number(raws + 8 * item, 8, &raw_bytes):
            return f"entry {item}: not hex"
        if raw_bytes and raw_bytes <= value_bytes:
            return f"entry {item}: {raw_bytes} bytes compressed to {value_bytes}"
        if (key_bytes == 0 or key_at + 2 * key_bytes > <uint64_t>PyBytes_GET_SIZE(key)
                or meta_at + 2 * meta_bytes > <uint64_t>PyBytes_GET_SIZE(meta)):
            return f"entry {item}: names outside their column"
        if not (get_bytes(keys + key_at, key_bytes, name)
                and get_bytes(metas + meta_at, meta_bytes, extra)):
            return f"entry {item}: names not hex"
        key_at += 2 * key_bytes
        meta_at += 2 * meta_bytes
        if not index.fits(<uint32_t>container, <uint32_t>slot, value_bytes,
                          <uint32_t>raw_bytes):
            return f"entry {item}: slot {slot} of container {container} is outside the geometry"
        if not index.restore_entry(name, key_bytes, extra, meta_bytes, <uint32_t>container,
                                   <uint32_t>slot, <uint32_t>value_bytes, total, number,
                                   <uint32_t>raw_bytes):
            return f"entry {item}: slot {slot} of container {container} is taken twice"
    return None
