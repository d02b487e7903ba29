"""Leader and followers: threads queue requests, one of them commits for all.

In Cython because an exception from a signal's handler can strike between any two steps of Python
code: here it can only strike inside the waits and inside the commit itself, where it is caught, so
leadership is never lost with the thread that held it.
"""

cimport cython
from cpython.exc cimport PyErr_CheckSignals
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.errno cimport EINTR
from libc.stdint cimport uint32_t

from tablespace.errors import is_of_the_engine

cdef extern from "time.h" nogil:
    cdef struct timespec:
        long tv_sec
        long tv_nsec
    int CLOCK_MONOTONIC
    int clock_gettime(int clock, timespec *now)

cdef extern from "semaphore.h" nogil:
    int sem_init(sem_t *semaphore, int shared, unsigned int value)
    int sem_destroy(sem_t *semaphore)
    int sem_wait(sem_t *semaphore)
    int sem_trywait(sem_t *semaphore)
    int sem_post(sem_t *semaphore)
    int sem_clockwait(sem_t *semaphore, int clock, const timespec *until)

# Threads that put one block at a time come back together, a little after the batch that served
# them: a leader that takes what is there already would make two half-filled batches in turns.
cdef long LINGER_NS = 400_000
# After so many waits in vain, so many batches without one.
cdef uint32_t VAIN_WAITS = 2
cdef uint32_t REST_BATCHES = 64


cdef class Request:
    """What one caller wants committed.

    Attributes
    ----------
    count : int
        Blocks, for the bound on a batch.
    joins : bool
        Whether it may share a batch with others that do.
    done : bool
    error : BaseException or None
        What the commit raised.
    """

    def __cinit__(self, *_args, **_options):
        sem_init(&self.woken, 0, 0)

    def __dealloc__(self):
        sem_destroy(&self.woken)

    cdef void prepare(self) noexcept nogil:
        """Do what needs no turn, in the caller's own thread, before queueing."""

    cdef void let_go(self) noexcept:
        """Give back what the caller lent."""

    cdef void wake_next(self) noexcept nogil:
        """Wake the next of those served by the same batch.

        One by one, each by the one before it who has the GIL: all woken at once would only wait
        for the GIL a second time, at the price of two more switches each.
        """
        if self.after != NULL:
            sem_post(&(<Request>self.after).woken)
            self.after = NULL


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
    The GIL may be taken while the mutex is not held, and the mutex while the GIL is held, never
    the other way round.  No Python code runs while the mutex is held.
    """

    def __cinit__(self, *_args, **_options):
        sem_init(&self.arrived, 0, 0)

    def __init__(self, commit, uint32_t limit):
        self.commit = commit
        self.limit = limit

    def __dealloc__(self):
        sem_destroy(&self.arrived)

    def run(self, Request request not None):
        """Commit a request, perhaps together with others; return when that is over.

        Preparing, queueing and waiting happen without the GIL, which is taken back once.

        Raises
        ------
        BaseException
            What the commit raised; or what interrupted the wait, and then the request is
            either taken back or was in a commit already under way.
        """
        cdef bint follow
        cdef int code = 0
        with nogil:
            request.prepare()
            with self.mutex:
                request.queued = True
                request.next = NULL
                if self.tail == NULL:
                    self.head = <void *>request
                else:
                    (<Request>self.tail).next = <void *>request
                self.tail = <void *>request
                self.blocks += request.count
                if self.lingering and self.blocks >= self.present:
                    self.lingering = False
                    sem_post(&self.arrived)
                follow = self.led
                self.led = True
            if follow:
                code = sem_wait(&request.woken)
            if code == 0 and not request.done and request.joins:
                self.linger()
        while code != 0:
            try:
                PyErr_CheckSignals()
            except BaseException:
                self.desert(request)
                raise
            with nogil:
                code = sem_wait(&request.woken)
        if request.done:
            request.wake_next()
        else:
            self.lead(request)
        if request.error is not None:
            raise request.error

    cdef int desert(self, Request request) except -1:
        """Leave the queue when the wait was interrupted.

        A request that is being committed already is committed, and its leader gives back what the
        caller lent; one that was just made leader hands leadership on.
        """
        cdef void *at
        cdef void *before = NULL
        with self.mutex:
            if request.queued:
                at = self.head
                while at != <void *>request:
                    before = at
                    at = (<Request>at).next
                if before == NULL:
                    self.head = request.next
                else:
                    (<Request>before).next = request.next
                if self.tail == <void *>request:
                    self.tail = before
                request.queued = False
                self.blocks -= request.count
                if sem_trywait(&request.woken) == 0:
                    self.appoint()
            elif not request.done:
                request.orphaned = True
        if request.done:
            # Whoever comes before it is about to wake it, and others wait behind it.
            with nogil:
                while sem_wait(&request.woken) != 0:
                    pass
            request.wake_next()
        return 0

    cdef void appoint(self) noexcept nogil:
        """Make the head of the queue leader, or nobody. The mutex is held."""
        if self.head != NULL:
            sem_post(&(<Request>self.head).woken)
        else:
            self.led = False

    cdef void linger(self) noexcept nogil:
        """Wait a moment for those of the last batch, when most of the time they do come."""
        cdef timespec until
        with self.mutex:
            if self.blocks >= self.present:
                return
            if self.rest:
                self.rest -= 1
                return
            self.lingering = True
        clock_gettime(CLOCK_MONOTONIC, &until)
        until.tv_nsec += LINGER_NS
        if until.tv_nsec >= 1_000_000_000:
            until.tv_nsec -= 1_000_000_000
            until.tv_sec += 1
        # A signal ends the wait too.
        sem_clockwait(&self.arrived, CLOCK_MONOTONIC, &until)
        with self.mutex:
            if self.lingering:
                self.lingering = False
                self.vain += 1
                if self.vain == VAIN_WAITS:
                    self.vain = 0
                    self.rest = REST_BATCHES
            else:
                self.vain = 0
                # Posted just after the wait was over, it would cut the next one short.
                sem_trywait(&self.arrived)

    cdef int lead(self, Request own) except -1:
        """Commit the head of the queue, which is `own`, then hand leadership on."""
        cdef list batch
        cdef Request request, last = own
        cdef uint32_t served = 0
        batch = self.take()
        for request in batch:
            served += request.count
        try:
            self.commit(batch)
        except BaseException as error:
            for request in batch:
                # What interrupts the leader's thread (a signal) is not the others' to handle.
                if request is own or is_of_the_engine(error):
                    request.error = error
                else:
                    request.error = InterruptedError(
                        EINTR, "the commit was interrupted in the thread that led it")
                    request.error.__cause__ = error
        with self.mutex:
            for request in batch:
                request.done = True
                request.after = NULL
                if request is not own and not request.orphaned:
                    last.after = <void *>request
                    last = request
            self.present = min(self.limit, served + self.blocks)
            self.appoint()
        for request in batch:
            if request.orphaned:
                request.orphaned = False
                request.let_go()
        own.wake_next()
        return 0

    cdef list take(self):
        """Take the first request and those behind it that may share its commit."""
        cdef list batch = []
        cdef void *first
        cdef void *at
        cdef uint32_t total = 0
        cdef size_t taken = 0
        with self.mutex:
            first = at = self.head
            while at != NULL:
                if taken and not ((<Request>first).joins and (<Request>at).joins
                                  and total + (<Request>at).count <= self.limit):
                    break
                total += (<Request>at).count
                (<Request>at).queued = False
                # From here on its own thread may be gone before the commit is.
                Py_INCREF(<Request>at)
                taken += 1
                at = (<Request>at).next
            self.head = at
            if at == NULL:
                self.tail = NULL
            self.blocks -= total
        at = first
        for _ in range(taken):
            batch.append(<Request>at)
            Py_DECREF(<Request>at)
            at = (<Request>at).next
        return batch
