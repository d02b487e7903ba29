"""Things lent to one caller at a time, and never lost, whatever interrupts the caller.

In Cython because an exception from a signal's handler can strike between any two steps of Python
code, also between a return and the assignment of what was returned: a loan ends with the object
that stands for it, so that what nobody holds any more is there to be lent again.
"""

import threading

cimport cython
from libc.stdint cimport uint32_t, uint64_t

from tablespace.errors import ClosedError


cdef class Lending:
    """Lends at most `limit` things, made on demand.

    Parameters
    ----------
    make : callable
        Makes one more; an OSError or MemoryError means that no more can be had now.
    limit : int

    Notes
    -----
    No Python code runs while the mutex is held.
    """

    def __init__(self, make, uint32_t limit):
        self.make = make
        self.limit = limit
        self.closed = ""
        self.buried = []
        self.idle = []
        self.waiting = []
        self.closers = []

    @property
    def idle_count(self):
        """Number of things nobody has."""
        return len(self.idle)

    cpdef Loan lend(self):
        """Return a loan, waiting while all things are lent.

        Raises
        ------
        ClosedError
        OSError, MemoryError
            Not one thing can be made.
        """
        cdef Loan loan = Loan.__new__(Loan)
        cdef bint refused = False, fresh
        cdef uint64_t seen
        loan.owner = self
        while True:
            with self.mutex:
                fresh = False
                seen = self.changes
                if not self.closed and self.idle:
                    loan.item = self.idle.pop()
                    loan.counted = True
                elif not self.closed and self.made < self.limit and not (refused and self.made):
                    fresh = loan.counted = True
                    self.made += 1
            if self.closed and not loan.counted:
                raise ClosedError(self.closed)
            if fresh:
                try:
                    loan.item = self.make()
                except (OSError, MemoryError):
                    loan.end()
                    refused = True
                    if self.made:
                        continue
                    raise
            if loan.counted:
                return loan
            self.wait(self.waiting, seen)

    def fill(self, uint32_t count):
        """Make things until there are `count`, as far as they can be had, and lend none.

        What is made later, for more callers at once, takes its memory then.
        """
        cdef Loan loan
        while True:
            loan = Loan.__new__(Loan)
            loan.owner = self
            with self.mutex:
                if self.closed or self.made >= min(count, self.limit):
                    return
                self.made += 1
                loan.counted = True
            try:
                loan.item = self.make()
            except (OSError, MemoryError):
                return
            loan.end()

    cdef int wait(self, list queue, uint64_t seen) except -1:
        """Wait for a change after the one `seen`; it may have come already."""
        wake = threading.Lock()
        wake.acquire()
        with self.mutex:
            if self.changes != seen:
                return 0
            queue.append(wake)
        try:
            wake.acquire()
        except BaseException:
            with self.mutex:
                if wake in queue:
                    queue.remove(wake)
                else:
                    # It was this one's turn: somebody else takes it.
                    self.stir()
            raise
        return 0

    cdef int stir(self) except -1:
        """Wake one who waits for a thing and all who wait for the end. The mutex is held."""
        self.changes += 1
        if self.waiting:
            self.waiting.pop(0).release()
        while self.closers:
            self.closers.pop().release()
        return 0

    def close(self, str reason not None):
        """Lend nothing any more; wait until everything is back and return it, once."""
        cdef uint64_t seen
        with self.mutex:
            self.closed = reason
            self.changes += 1
            while self.waiting:
                self.waiting.pop().release()
        while True:
            with self.mutex:
                seen = self.changes
                if len(self.idle) == self.made:
                    self.made = 0
                    left, self.idle = self.idle, []
                    return left
            self.wait(self.closers, seen)


@cython.no_gc
cdef class Loan:
    """One thing that is lent; given back by `end`, or when nobody refers to this any more."""

    def __dealloc__(self):
        self.end()

    cpdef end(self):
        """Give the thing back; a second time does nothing."""
        if not self.counted:
            return
        self.counted = False
        with self.owner.mutex:
            if self.item is None:
                self.owner.made -= 1
            else:
                self.owner.idle.append(self.item)
            self.owner.stir()
        self.item = None

    cdef bury(self, held):
        """Keep the thing for ever, with what it still needs; another may be made in its place."""
        self.counted = False
        with self.owner.mutex:
            self.owner.buried.append((self.item, held))
            self.owner.made -= 1
            self.owner.stir()
