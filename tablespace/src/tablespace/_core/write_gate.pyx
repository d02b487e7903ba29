"""Changes that go together, and one that goes alone: a gate safe from signals.

In Cython for the reason of the commit queue: an exception from a signal's handler can strike
between any two steps of Python code, also between passing a gate and noting that one has.
"""

import threading

cimport cython
from libc.stdint cimport uint32_t


cdef class WriteGate:
    """Lets any number of works pass together, or one alone.

    Notes
    -----
    Who wants to be alone goes first: no further work is let in together while one waits.  No
    Python code runs while the mutex is held.
    """

    cdef uint32_t inside          # works that pass together now
    cdef uint32_t want_alone      # those that wait to be alone
    cdef bint alone_inside
    cdef list sleepers            # locks of those that wait
    cdef cython.pymutex mutex     # held for a few steps only

    def __cinit__(self):
        self.sleepers = []

    def together(self, work):
        """Run `work()` while nobody is alone; return what it returns."""
        cdef bint passed = False
        while not passed:
            with self.mutex:
                passed = not self.alone_inside and self.want_alone == 0
                if passed:
                    self.inside += 1
                else:
                    sleeper = self.lie_down()
            if not passed:
                self.sleep(sleeper)
        try:
            return work()
        finally:
            with self.mutex:
                self.inside -= 1
                if self.inside == 0:
                    self.wake_all()

    def alone(self, work):
        """Run `work()` while nobody else is inside; return what it returns."""
        cdef bint passed = False
        with self.mutex:
            self.want_alone += 1
        try:
            while not passed:
                with self.mutex:
                    passed = not self.alone_inside and self.inside == 0
                    if passed:
                        self.alone_inside = True
                    else:
                        sleeper = self.lie_down()
                if not passed:
                    self.sleep(sleeper)
        finally:
            with self.mutex:
                self.want_alone -= 1
                if not passed:
                    self.wake_all()
        try:
            return work()
        finally:
            with self.mutex:
                self.alone_inside = False
                self.wake_all()

    cdef object lie_down(self):
        """Return a lock to wait on until something changes. The mutex is held."""
        sleeper = threading.Lock()
        sleeper.acquire()
        self.sleepers.append(sleeper)
        return sleeper

    cdef int sleep(self, sleeper) except -1:
        try:
            sleeper.acquire()
        except BaseException:
            with self.mutex:
                if sleeper in self.sleepers:
                    self.sleepers.remove(sleeper)
            raise
        return 0

    cdef int wake_all(self) except -1:
        """Let everybody look again. The mutex is held."""
        for sleeper in self.sleepers:
            sleeper.release()
        self.sleepers.clear()
        return 0
