"""A cache of keys alone under one rule: what simulations and trials are made of."""

from cpython.long cimport PyLong_AsUnsignedLongLongMask
from cpython.object cimport PyObject
from libc.stdint cimport int64_t

from tablespace.policy.eviction_queue cimport EvictionQueue
from tablespace.policy.ranked cimport Ranked
from tablespace.policy.rules cimport Rule

cdef extern from "Python.h":
    PyObject *PyDict_GetItemWithError(dict table, object key) except? NULL


cdef class RankedCache:
    """At most `capacity` keys; an absent one comes in at once and the lowest rank leaves.

    Parameters
    ----------
    capacity : int
    rule : Rule
        A fresh one.

    Notes
    -----
    Keys are integers, of which the lower 64 bits count. Thread rule: under the GIL.
    """

    def __cinit__(self, Py_ssize_t capacity, Rule rule not None):
        if capacity < 1:
            raise ValueError(f"a cache of {capacity} entries holds nothing; give more")
        self.capacity = capacity
        self.rule = rule
        self.queue = EvictionQueue(rule.resolution)
        self.entries = {}

    def __len__(self):
        return len(self.entries)

    def refer(self, identity, int64_t position):
        """Use a key, or store it; return whether it was there."""
        return self.look_up(lower_bits(identity), position)

    def play(self, identities):
        """Refer to the keys of one sequence, leading one first.

        Returns
        -------
        (int, int)
            How many were there, and how many before the first that was not.
        """
        cdef Py_ssize_t position = 0, hits = 0, leading = 0
        for identity in identities:
            if self.look_up(lower_bits(identity), position):
                hits += 1
                leading += leading == position
            position += 1
        return hits, leading

    cdef bint look_up(self, int64_t identity, int64_t position) except -1:
        cdef object key = identity
        cdef PyObject *found = PyDict_GetItemWithError(self.entries, key)
        cdef Ranked entry
        if found != NULL:
            entry = <Ranked>found
            self.rule.used(entry)
            self.queue.reorder(entry)
            return True
        if len(self.entries) >= self.capacity:
            entry = self.queue.lowest_one()
            if entry is None:
                raise RuntimeError("the rule took entries out of the queue of the cache")
            self.queue.remove(entry)
            del self.entries[entry.identity]
            self.rule.left(entry)
        entry = Ranked.__new__(Ranked)
        entry.identity = identity
        entry.position = position
        self.rule.stored(entry)
        self.queue.put(entry)
        self.entries[key] = entry
        return False


cdef int64_t lower_bits(identity) except? -1:
    return <int64_t>PyLong_AsUnsignedLongLongMask(identity)
