"""The entries of one class, lowest rank first, in buckets of nearly equal ranks."""

from types import GenericAlias

from cpython.object cimport PyObject
from libc.math cimport floor, isnan
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memmove

from tablespace.policy.ranked cimport Ranked

cdef Py_ssize_t FEWEST_BUCKETS = 16


cdef class EvictionQueue:
    """Entries by rank.

    Parameters
    ----------
    resolution : float
        Buckets per unit of rank. In a bucket the last to come is the first to go: entries of a
        sequence come leading ones first. At 0 there is one bucket, and the first to come goes.

    Raises
    ------
    ValueError
        For a resolution below 0, and for a rank that is not a number.

    Notes
    -----
    An entry stands in one queue at a time. `add`, `discard` and `moved` cost a constant, but for
    a search among the buckets; a new one is nearly always the highest or next to it. A bucket
    goes with its last entry: ranks rise for ever, and where nothing is evicted nobody would come
    by to clear up. So there are at most as many as entries.

    Thread rule: under the GIL, which every method keeps; none runs foreign code half-way.
    """

    def __cinit__(self, double resolution):
        if not resolution >= 0:
            raise ValueError(f"resolution must be 0 or more buckets per unit, not {resolution}")
        self.resolution = resolution
        self.owned = []

    def __dealloc__(self):
        # What still stands here is garbage too: each entry owns a reference to its queue.
        cdef Py_ssize_t at
        for at in range(self.head, self.tail):
            free(self.buckets[at])
        free(self.buckets)

    @classmethod
    def __class_getitem__(cls, item):
        return GenericAlias(cls, item)

    def __len__(self):
        return len(self.owned)

    def __contains__(self, item):
        return isinstance(item, Ranked) and (<Ranked>item).queue is self

    def __iter__(self):
        """Go through those that stand here now, in order."""
        return iter(self.lowest(len(self.owned)))

    @property
    def bucket_count(self):
        """Return how many buckets there are."""
        return self.tail - self.head

    def add(self, Ranked item not None):
        """Let an entry stand here, by its rank now; wherever it stood before it stands no more."""
        self.put(item)

    def discard(self, Ranked item not None):
        """Take an entry off; nothing where it does not stand here."""
        self.remove(item)

    def moved(self, Ranked item not None):
        """Note that an entry's rank changed; nothing where it does not stand here."""
        self.reorder(item)

    def first(self):
        """Return the entry to go first, which stays; None when there is none."""
        return self.lowest_one()

    def first_many(self, Py_ssize_t count):
        """Return up to `count` entries of the lowest bucket, which stay; those to go first."""
        cdef list found = []
        if self.head < self.tail:
            gather(found, self.buckets[self.head], count, self.resolution != 0)
        return found

    def lowest(self, Py_ssize_t count):
        """Return up to `count` entries in order, which stay."""
        cdef list found = []
        cdef Py_ssize_t at = self.head
        while at < self.tail and len(found) < count:
            gather(found, self.buckets[at], count, self.resolution != 0)
            at += 1
        return found

    # -- inside --------------------------------------------------------------------------------

    cdef int put(self, Ranked item) except -1:
        cdef EvictionQueue other  # Held: the entry may own the last reference to it.
        cdef Bucket *bucket
        cdef double key
        if item.queue is self:
            return self.reorder(item)
        key = self.key_of(item)
        self.owned.append(item)
        try:
            bucket = self.bucket(key)
        except MemoryError:
            self.owned.pop()
            raise
        other = item.queue
        if other is not None:
            other.remove(item)
        item.place = len(self.owned) - 1
        item.key = key
        link(bucket, item)
        item.queue = self
        return 0

    cdef int remove(self, Ranked item) except -1:
        cdef Ranked last
        if item.queue is not self:
            return 0
        self.unlink(item)
        last = self.owned[len(self.owned) - 1]
        self.owned[item.place] = last
        last.place = item.place
        item.queue = None
        self.owned.pop()
        return 0

    cdef int reorder(self, Ranked item) except -1:
        cdef double key
        cdef Bucket *bucket
        if item.queue is not self:
            return 0
        key = self.key_of(item)
        if key != item.key and self.resolution:
            bucket = self.bucket(key)
            self.unlink(item)
        elif key != item.key or (self.resolution and item.after != NULL):
            bucket = <Bucket *>item.bucket
            detach(bucket, item)
        else:
            return 0
        item.key = key
        link(bucket, item)
        return 0

    cdef Ranked lowest_one(self):
        cdef Bucket *bucket
        if self.head == self.tail:
            return None
        bucket = self.buckets[self.head]
        return <Ranked>(bucket.newest if self.resolution else bucket.oldest)

    cdef double key_of(self, Ranked item) except? -1:
        if isnan(item.rank):
            raise ValueError("an entry whose rank is not a number has no place in a queue")
        return floor(item.rank * self.resolution) if self.resolution else item.rank

    cdef Py_ssize_t find(self, double number) noexcept:
        """Return where the bucket of a number lies, or would."""
        cdef Py_ssize_t low = self.head, high = self.tail, middle
        if low < high and self.buckets[high - 1].number < number:
            return high
        while low < high:
            middle = (low + high) // 2
            if self.buckets[middle].number < number:
                low = middle + 1
            else:
                high = middle
        return low

    cdef Bucket *bucket(self, double number) except NULL:
        """Return the bucket of a key, made if there is none."""
        cdef Bucket *bucket
        cdef Py_ssize_t at
        number = number if self.resolution else 0.0
        at = self.find(number)
        if at < self.tail and self.buckets[at].number == number:
            return self.buckets[at]
        bucket = <Bucket *>malloc(sizeof(Bucket))
        if bucket == NULL:
            raise MemoryError
        try:
            at = self.open_gap(at)
        except MemoryError:
            free(bucket)
            raise
        bucket.number = number
        bucket.oldest = bucket.newest = NULL
        self.buckets[at] = bucket
        return bucket

    cdef Py_ssize_t open_gap(self, Py_ssize_t at) except -1:
        """Make room for a bucket where one would lie; return where that is now."""
        cdef Bucket **larger
        if self.head and (at - self.head <= self.tail - at or self.tail == self.room):
            memmove(&self.buckets[self.head - 1], &self.buckets[self.head],
                    (at - self.head) * sizeof(Bucket *))
            self.head -= 1
            return at - 1
        if self.tail == self.room:
            larger = <Bucket **>realloc(
                self.buckets, max(FEWEST_BUCKETS, 2 * self.room) * sizeof(Bucket *))
            if larger == NULL:
                raise MemoryError
            self.buckets = larger
            self.room = max(FEWEST_BUCKETS, 2 * self.room)
        memmove(&self.buckets[at + 1], &self.buckets[at], (self.tail - at) * sizeof(Bucket *))
        self.tail += 1
        return at

    cdef void unlink(self, Ranked item) noexcept:
        """Take an entry out of its bucket, which goes with the last."""
        cdef Bucket *bucket = <Bucket *>item.bucket
        cdef Py_ssize_t at
        detach(bucket, item)
        if bucket.oldest != NULL:
            return
        at = self.find(bucket.number)
        if at - self.head < self.tail - at:
            memmove(&self.buckets[self.head + 1], &self.buckets[self.head],
                    (at - self.head) * sizeof(Bucket *))
            self.head += 1
        else:
            memmove(&self.buckets[at], &self.buckets[at + 1],
                    (self.tail - at - 1) * sizeof(Bucket *))
            self.tail -= 1
        free(bucket)


cdef void link(Bucket *bucket, Ranked item) noexcept:
    """Put an entry into a bucket as its newest."""
    item.bucket = bucket
    item.before = bucket.newest
    item.after = NULL
    if bucket.newest != NULL:
        (<Ranked>bucket.newest).after = <PyObject *>item
    else:
        bucket.oldest = <PyObject *>item
    bucket.newest = <PyObject *>item


cdef void detach(Bucket *bucket, Ranked item) noexcept:
    """Close the gap that an entry leaves in its bucket."""
    if item.before != NULL:
        (<Ranked>item.before).after = item.after
    else:
        bucket.oldest = item.after
    if item.after != NULL:
        (<Ranked>item.after).before = item.before
    else:
        bucket.newest = item.before


cdef int gather(list found, Bucket *bucket, Py_ssize_t count, bint newest_first) except -1:
    """Append entries of a bucket until there are `count`."""
    cdef PyObject *at = bucket.newest if newest_first else bucket.oldest
    while at != NULL and len(found) < count:
        found.append(<Ranked>at)
        at = (<Ranked>at).before if newest_first else (<Ranked>at).after
    return 0
