"""Leader and followers: threads queue requests, one of them commits for all.

In Cython because an exception from a signal's handler can strike between any two steps of Python
code: here it can only strike inside the waits and inside the commit itself, where it is caught, so
leadership is never lost with the thread that held it.
"""

import threading
from collections import deque

cimport cython
from libc.errno cimport EINTR
from libc.stdint cimport uint32_t


cdef class CommitQueue:
    """Runs requests one batch at a time.

    Parameters
    ----------
    commit : callable
        ``commit(batch)`` with a list of requests; what it raises becomes each request's `error`.
    limit : int
        Requests share a batch up to this many blocks.

    Notes
    -----
    A request is any object with the plain attributes `count`, `joins` (whether it may share a
    batch with others that do), `wake` (None), `done` (False) and `error` (None).  No Python code
    runs while the mutex is held.
    """

    cdef object commit, queue
    cdef uint32_t limit
    cdef bint led
    cdef cython.pymutex mutex    # never interrupted by signals, held for a few steps only

    def __init__(self, commit, uint32_t limit):
        self.commit = commit
        self.limit = limit
        self.queue = deque()

    def run(self, request):
        """Commit a request, perhaps together with others; return when that is over.

        Raises
        ------
        BaseException
            What the commit raised; or what interrupted the wait, and then the request is
            either taken back or was in a commit already under way.
        """
        cdef bint follow
        with self.mutex:
            self.queue.append(request)
            follow = self.led
            if follow:
                request.wake = threading.Lock()
                request.wake.acquire()
            self.led = True
        if follow:
            try:
                request.wake.acquire()
            except BaseException:
                self.desert(request)
                raise
        if not request.done:
            self.lead(request)
        if request.error is not None:
            raise request.error

    cdef int desert(self, request) except -1:
        """Leave the queue when the wait was interrupted.

        A request that is being committed already is committed; one that was just made leader
        hands leadership on.
        """
        with self.mutex:
            if request in self.queue:
                self.queue.remove(request)
            if not request.done and request.wake.acquire(blocking=False):
                self.appoint()
        return 0

    cdef int appoint(self) except -1:
        """Make the head of the queue leader, or nobody. The mutex is held."""
        if self.queue:
            self.queue[0].wake.release()
        else:
            self.led = False
        return 0

    cdef int lead(self, own) except -1:
        """Commit the head of the queue, which is `own`, then hand leadership on."""
        cdef list batch
        with self.mutex:
            batch = self.take()
        try:
            self.commit(batch)
        except BaseException as error:
            for request in batch:
                # What interrupts the leader's thread (a signal) is not the others' to handle.
                if request is own or isinstance(error, Exception):
                    request.error = error
                else:
                    request.error = InterruptedError(
                        EINTR, "the commit was interrupted in the thread that led it")
                    request.error.__cause__ = error
        for request in batch:
            request.done = True
        with self.mutex:
            self.appoint()
        for request in batch:
            if request is not own and request.wake is not None:
                request.wake.release()
        return 0

    cdef list take(self):
        """Take the first request and those behind it that may share its commit."""
        first = self.queue.popleft()
        cdef list batch = [first]
        cdef uint32_t total = first.count
        while first.joins and self.queue:
            request = self.queue[0]
            if not request.joins or total + request.count > self.limit:
                break
            total += request.count
            batch.append(self.queue.popleft())
        return batch
