# cython: boundscheck=False
# C arrays only; every read of input is bounded by hand in `Cursor`.
"""Journal records as JSON lines: one exact layout, written and parsed without the GIL's help.

A line is a JSON object without white space whose last member, ``"line"``, is the XXH3-64 (16 hex
digits) of every byte before ``,"line":``.  docs/format.md specifies each member.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.errno cimport ENOMEM
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcmp, memcpy

from tablespace._core.checksum cimport xxh3_64
from tablespace._core.hex_text cimport HEX_VALUES, get_number, put_bytes, put_number

# The longest record: two names of 255 bytes in hex and some 200 bytes around them.
MAX_LINE_BYTES = 4096
cdef size_t LONGEST_LINE = 4096
# A snapshot chunk: 4096 entries with the longest keys and metadata.
cdef size_t MAX_ANY_LINE_BYTES = 8 << 20
cdef size_t TRAILER_BYTES = 27      # ,"line":"0123456789abcdef"}


cdef inline size_t write_number(char *out, uint64_t number) noexcept nogil:
    cdef char digits[20]
    cdef size_t count = 0, at
    while True:
        digits[count] = <char>(48 + number % 10)
        number //= 10
        count += 1
        if number == 0:
            break
    for at in range(count):
        out[at] = digits[count - 1 - at]
    return count


cdef inline size_t write_hex(char *out, const uint8_t *data, size_t length) noexcept nogil:
    put_bytes(out, data, length)
    return 2 * length


cdef inline size_t write_sum(char *out, uint64_t number) noexcept nogil:
    put_number(out, number, 16)
    return 16


cdef inline size_t write_text(char *out, const char *text, size_t length) noexcept nogil:
    memcpy(out, text, length)
    return length


cdef inline size_t seal_line(char *line, size_t length) noexcept nogil:
    """Append the line's own checksum, the closing brace and the newline; return the new length."""
    cdef uint64_t total = xxh3_64(line, length)
    length += write_text(line + length, b',"line":"', 9)
    length += write_sum(line + length, total)
    length += write_text(line + length, b'"}\n', 3)
    return length


cdef class LineWriter:
    """A growing buffer of journal lines."""

    def __cinit__(self):
        self.capacity = 1 << 16
        self.data = <char *>malloc(self.capacity)
        if self.data == NULL:
            raise MemoryError()

    def __dealloc__(self):
        free(self.data)

    def __len__(self):
        return self.used

    def getvalue(self):
        """Return the lines written so far as bytes."""
        return PyBytes_FromStringAndSize(self.data, self.used)

    def cut(self, size_t size_bytes):
        """Forget the lines written after the first `size_bytes`."""
        if size_bytes > self.used:
            raise ValueError(f"{size_bytes} bytes, but only {self.used} were written")
        self.used = size_bytes

    cdef int room(self, size_t more) noexcept nogil:
        """Make room for `more` bytes; 0, or -ENOMEM."""
        cdef char *grown
        cdef size_t capacity = self.capacity
        while self.used + more > capacity:
            capacity *= 2
        if capacity != self.capacity:
            grown = <char *>realloc(self.data, capacity)
            if grown == NULL:
                return -ENOMEM
            self.data = grown
            self.capacity = capacity
        return 0

    cdef char *begin(self, uint64_t seq, uint64_t group, const char *kind, size_t kind_length,
                     const uint8_t *key, size_t key_length, uint32_t container,
                     uint32_t slot) noexcept nogil:
        """Write what all records share; return where the line goes on, or NULL without memory."""
        if self.room(LONGEST_LINE) < 0:
            return NULL
        cdef char *out = self.data + self.used
        out += write_text(out, b'{"seq":', 7)
        out += write_number(out, seq)
        out += write_text(out, b',"grp":', 7)
        out += write_number(out, group)
        out += write_text(out, b',"op":"', 7)
        out += write_text(out, kind, kind_length)
        out += write_text(out, b'","key":"', 9)
        out += write_hex(out, key, key_length)
        out += write_text(out, b'","at":[', 8)
        out += write_number(out, container)
        out += write_text(out, b',', 1)
        out += write_number(out, slot)
        out += write_text(out, b']', 1)
        return out

    cdef int put_line(self, uint64_t seq, uint64_t group, const uint8_t *key, size_t key_length,
                      uint32_t container, uint32_t slot, uint32_t length, uint64_t check,
                      const uint8_t *metadata, size_t metadata_length,
                      uint32_t raw=0) noexcept nogil:
        cdef char *out = self.begin(seq, group, b"put", 3, key, key_length, container, slot)
        if out == NULL:
            return -ENOMEM
        out += write_text(out, b',"len":', 7)
        out += write_number(out, length)
        out += write_text(out, b',"xxh3":"', 9)
        out += write_sum(out, check)
        out += write_text(out, b'"', 1)
        if raw:
            out += write_text(out, b',"lz4":', 7)
            out += write_number(out, raw)
        if metadata_length:
            out += write_text(out, b',"meta":"', 9)
            out += write_hex(out, metadata, metadata_length)
            out += write_text(out, b'"', 1)
        self.used += seal_line(self.data + self.used, out - (self.data + self.used))
        return 0

    cdef int free_line(self, RecordKind kind, uint64_t seq, uint64_t group, const uint8_t *key,
                       size_t key_length, uint32_t container, uint32_t slot) noexcept nogil:
        cdef const char *name = b"delete"
        cdef size_t name_length = 6
        cdef char *out
        if kind == RECORD_EVICT:
            name = b"evict"
            name_length = 5
        elif kind == RECORD_DROP:
            name = b"drop"
            name_length = 4
        out = self.begin(seq, group, name, name_length, key, key_length, container, slot)
        if out == NULL:
            return -ENOMEM
        self.used += seal_line(self.data + self.used, out - (self.data + self.used))
        return 0

    cdef int pool_line(self, RecordKind kind, uint64_t seq, uint64_t group, uint32_t container,
                       uint32_t slot_bytes) noexcept nogil:
        cdef char *start
        cdef char *out
        if self.room(LONGEST_LINE) < 0:
            return -ENOMEM
        start = self.data + self.used
        out = start
        out += write_text(out, b'{"seq":', 7)
        out += write_number(out, seq)
        out += write_text(out, b',"grp":', 7)
        out += write_number(out, group)
        if kind == RECORD_CLAIM:
            out += write_text(out, b',"op":"claim","container":', 26)
        else:
            out += write_text(out, b',"op":"release","container":', 28)
        out += write_number(out, container)
        if kind == RECORD_CLAIM:
            out += write_text(out, b',"slot_bytes":', 14)
            out += write_number(out, slot_bytes)
        self.used += seal_line(start, out - start)
        return 0

    cdef int slot_line(self, RecordKind kind, uint64_t seq, uint64_t group, uint32_t container,
                       uint32_t slot) noexcept nogil:
        cdef char *start
        cdef char *out
        if self.room(LONGEST_LINE) < 0:
            return -ENOMEM
        start = self.data + self.used
        out = start
        out += write_text(out, b'{"seq":', 7)
        out += write_number(out, seq)
        out += write_text(out, b',"grp":', 7)
        out += write_number(out, group)
        if kind == RECORD_QUARANTINE:
            out += write_text(out, b',"op":"quarantine","at":[', 25)
        else:
            out += write_text(out, b',"op":"restore","at":[', 22)
        out += write_number(out, container)
        out += write_text(out, b',', 1)
        out += write_number(out, slot)
        out += write_text(out, b']', 1)
        self.used += seal_line(start, out - start)
        return 0

    def quarantine(self, seq, group, container, slot):
        """Append the record of a slot that failed its test: out of use."""
        if self.slot_line(RECORD_QUARANTINE, seq, group, container, slot) < 0:
            raise MemoryError()

    def restore(self, seq, group, container, slot):
        """Append the record of a quarantined slot that passed a later test: free."""
        if self.slot_line(RECORD_RESTORE, seq, group, container, slot) < 0:
            raise MemoryError()

    def claim(self, seq, group, container, slot_bytes):
        """Append the record of a container that a pool takes."""
        if self.pool_line(RECORD_CLAIM, seq, group, container, slot_bytes) < 0:
            raise MemoryError()

    def release(self, seq, group, container):
        """Append the record of an empty container that leaves its pool."""
        if self.pool_line(RECORD_RELEASE, seq, group, container, 0) < 0:
            raise MemoryError()

    def put(self, seq, group, bytes key, container, slot, length, check, metadata=None, raw=0):
        """Append one ``put`` record."""
        cdef bytes extra = metadata or b""
        if self.put_line(seq, group, <const uint8_t *>PyBytes_AS_STRING(key), len(key), container,
                         slot, length, check, <const uint8_t *>PyBytes_AS_STRING(extra),
                         len(extra), raw) < 0:
            raise MemoryError()

    def free(self, kind, seq, group, bytes key, container, slot):
        """Append one record that frees a slot; `kind` is "evict", "delete" or "drop"."""
        cdef RecordKind code
        if kind == "evict":
            code = RECORD_EVICT
        elif kind == "delete":
            code = RECORD_DELETE
        elif kind == "drop":
            code = RECORD_DROP
        else:
            raise ValueError(f"unknown kind {kind!r}")
        if self.free_line(code, seq, group, <const uint8_t *>PyBytes_AS_STRING(key), len(key),
                          container, slot) < 0:
            raise MemoryError()


def seal(bytes body):
    """Return a whole line: `body` (a JSON object without its closing brace), sum, newline."""
    cdef size_t length = PyBytes_GET_SIZE(body)
    cdef bytes out = PyBytes_FromStringAndSize(NULL, length + TRAILER_BYTES + 1)
    cdef char *data = PyBytes_AS_STRING(out)
    memcpy(data, PyBytes_AS_STRING(body), length)
    seal_line(data, length)
    return out


cdef struct Cursor:
    const char *at
    const char *end


cdef inline bint skip(Cursor *cursor, const char *text, size_t length) noexcept nogil:
    if <size_t>(cursor.end - cursor.at) < length or memcmp(cursor.at, text, length) != 0:
        return False
    cursor.at += length
    return True


cdef inline bint read_number(Cursor *cursor, uint64_t limit, uint64_t *out) noexcept nogil:
    """Read a decimal number without leading zeros, at most `limit`."""
    cdef uint64_t number = 0
    cdef int digit, count = 0
    while cursor.at < cursor.end and 48 <= cursor.at[0] <= 57:
        digit = cursor.at[0] - 48
        if number > (limit - digit) // 10:
            return False
        number = number * 10 + digit
        cursor.at += 1
        count += 1
        if count == 2 and number < 10:
            return False
    out[0] = number
    return count > 0


cdef inline bint read_hex(Cursor *cursor, uint8_t *out, uint32_t limit,
                          uint32_t *length) noexcept nogil:
    """Read an even number of hex digits up to a closing quote, and the quote."""
    cdef uint32_t count = 0
    cdef int high, low
    while cursor.end - cursor.at >= 2 and cursor.at[0] != 34:
        high = HEX_VALUES[<uint8_t>cursor.at[0]]
        low = HEX_VALUES[<uint8_t>cursor.at[1]]
        if high < 0 or low < 0 or count == limit:
            return False
        out[count] = <uint8_t>(high << 4 | low)
        count += 1
        cursor.at += 2
    length[0] = count
    return count > 0 and skip(cursor, b'"', 1)


cdef inline bint read_sum(Cursor *cursor, uint64_t *out) noexcept nogil:
    if cursor.end - cursor.at < 17 or not get_number(cursor.at, 16, out):
        return False
    cursor.at += 16
    return skip(cursor, b'"', 1)


cdef bint line_is_whole(const char *line, size_t length) noexcept nogil:
    """Say whether a line (without its newline) carries a checksum that fits it."""
    cdef Cursor cursor
    cdef uint64_t total
    if length <= TRAILER_BYTES or length > MAX_ANY_LINE_BYTES:
        return False
    cursor.at = line + length - TRAILER_BYTES
    cursor.end = line + length
    if not skip(&cursor, b',"line":"', 9):
        return False
    if not read_sum(&cursor, &total):
        return False
    if not skip(&cursor, b'}', 1):
        return False
    return total == xxh3_64(line, length - TRAILER_BYTES)


cdef bint parse_pool_record(Cursor *cursor, Record *out) noexcept nogil:
    """Parse what follows the op of a claim or release; the slot size lands in `length`."""
    cdef uint64_t number
    out.key_length = 0
    out.slot = 0
    if not (skip(cursor, b',"container":', 13) and read_number(cursor, 0xFFFFFFFF, &number)):
        return False
    out.container = <uint32_t>number
    if out.kind == RECORD_CLAIM:
        if not (skip(cursor, b',"slot_bytes":', 14)
                and read_number(cursor, 0xFFFFFFFF, &number)):
            return False
        out.length = <uint32_t>number
    return cursor.at == cursor.end


cdef bint parse_place(Cursor *cursor, Record *out) noexcept nogil:
    """Parse a member "at"."""
    cdef uint64_t number
    if not (skip(cursor, b',"at":[', 7) and read_number(cursor, 0xFFFFFFFF, &number)):
        return False
    out.container = <uint32_t>number
    if not (skip(cursor, b',', 1) and read_number(cursor, 0xFFFFFFFF, &number)
            and skip(cursor, b']', 1)):
        return False
    out.slot = <uint32_t>number
    return True


cdef bint parse_record(const char *line, size_t length, Record *out) noexcept nogil:
    """Parse a whole line of the exact layout above; False when it is any other text."""
    cdef Cursor cursor
    cdef uint64_t number
    if length <= TRAILER_BYTES:
        return False
    cursor.at = line
    cursor.end = line + length - TRAILER_BYTES
    out.kind = RECORD_NONE
    out.metadata_length = 0
    out.length = 0
    out.raw = 0
    out.check = 0
    if not (skip(&cursor, b'{"seq":', 7) and read_number(&cursor, <uint64_t>-1 >> 1, &out.seq)):
        return False
    if not (skip(&cursor, b',"grp":', 7) and read_number(&cursor, <uint64_t>-1 >> 1, &out.group)):
        return False
    if not skip(&cursor, b',"op":"', 7):
        return False
    if skip(&cursor, b'put"', 4):
        out.kind = RECORD_PUT
    elif skip(&cursor, b'evict"', 6):
        out.kind = RECORD_EVICT
    elif skip(&cursor, b'delete"', 7):
        out.kind = RECORD_DELETE
    elif skip(&cursor, b'drop"', 5):
        out.kind = RECORD_DROP
    elif skip(&cursor, b'claim"', 6):
        out.kind = RECORD_CLAIM
    elif skip(&cursor, b'release"', 8):
        out.kind = RECORD_RELEASE
    elif skip(&cursor, b'quarantine"', 11):
        out.kind = RECORD_QUARANTINE
    elif skip(&cursor, b'restore"', 8):
        out.kind = RECORD_RESTORE
    else:
        return False
    if out.kind == RECORD_QUARANTINE or out.kind == RECORD_RESTORE:
        out.key_length = 0
        return parse_place(&cursor, out) and cursor.at == cursor.end
    if out.kind == RECORD_CLAIM or out.kind == RECORD_RELEASE:
        return parse_pool_record(&cursor, out)
    if not (skip(&cursor, b',"key":"', 8) and read_hex(&cursor, out.key, 255, &out.key_length)):
        return False
    if not parse_place(&cursor, out):
        return False
    if out.kind == RECORD_PUT:
        if not (skip(&cursor, b',"len":', 7) and read_number(&cursor, 0xFFFFFFFF, &number)):
            return False
        out.length = <uint32_t>number
        if not (skip(&cursor, b',"xxh3":"', 9) and read_sum(&cursor, &out.check)):
            return False
        if skip(&cursor, b',"lz4":', 7):
            # Compressing always saves something: a record of another relation is none of ours.
            if not read_number(&cursor, 0xFFFFFFFF, &number) or number <= out.length:
                return False
            out.raw = <uint32_t>number
        if cursor.at < cursor.end:
            if not (skip(&cursor, b',"meta":"', 9)
                    and read_hex(&cursor, out.metadata, 255, &out.metadata_length)):
                return False
    return cursor.at == cursor.end


def is_whole(const unsigned char[::1] line not None):
    """Say whether a line, without its newline, ends in a checksum that fits it."""
    if line.shape[0] == 0:
        return False
    return bool(line_is_whole(<const char *>&line[0], line.shape[0]))


def parse(bytes line not None):
    """Parse one whole record line (without newline) into a dict, or return None.

    None means a wrong checksum or another layout; both are damage in a journal of this version.
    """
    cdef Record record
    cdef const char *data = PyBytes_AS_STRING(line)
    cdef size_t length = PyBytes_GET_SIZE(line)
    if not line_is_whole(data, length) or not parse_record(data, length, &record):
        return None
    names = {RECORD_PUT: "put", RECORD_EVICT: "evict", RECORD_DELETE: "delete",
             RECORD_DROP: "drop", RECORD_CLAIM: "claim", RECORD_RELEASE: "release",
             RECORD_QUARANTINE: "quarantine", RECORD_RESTORE: "restore"}
    if record.kind == RECORD_CLAIM or record.kind == RECORD_RELEASE:
        out = {"op": names[record.kind], "seq": record.seq, "grp": record.group,
               "container": record.container}
        if record.kind == RECORD_CLAIM:
            out["slot_bytes"] = record.length
        return out
    if record.kind == RECORD_QUARANTINE or record.kind == RECORD_RESTORE:
        return {"op": names[record.kind], "seq": record.seq, "grp": record.group,
                "container": record.container, "slot": record.slot}
    out = {
        "op": names[record.kind], "seq": record.seq, "grp": record.group,
        "key": PyBytes_FromStringAndSize(<char *>record.key, record.key_length),
        "container": record.container, "slot": record.slot,
    }
    if record.kind == RECORD_PUT:
        out["length"] = record.length
        out["check"] = record.check
        if record.raw:
            out["lz4"] = record.raw
        out["metadata"] = (
            PyBytes_FromStringAndSize(<char *>record.metadata, record.metadata_length)
            if record.metadata_length else None)
    return out
