"""Which slots of a region are free, over all its containers."""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport free as c_free, malloc

from tablespace._core.slot_bitset cimport SlotBitset


cdef class SlotAllocator:
    """Hands out slots; one commit group's blocks come from as few containers as possible.

    Each further container of a group costs a sync, so a group takes a run from one container and
    the next group starts at the next one.  Not thread-safe by itself: called under the GIL.
    """

    def __cinit__(self, uint32_t container_count, uint32_t slots_per_container):
        cdef uint32_t at
        self.container_count = container_count
        self.slots_per_container = slots_per_container
        self.free_count = <uint64_t>container_count * slots_per_container
        self.bitsets = [SlotBitset(slots_per_container) for _ in range(container_count)]
        self.rows = <void **>malloc(container_count * sizeof(void *))
        if self.rows == NULL:
            raise MemoryError()
        for at in range(container_count):
            self.rows[at] = <void *>self.bitsets[at]

    def __dealloc__(self):
        c_free(self.rows)

    @property
    def capacity(self):
        """Number of slots, free or not."""
        return self.container_count * self.slots_per_container

    cdef uint32_t reserve_run(self, uint64_t *out, uint32_t wanted) noexcept:
        """Reserve up to `wanted` slots into `out`; return how many there were."""
        cdef uint32_t got = 0, tried, at, best, best_free, free_here
        cdef int64_t slot
        cdef SlotBitset bitset
        while got < wanted and self.free_count:
            # The next container in turn that holds the whole rest, else the one with most room.
            best = self.container_count
            best_free = 0
            for tried in range(self.container_count):
                at = (self.next_container + tried) % self.container_count
                bitset = <SlotBitset>self.rows[at]
                free_here = self.slots_per_container - bitset.used
                if free_here > best_free:
                    best = at
                    best_free = free_here
                if free_here >= wanted - got:
                    break
            if best == self.container_count:
                break
            bitset = <SlotBitset>self.rows[best]
            while got < wanted:
                slot = bitset.reserve()
                if slot < 0:
                    break
                out[got] = pack_location(best, <uint32_t>slot)
                got += 1
                self.free_count -= 1
            self.next_container = (best + 1) % self.container_count
        return got

    cdef bint mark(self, uint32_t container, uint32_t slot) noexcept:
        if (<SlotBitset>self.rows[container]).mark(slot):
            self.free_count -= 1
            return True
        return False

    cdef bint release(self, uint64_t location) noexcept:
        cdef uint32_t container = location_container(location)
        if (<SlotBitset>self.rows[container]).free(location_slot(location)):
            self.free_count += 1
            return True
        return False

    def used_slots(self, uint32_t container):
        """Return how many slots of a container are not free."""
        if container >= self.container_count:
            raise IndexError(f"container {container} outside 0..{self.container_count - 1}")
        return (<SlotBitset>self.rows[container]).used

    def popcount(self):
        """Count the slots that are not free by looking at every bit (for audits)."""
        return sum(bitset.popcount() for bitset in self.bitsets)

    def reserve_slots(self, uint32_t wanted):
        """Reserve up to `wanted` slots; return a list of (container, slot)."""
        cdef uint64_t *out = <uint64_t *>malloc(max(1, wanted) * sizeof(uint64_t))
        if out == NULL:
            raise MemoryError()
        try:
            got = self.reserve_run(out, wanted)
            return [(location_container(out[at]), location_slot(out[at])) for at in range(got)]
        finally:
            c_free(out)

    def release_slot(self, uint32_t container, uint32_t slot):
        """Give a slot back; return False when it was free already."""
        if container >= self.container_count or slot >= self.slots_per_container:
            raise IndexError(f"no slot {slot} in container {container}")
        return bool(self.release(pack_location(container, slot)))
