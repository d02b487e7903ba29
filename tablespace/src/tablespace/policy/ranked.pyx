"""What a rule ranks: numbers that the rules and queues reach without a look-up of attributes."""

from libc.stdint cimport int64_t


cdef class Ranked:
    """An entry of a cache. The lowest rank leaves first.

    Parameters
    ----------
    identity : int
        A hash of its key, the same whenever it comes back; signed, 64 bits, as of `hash`.
    position : int
        How many entries of its sequence lie before it, as far as known: without one of them it
        is of no use.
    fill : float
        Share of its slot that it fills, 0 to 1.

    Attributes
    ----------
    rank : float
        Set by `Rule.stored` and `Rule.used`.
    used_at : int
        The rule's reference number of the last use.
    reuses : int
        How often it was worth having, as far as the rule counts.
    queue : EvictionQueue or None
        Where it stands.

    Notes
    -----
    A base class: a subclass adds the key and whatever else it needs, and may set the three
    parameters as attributes instead. Thread rule: under the GIL. The garbage collector follows
    `queue`, and a queue what stands in it.
    """

    def __cinit__(self):
        self.fill = 1.0

    def __init__(self, int64_t identity=0, int64_t position=0, double fill=1.0):
        self.identity = identity
        self.position = position
        self.fill = fill
