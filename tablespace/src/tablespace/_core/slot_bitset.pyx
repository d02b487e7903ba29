"""A bitset of one container's slots: set means not free."""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free as c_free

cdef extern from *:
    """
    static inline int lowest_set(unsigned long long word) { return __builtin_ctzll(word); }
    """
    int lowest_set(uint64_t word) nogil


cdef class SlotBitset:
    """The free slots of one container; the lowest free slot is handed out first.

    Not thread-safe by itself: the store calls it under the GIL.
    """

    def __cinit__(self, uint32_t slot_count):
        if slot_count == 0:
            raise ValueError("slot_count must be at least 1")
        self.slot_count = slot_count
        self.word_count = (slot_count + 63) // 64
        self.words = <uint64_t *>calloc(self.word_count, sizeof(uint64_t))
        if self.words == NULL:
            raise MemoryError()
        # The bits past the end are set for ever, so that no search needs a bound.
        if slot_count % 64:
            self.words[self.word_count - 1] = <uint64_t>-1 << (slot_count % 64)

    def __dealloc__(self):
        c_free(self.words)

    cdef int64_t reserve(self) noexcept nogil:
        cdef uint32_t at = self.hint
        cdef int bit
        while at < self.word_count:
            if self.words[at] != <uint64_t>-1:
                bit = lowest_set(~self.words[at])
                self.words[at] |= <uint64_t>1 << bit
                self.used += 1
                self.hint = at
                return <int64_t>at * 64 + bit
            at += 1
        self.hint = self.word_count
        return -1

    cdef bint test(self, uint32_t slot) noexcept nogil:
        return (self.words[slot >> 6] >> (slot & 63)) & 1

    cdef bint mark(self, uint32_t slot) noexcept nogil:
        if self.test(slot):
            return False
        self.words[slot >> 6] |= <uint64_t>1 << (slot & 63)
        self.used += 1
        return True

    cdef bint free(self, uint32_t slot) noexcept nogil:
        if not self.test(slot):
            return False
        self.words[slot >> 6] &= ~(<uint64_t>1 << (slot & 63))
        self.used -= 1
        if (slot >> 6) < self.hint:
            self.hint = slot >> 6
        return True

    def _checked(self, slot):
        if not 0 <= slot < self.slot_count:
            raise IndexError(f"slot {slot} outside 0..{self.slot_count - 1}")
        return slot

    def reserve_slot(self):
        """Take the lowest free slot; return its index, or -1 when none is free."""
        return self.reserve()

    def mark_slot(self, slot):
        """Set one slot; return False when it was set already."""
        return bool(self.mark(self._checked(slot)))

    def free_slot(self, slot):
        """Clear one slot; return False when it was free already."""
        return bool(self.free(self._checked(slot)))

    def is_used(self, slot):
        """Say whether a slot is set."""
        return bool(self.test(self._checked(slot)))

    def popcount(self):
        """Count the set slots by looking at every word (for audits; `used` is kept up to date)."""
        total = 0
        for at in range(self.word_count):
            total += int(self.words[at]).bit_count()
        return total - (-self.slot_count % 64)
