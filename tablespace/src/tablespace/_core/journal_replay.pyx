# cython: boundscheck=False
# C arrays only; lines are bounded by the buffer.
"""Apply a journal's record lines to an index, fast, until one does not fit."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memchr

from tablespace._core.checksum cimport hash_key
from tablespace._core.key_index cimport Entry, KeyIndex
from tablespace._core.line_codec cimport (
    RECORD_CLAIM,
    RECORD_PUT,
    RECORD_QUARANTINE,
    RECORD_RELEASE,
    RECORD_RESTORE,
    Record,
    line_is_whole,
    parse_record,
)
from tablespace._core.slot_allocator cimport pack_location

cdef extern from "string.h" nogil:
    void *memmem(const void *haystack, size_t length, const void *needle, size_t needle_length)

# The longest record line is some 1,300 bytes; anything longer is damage.
cdef size_t MAX_RECORD_BYTES = 4096


cdef const char *RECORD_START = b'{"seq":'
cdef size_t RECORD_START_BYTES = 7


cdef const char *find_record(const char *at, const char *end) noexcept nogil:
    """Find the next place where a record's text begins, or NULL; keys are hex and hold none."""
    return <const char *>memmem(at, end - at, RECORD_START, RECORD_START_BYTES)


cdef class JournalReplay:
    """Replays record lines in order.

    Parameters
    ----------
    index : KeyIndex
    seq : int
        Records up to this number are already in the index and are skipped.

    Attributes
    ----------
    seq, group : int
        Of the last record applied.
    place : int
        Number of the record due next in this journal, which may repeat records applied before.
    applied : int
    missing : int
        Numbers that no record had; passed over when `lenient`.
    problem : str or None
        Why `feed` stopped.
    whole : bool
        Whether it stopped at a record whose checksum fits.
    """

    cdef readonly KeyIndex index
    cdef public uint64_t seq
    cdef public uint64_t place       # number of the record due at this place of this journal
    cdef public uint64_t group
    cdef readonly uint64_t applied
    cdef readonly uint64_t missing
    cdef readonly object problem
    cdef readonly bint whole
    cdef public bint lenient

    def __init__(self, KeyIndex index not None, uint64_t seq):
        self.index = index
        self.seq = seq

    def feed(self, bytes data not None, size_t start=0):
        """Apply lines of `data` from `start` on.

        Returns
        -------
        int
            Where it stopped: at the end of `data`, at a line without its newline, or at the first
            line that is no sound next record (`problem` then says why).  Empty lines are filler.
        """
        cdef const char *base = PyBytes_AS_STRING(data)
        cdef size_t total = PyBytes_GET_SIZE(data)
        cdef size_t at = start, length
        cdef const char *newline
        cdef Record record
        self.problem = None
        self.whole = False
        while at < total:
            newline = <const char *>memchr(base + at, 10, total - at)
            if newline == NULL:
                self.problem = "a line without its end"
                break
            length = newline - (base + at)
            if length == 0:
                at += 1
                continue
            if (length > MAX_RECORD_BYTES or not line_is_whole(base + at, length)
                    or not parse_record(base + at, length, &record)):
                self.problem = "not a record whose checksum fits"
                break
            if not self.apply(&record):
                self.whole = True
                break
            at += length + 1
        return at

    cdef bint apply(self, Record *record) except -1:
        cdef int64_t found
        if record.seq <= self.seq:
            self.place = record.seq + 1
            if self.lenient:
                self.forget_older(record)
            return True
        if record.seq != self.seq + 1 and not self.lenient:
            self.problem = f"record {record.seq} follows record {self.seq}"
            return False
        if record.group > record.seq or record.group < self.group:
            self.problem = f"record {record.seq} claims group {record.group}"
            return False
        if record.container >= self.index.allocator.container_count:
            return self.outside(record)
        if record.kind == RECORD_PUT:
            if not self.put(record):
                return False
        elif record.kind == RECORD_CLAIM or record.kind == RECORD_RELEASE:
            if not self.move(record):
                return False
        elif record.kind == RECORD_QUARANTINE:
            if not self.quarantine(record):
                return False
        elif record.kind == RECORD_RESTORE:
            if not self.restore(record):
                return False
        else:
            found = self.index.find(record.key, record.key_length,
                                    hash_key(record.key, record.key_length))
            # Only the very copy the record freed: the key may have been stored anew meanwhile.
            if found >= 0 and (self.index.entry(<uint32_t>found).location >> 16
                               == pack_location(record.container, record.slot) >> 16):
                self.index.remove(<uint32_t>found)
        self.missing += record.seq - self.seq - 1
        self.place = record.seq + 1
        self.seq = record.seq
        self.group = record.group
        self.applied += 1
        return True

    cdef int forget_older(self, Record *record) except -1:
        """Let a record that stands behind later ones still take out what it replaced or freed."""
        cdef int64_t found
        cdef Entry *entry
        if record.key_length == 0:
            return 0
        found = self.index.find(record.key, record.key_length,
                                hash_key(record.key, record.key_length))
        if found < 0:
            return 0
        entry = self.index.entry(<uint32_t>found)
        if entry.seq < record.seq and (
                record.kind == RECORD_PUT
                or entry.location >> 16 == pack_location(record.container, record.slot) >> 16):
            self.index.remove(<uint32_t>found)
        return 0

    cdef bint outside(self, Record *record) except -1:
        if (record.container < self.index.allocator.container_count
                and self.index.allocator.pool_of_container(record.container) < 0):
            self.problem = (f"record {record.seq} names slot {record.slot} of container "
                            f"{record.container}, which no record before it gave a slot size")
            return False
        self.problem = (f"record {record.seq} names slot {record.slot} of container "
                        f"{record.container}, outside the geometry")
        return False

    cdef bint put(self, Record *record) except -1:
        cdef int pool
        if self.lenient and not self.index.fits(record.container, record.slot, record.length):
            # The record that gave it its slot size is lost; values are in the smallest that fits.
            pool = self.index.allocator.pool_for(record.length)
            if pool >= 0:
                self.index.allocator.assign(record.container, pool)
        if not self.index.fits(record.container, record.slot, record.length, record.raw):
            return self.outside(record)
        if not self.store(record):
            if not self.lenient:
                self.problem = (f"record {record.seq} stores into slot {record.slot} of "
                                f"container {record.container}, which is taken")
                return False
            # The highest sequence number owns a slot, also where its return to use is lost.
            self.index.allocator.restore_slot(record.container, record.slot)
            self.index.evict_owner(record.container, record.slot)
            self.store(record)
        return True

    cdef bint quarantine(self, Record *record) except -1:
        if not self.index.fits(record.container, record.slot, 0):
            return self.outside(record)
        if self.index.allocator.quarantine_slot(record.container, record.slot):
            return True
        if not self.lenient:
            self.problem = (f"record {record.seq} quarantines slot {record.slot} of container "
                            f"{record.container}, which is not free")
            return False
        if self.index.evict_owner(record.container, record.slot):
            self.index.allocator.quarantine_slot(record.container, record.slot)
        return True

    cdef bint restore(self, Record *record) except -1:
        if not self.index.fits(record.container, record.slot, 0):
            return self.outside(record)
        if (self.index.allocator.restore_slot(record.container, record.slot)
                or self.lenient):
            return True
        self.problem = (f"record {record.seq} restores slot {record.slot} of container "
                        f"{record.container}, which is not quarantined")
        return False

    cdef bint move(self, Record *record) except -1:
        """Apply a claim or a release."""
        cdef int pool = -1
        cdef uint32_t at
        if record.kind == RECORD_CLAIM:
            for at in range(self.index.allocator.pool_count):
                if self.index.allocator.pool_bytes[at] == record.length:
                    pool = <int>at
            if pool < 0:
                self.problem = f"record {record.seq} claims slots of {record.length} bytes"
                return False
        if not self.index.allocator.assign(record.container, pool):
            self.problem = f"record {record.seq} moves container {record.container}, not empty"
            return False
        return True

    cdef bint store(self, Record *record) except -1:
        return self.index.restore_entry(
            record.key, record.key_length, record.metadata, record.metadata_length,
            record.container, record.slot, record.length, record.check, record.seq, record.raw)


def later_group_follows(bytes data not None, size_t start, uint64_t bad_seq):
    """Say whether a sound record of a group that began after `bad_seq` stands after `start`.

    A group's number is the sequence number of its first record, and a group is appended only
    after the one before it was synced: so such a record proves that the bad line was once durable
    and has been damaged since.  Without one the bad line is a torn tail.
    """
    cdef const char *base = PyBytes_AS_STRING(data)
    cdef const char *end = base + PyBytes_GET_SIZE(data)
    cdef const char *at = find_record(base + start, end)
    cdef const char *newline
    cdef size_t length
    cdef Record record
    while at != NULL:
        newline = <const char *>memchr(at, 10, end - at)
        if newline == NULL:
            return False
        length = newline - at
        if (length <= MAX_RECORD_BYTES and line_is_whole(at, length)
                and parse_record(at, length, &record) and record.group > bad_seq):
            return True
        at = find_record(at + 1, end)
    return False


def next_record(bytes data not None, size_t start):
    """Return where the record text after the one at `start` begins (the end of `data` at most).

    Not the next line: a damaged newline joins two lines, and the second may be sound.
    """
    cdef const char *base = PyBytes_AS_STRING(data)
    cdef size_t total = PyBytes_GET_SIZE(data)
    cdef const char *found
    if start + 1 >= total:
        return total
    found = find_record(base + start + 1, base + total)
    return total if found == NULL else <size_t>(found - base)
