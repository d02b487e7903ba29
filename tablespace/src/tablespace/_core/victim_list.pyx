"""Entries on their way out of a full region."""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc

from tablespace._core.key_index cimport ENTRY_EVICTING, ENTRY_LIVE, Entry, KeyIndex
from tablespace._core.line_codec cimport RECORD_EVICT, LineWriter
from tablespace._core.slot_allocator cimport location_container, location_slot


cdef class VictimList:
    """Entries chosen for eviction, still readable until their records are durable.

    Parameters
    ----------
    index : KeyIndex
    wanted : int
        At most this many.
    pool : int
        The least recently used of this pool.
    container : int, optional
        Instead, those that lie in this container.
    keys : list, optional
        Instead, the first of these that may go, then the least recently used for the rest.

    Attributes
    ----------
    named : int
        How many of `keys` were taken.
    passed_over : list of str
        Why others of them were not.
    """

    cdef KeyIndex index
    cdef uint32_t *ids      # owned
    cdef readonly uint32_t count, named
    cdef readonly list passed_over

    def __cinit__(self, KeyIndex index not None, uint32_t wanted, uint32_t pool=0,
                  int64_t container=-1, list keys=None):
        self.index = index
        self.ids = <uint32_t *>malloc(max(1, wanted) * sizeof(uint32_t))
        if self.ids == NULL:
            raise MemoryError()
        if container >= 0:
            self.count = index.choose_container(<uint32_t>container, self.ids, wanted)
        else:
            self.passed_over = []
            if keys is not None:
                self.named = index.choose_keys(pool, keys, self.ids, wanted, self.passed_over)
            self.count = self.named + index.choose_victims(
                pool, self.ids + self.named, wanted - self.named)

    def __dealloc__(self):
        free(self.ids)

    def encode(self, LineWriter writer not None, uint64_t seq, uint64_t group):
        """Append an ``evict`` record for each; return the next sequence number."""
        cdef uint32_t at
        cdef Entry *entry
        for at in range(self.count):
            entry = self.index.entry(self.ids[at])
            if not (entry.flags & ENTRY_LIVE and entry.flags & ENTRY_EVICTING):
                continue  # A reader found it damaged meanwhile: its own record follows.
            if writer.free_line(
                    RECORD_EVICT, seq, group, entry.name, entry.key_length,
                    location_container(entry.location), location_slot(entry.location)) < 0:
                raise MemoryError()
            seq += 1
        return seq

    def publish(self):
        """Remove the victims, whose records are durable; return how many were still there."""
        cdef uint32_t at, removed = 0
        cdef Entry *entry
        for at in range(self.count):
            entry = self.index.entry(self.ids[at])
            if entry.flags & ENTRY_LIVE and entry.flags & ENTRY_EVICTING:
                self.index.remove(self.ids[at])
                removed += 1
        return removed

    def spare(self):
        """Let the victims live: their records were not written."""
        cdef uint32_t at
        cdef Entry *entry
        for at in range(self.count):
            entry = self.index.entry(self.ids[at])
            if entry.flags & ENTRY_LIVE:
                entry.flags &= <uint8_t>(0xFF ^ ENTRY_EVICTING)
