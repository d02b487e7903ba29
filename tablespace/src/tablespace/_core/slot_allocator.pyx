"""Which slots of a region are free, over all its containers and pools."""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport free as c_free, malloc
from libc.string cimport memset

from tablespace._core.slot_bitset cimport SlotBitset

NO_POOL = -1


cdef class SlotAllocator:
    """Hands out slots; one commit group's blocks come from as few containers as possible.

    Each further container of a group costs a sync, so a group takes a run from one container and
    the next group starts at the next one.  A container belongs to no pool until a pool takes it,
    and an empty one may be taken over by another pool; both are journalled by the caller, who
    finds them in `fresh`.  Not thread-safe by itself: called under the GIL.

    Parameters
    ----------
    container_count : int
    container_bytes : int
    slot_sizes : sequence of int
        Ascending; one pool each.
    """

    def __cinit__(self, uint32_t container_count, uint64_t container_bytes, slot_sizes):
        cdef uint32_t pool
        sizes = tuple(slot_sizes)
        if not 1 <= len(sizes) <= MAX_POOLS:
            raise ValueError(f"1..{MAX_POOLS} slot sizes, not {len(sizes)}")
        self.container_count = container_count
        self.unassigned_count = container_count
        self.pool_count = <uint32_t>len(sizes)
        for pool in range(self.pool_count):
            self.pool_bytes[pool] = sizes[pool]
            self.pool_slots[pool] = container_bytes // sizes[pool]
        self.bitsets = [None] * container_count
        self.fresh = []
        self.quarantined = set()
        self.rows = <void **>malloc(container_count * sizeof(void *))
        self.pool_of = <int8_t *>malloc(container_count)
        if self.rows == NULL or self.pool_of == NULL:
            raise MemoryError()
        memset(self.rows, 0, container_count * sizeof(void *))
        memset(self.pool_of, NO_POOL, container_count)

    def __dealloc__(self):
        c_free(self.rows)
        c_free(self.pool_of)

    @property
    def free_count(self):
        """Free slots; a container without a pool counts as slots of the smallest size."""
        return self.free_slots() + <uint64_t>self.unassigned_count * self.pool_slots[0]

    @property
    def capacity(self):
        """All slots, free or not; counted as `free_count` does."""
        cdef uint32_t pool
        total = <uint64_t>self.unassigned_count * self.pool_slots[0]
        for pool in range(self.pool_count):
            total += <uint64_t>self.pool_containers[pool] * self.pool_slots[pool]
        return total

    def free_slots(self):
        """Count the free slots in containers that belong to a pool."""
        cdef uint32_t pool
        total = 0
        for pool in range(self.pool_count):
            total += self.pool_free[pool]
        return total

    def room(self, uint32_t pool):
        """Return how many slots a pool can hand out without an eviction."""
        cdef uint32_t at, others = 0
        if self.pool_count > 1:
            for at in range(self.container_count):
                if self.pool_of[at] >= 0 and self.pool_of[at] != <int>pool:
                    others += (<SlotBitset>self.rows[at]).used == 0
        return (self.pool_free[pool]
                + <uint64_t>(self.unassigned_count + others) * self.pool_slots[pool])

    def pool_capacity(self, uint32_t pool):
        """Return the usable slots a pool has or could have without taking from another."""
        containers = <uint64_t>self.pool_containers[pool] + self.unassigned_count
        return containers * self.pool_slots[pool] - self.pool_quarantined[pool]

    def has_empty(self, pool):
        """Say whether a container could be given to a pool without an eviction."""
        cdef uint32_t at
        for at in range(self.container_count):
            if self.pool_of[at] < 0:
                return True
            if self.pool_of[at] != <int>pool and (<SlotBitset>self.rows[at]).used == 0:
                return True
        return False

    def fewest_slots(self):
        """Return how many slots a container has in the pool of the largest ones."""
        return self.pool_slots[self.pool_count - 1]

    def pool_stats(self):
        """Return (slot_bytes, containers, slots, free slots) of each pool."""
        cdef uint32_t pool
        return [
            (self.pool_bytes[pool], self.pool_containers[pool],
             self.pool_containers[pool] * <uint64_t>self.pool_slots[pool], self.pool_free[pool])
            for pool in range(self.pool_count)
        ]

    cdef uint64_t slot_bytes_of(self, uint64_t location) noexcept nogil:
        """Return the slot size of a location's container, which belongs to a pool."""
        return self.pool_bytes[self.pool_of[location_container(location)]]

    cdef int pool_for(self, uint64_t length) noexcept nogil:
        """Return the pool of the smallest slots that hold `length` bytes, or -1."""
        cdef uint32_t pool
        for pool in range(self.pool_count):
            if length <= self.pool_bytes[pool]:
                return <int>pool
        return -1

    cdef bint assign(self, uint32_t container, int pool) except -1:
        """Move an empty container to a pool (-1: to none); False when it is not empty."""
        cdef SlotBitset bitset = None
        cdef int old = self.pool_of[container]
        if old >= 0 and (<SlotBitset>self.rows[container]).used:
            return False
        if pool >= 0:
            bitset = SlotBitset(self.pool_slots[pool])
        if old >= 0:
            self.pool_free[old] -= self.pool_slots[old]
            self.pool_containers[old] -= 1
        else:
            self.unassigned_count -= 1
        self.bitsets[container] = bitset
        self.rows[container] = <void *>bitset if pool >= 0 else NULL
        self.pool_of[container] = <int8_t>pool
        if pool >= 0:
            self.pool_free[pool] += self.pool_slots[pool]
            self.pool_containers[pool] += 1
        else:
            self.unassigned_count += 1
        return True

    cdef int64_t take_container(self, uint32_t pool) except -2:
        """Give a pool one more container: one without a pool, else an empty one of another."""
        cdef uint32_t at
        cdef int64_t chosen = -1
        cdef int old
        for at in range(self.container_count):
            old = self.pool_of[at]
            if old < 0:
                chosen = at
                break
            if chosen < 0 and old != <int>pool and (<SlotBitset>self.rows[at]).used == 0:
                chosen = at
        if chosen >= 0:
            old = self.pool_of[chosen]
            self.assign(<uint32_t>chosen, <int>pool)
            self.fresh.append((chosen, old, pool))
        return chosen

    def settle(self):
        """The records of `fresh` are durable."""
        self.fresh.clear()

    def revert(self):
        """The records of `fresh` were not written: its containers, empty again, go back."""
        for container, old, _ in reversed(self.fresh):
            self.assign(container, old)
        self.fresh.clear()

    cdef uint32_t reserve_run(self, uint32_t pool, uint64_t *out,
                              uint32_t wanted) except? 0xFFFFFFFF:
        """Reserve up to `wanted` slots of a pool into `out`; return how many there were."""
        cdef uint32_t got = 0, tried, at, best, best_free, free_here
        cdef int64_t slot
        cdef SlotBitset bitset
        while got < wanted:
            # The next container in turn that holds the whole rest, else the one with most room.
            best = self.container_count
            best_free = 0
            if self.pool_free[pool]:
                for tried in range(self.container_count):
                    at = (self.next_container[pool] + tried) % self.container_count
                    if self.pool_of[at] != <int>pool:
                        continue
                    free_here = self.pool_slots[pool] - (<SlotBitset>self.rows[at]).used
                    if free_here > best_free:
                        best = at
                        best_free = free_here
                    if free_here >= wanted - got:
                        break
            # A fresh container is worth more than a third sync, but not more than the last one.
            if best_free == 0 or (best_free < wanted - got and self.unassigned_count):
                slot = self.take_container(pool)
                if slot >= 0:
                    best = <uint32_t>slot
                elif best_free == 0:
                    break
            bitset = <SlotBitset>self.rows[best]
            while got < wanted:
                slot = bitset.reserve()
                if slot < 0:
                    break
                out[got] = pack_location(best, <uint32_t>slot)
                got += 1
                self.pool_free[pool] -= 1
            self.next_container[pool] = (best + 1) % self.container_count
        return got

    cdef bint mark(self, uint32_t container, uint32_t slot) noexcept:
        """Set one slot of a container that belongs to a pool; False when it was set already."""
        if (<SlotBitset>self.rows[container]).mark(slot):
            self.pool_free[self.pool_of[container]] -= 1
            return True
        return False

    cdef bint release(self, uint64_t location) noexcept:
        cdef uint32_t container = location_container(location)
        if (<SlotBitset>self.rows[container]).free(location_slot(location)):
            self.pool_free[self.pool_of[container]] += 1
            return True
        return False

    cdef int quarantine(self, uint64_t location) except -1:
        """Take a slot that is set, and that no entry owns, out of use."""
        self.quarantined.add(location)
        self.quarantined_count += 1
        self.pool_quarantined[self.pool_of[location_container(location)]] += 1
        return 0

    cdef int restore(self, uint64_t location) except -1:
        """Take a quarantined slot into use again."""
        self.quarantined.remove(location)
        self.quarantined_count -= 1
        self.pool_quarantined[self.pool_of[location_container(location)]] -= 1
        self.release(location)
        return 0

    # Python surface.

    def quarantined_slots(self):
        """Return (container, slot) of every slot out of use, ascending."""
        return [(location_container(each), location_slot(each))
                for each in sorted(self.quarantined)]

    def has_slot(self, container, slot):
        """Say whether a container belongs to a pool that has this slot."""
        if not 0 <= container < self.container_count or self.pool_of[<uint32_t>container] < 0:
            return False
        return 0 <= slot < self.pool_slots[self.pool_of[<uint32_t>container]]

    def is_quarantined(self, container, slot):
        """Say whether a slot is out of use."""
        return (self.has_slot(container, slot)
                and pack_location(container, slot) in self.quarantined)

    def quarantine_slot(self, container, uint32_t slot):
        """Take a free slot out of use; return False when it is not free."""
        if not self.has_slot(container, slot):
            raise IndexError(f"no slot {slot} in container {container}")
        if not self.mark(container, slot):
            return False
        self.quarantine(pack_location(container, slot))
        return True

    def restore_slot(self, container, uint32_t slot):
        """Take a quarantined slot into use again; return False when it is not quarantined."""
        if not self.is_quarantined(container, slot):
            return False
        self.restore(pack_location(container, slot))
        return True

    def slot_bytes_of_container(self, container):
        """Return the slot size of a container that belongs to a pool."""
        if self.pool_of[<uint32_t>self._checked(container)] < 0:
            raise IndexError(f"container {container} belongs to no pool")
        return self.pool_bytes[self.pool_of[<uint32_t>container]]

    def _checked(self, container):
        if not 0 <= container < self.container_count:
            raise IndexError(f"container {container} outside 0..{self.container_count - 1}")
        return container

    def assign_container(self, container, int pool):
        """Move an empty container to a pool (-1: to none); return False when it is not empty."""
        if pool >= <int>self.pool_count:
            raise IndexError(f"pool {pool} outside 0..{self.pool_count - 1}")
        return bool(self.assign(self._checked(container), pool))

    def pool_of_container(self, container):
        """Return the pool of a container, -1 for none."""
        return self.pool_of[<uint32_t>self._checked(container)]

    def pool_of_length(self, length):
        """Return the pool of the smallest slots that hold `length` bytes, -1 when none does."""
        return self.pool_for(length)

    def used_slots(self, container):
        """Return how many slots of a container are not free."""
        bitset = self.bitsets[self._checked(container)]
        return 0 if bitset is None else bitset.used

    def popcount(self):
        """Count the slots that are not free by looking at every bit (for audits)."""
        return sum(bitset.popcount() for bitset in self.bitsets if bitset is not None)

    def reserve_slots(self, uint32_t wanted, uint32_t pool=0):
        """Reserve up to `wanted` slots of a pool; return a list of (container, slot)."""
        cdef uint64_t *out = <uint64_t *>malloc(max(1, wanted) * sizeof(uint64_t))
        if out == NULL:
            raise MemoryError()
        try:
            got = self.reserve_run(pool, out, wanted)
            return [(location_container(out[at]), location_slot(out[at])) for at in range(got)]
        finally:
            c_free(out)

    def release_slot(self, container, uint32_t slot):
        """Give a slot back; return False when it was free already."""
        bitset = self.bitsets[self._checked(container)]
        if bitset is None or slot >= bitset.slot_count:
            raise IndexError(f"no slot {slot} in container {container}")
        return bool(self.release(pack_location(container, slot)))
