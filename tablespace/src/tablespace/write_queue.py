"""Puts acknowledged as soon as they are copied, committed together a little later."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from tablespace._core.key_index import exact_key
from tablespace._core.write_gate import WriteGate
from tablespace.durability import SYNC, Durability
from tablespace.errors import (
    ClosedError,
    FailedError,
    FullError,
    TablespaceError,
    is_of_the_engine,
)
from tablespace.layout import MAX_GROUP_BLOCKS

logger = logging.getLogger("tablespace")

# Copies waiting, keys and bookkeeping included: four times the largest group of 64 KiB blocks.
QUEUE_BYTES = 64 << 20
# What an entry of the queue takes beside its key and value: objects and a place in a dict.
ITEM_BYTES = 400
# Commits led by a thread that was interrupted are tried again this often.
INTERRUPTED_TRIES = 3

Item = tuple[bytes, bytes, bytes | None]
Result = TypeVar("Result")


class Queued(NamedTuple):
    """A value that waits for its commit."""

    value: bytes
    metadata: bytes | None
    size_bytes: int


class WriteQueue:
    """The newest value of each key that was put and is not committed yet.

    Parameters
    ----------
    path : str
        Names the region in the log.
    durability : Durability
    put : callable
        ``put(items)`` commits at most 256 blocks durably and says which found room.
    stored_since : callable
        ``stored_since(seq, keys)`` says which keys have a record after `seq`.
    last_seq : callable
        The number of the last record.
    check_writable : callable
        Raises FailedError once the store is read-only.
    refuse_reentry : callable
        Raises RuntimeError in a thread that must not wait here, since others wait for it.

    Notes
    -----
    `add`, `step` and `directly` may be called from any thread.  Looking takes no lock: a step
    moves values from `_pending` to `_writing` so that a reader who looks there in this order, and
    in the index last, finds the newest one at every moment.

    A step goes alone: neither a put nor a delete of another mode is committed meanwhile, so the
    queue never gives back what those changed.
    """

    def __init__(
        self,
        path: str,
        durability: Durability,
        put: Callable[[Sequence[Item]], list[bool]],
        stored_since: Callable[[int, Sequence[bytes]], list[bool]],
        last_seq: Callable[[], int],
        check_writable: Callable[[], None],
        refuse_reentry: Callable[[], None],
    ) -> None:
        self._path = path
        self._interval_s = durability.flush_interval_ms / 1000
        self._by_hand = durability.by_hand
        self._put = put
        self._stored_since = stored_since
        self._last_seq = last_seq
        self._check_writable = check_writable
        self._refuse_reentry = refuse_reentry
        self.limit_bytes = QUEUE_BYTES
        self.size_bytes = 0
        self.dropped = 0
        self._pending: dict[bytes, Queued] = {}
        self._writing: dict[bytes, Queued] = {}
        self._gate = WriteGate()
        self._mutex = threading.Lock()
        self._closed = ""
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        # The last error that dropped blocks; how many drops some flush has told of; and for each
        # thread how many it has been told of itself.
        self._error: Exception | None = None
        self._told_anybody = 0
        self._told = threading.local()

    # Looking.

    @property
    def busy(self) -> bool:
        """Whether anything waits or is being committed."""
        return bool(self._pending) or bool(self._writing)

    @property
    def blocks(self) -> int:
        return len({*self._pending, *self._writing})

    def find(self, key: object) -> Queued | None:
        """Return the queued value of a key, or None."""
        if type(key) is not bytes:
            key = exact_key(key)
        # Both taken before looking: what an interrupted step puts back is in one of the two.
        for waiting in (self._pending, self._writing):
            found = waiting.get(key)
            if found is not None:
                return found
        return None

    def find_many(self, keys: Iterable[object]) -> list[Queued | None]:
        """Return the queued value of each key, or None."""
        return [self.find(key) for key in keys]

    def keys(self) -> list[bytes]:
        """Return the queued keys, the longest waiting first."""
        # Pending ones first: a step moves them the other way.
        pending = list(self._pending)
        return list(dict.fromkeys([*self._writing, *pending]))

    # Adding.

    def add(self, items: Sequence[Item]) -> None:
        """Queue values, each replacing an older one of its key.

        Where the queue is full the caller commits it first, or waits for the thread that does.

        Raises
        ------
        FailedError, ClosedError
            Nothing more is taken; items before may have been.
        """
        self._refuse_reentry()
        if not hasattr(self._told, "dropped"):
            # What was dropped before this thread put anything is no news to it.
            self._told.dropped = self.dropped
        for key, value, metadata in items:
            size_bytes = len(key) + len(value) + len(metadata or b"") + ITEM_BYTES
            while self.busy and self.size_bytes + size_bytes > self.limit_bytes:
                self.step()
            self._check_writable()
            with self._mutex:
                if self._closed:
                    raise ClosedError(self._closed)
                old = self._pending.get(key)
                self._pending[key] = Queued(value, metadata, size_bytes)
                self.size_bytes += size_bytes - (old.size_bytes if old else 0)
        self._see_to_a_thread()

    def directly(self, keys: Iterable[bytes], change: Callable[[], Result]) -> Result:
        """Run a change of some keys that passes the queue by.

        What was queued for one of them before is committed first; what is queued meanwhile comes
        after it.
        """
        self._refuse_reentry()
        if self.busy and any(self.find_many(keys)):
            self.step()
        return self._gate.together(change)

    # Committing.

    def step(self) -> int:
        """Commit what is queued now; return how many blocks that were.

        Blocks that cannot be stored are dropped, counted and logged; `report` tells of them.
        """
        if not self.busy:
            return 0
        self._refuse_reentry()
        return self._gate.alone(self._commit_all)

    def _commit_all(self) -> int:
        if self._writing:
            self._take_back()
        try:
            with self._mutex:
                # Readers look into both, in the other order.
                self._writing = self._pending
                self._pending = {}
            items = list(self._writing.items())
            for start in range(0, len(items), MAX_GROUP_BLOCKS):
                self._commit_group(items[start : start + MAX_GROUP_BLOCKS])
            with self._mutex:
                self._count()
        except BaseException:
            # Not an error of the commit: something from outside, such as a signal's exception.
            self._take_back()
            raise
        return len(items)

    def _take_back(self) -> None:
        """Let what a step did not get to wait again, but for what was put anew since."""
        with self._mutex:
            for key, item in list(self._writing.items()):
                self._pending.setdefault(key, item)
            self._writing = {}
            self._count()

    def _count(self) -> None:
        """Set right what an interrupted call left uncounted. The mutex is held."""
        self.size_bytes = sum(item.size_bytes for item in self._pending.values())

    def _commit_group(self, batch: list[tuple[bytes, Queued]]) -> None:
        keys = [key for key, _ in batch]
        items = [(key, item.value, item.metadata) for key, item in batch]
        before = self._last_seq()
        error: Exception | None = None
        try:
            stored = self._put_patiently(items)
        except Exception as caught:
            if not is_of_the_engine(caught):
                raise
            error = caught
            stored = self._stored_since(before, keys)
        if not all(stored):
            self._drop([key for key, done in zip(keys, stored, strict=True) if not done], error)
        with self._mutex:
            for key, item in batch:
                del self._writing[key]
                self.size_bytes -= item.size_bytes

    def _put_patiently(self, items: Sequence[Item]) -> list[bool]:
        """Commit, again where the thread that led the commit was interrupted by a signal."""
        for _ in range(INTERRUPTED_TRIES - 1):
            try:
                return self._put(items)
            except InterruptedError:
                continue
        return self._put(items)

    def _drop(self, keys: list[bytes], error: Exception | None) -> None:
        if error is None:
            error = FullError(
                f"region {self._path} is full: no free slot for a value of this size. "
                "Remedy: delete keys, open with on_full='evict', or grow the region"
            )
        first = self._error is None
        self._error = error
        self.dropped += len(keys)
        if first:
            logger.warning(
                "%s: %d queued blocks (the first of key hex:%s) were not stored: %s; said once, "
                "counted in queue_dropped, raised by flush()",
                self._path,
                len(keys),
                keys[0].hex(),
                error,
            )

    def report(self) -> None:
        """Raise what dropped queued blocks since this thread was told last.

        A thread that never put anything is told what no other thread was told.

        Raises
        ------
        FullError, FailedError, OSError
            As the last commit that dropped a block met.
        """
        dropped = self.dropped
        lost = dropped - getattr(self._told, "dropped", self._told_anybody)
        self._told.dropped = dropped
        self._told_anybody = max(self._told_anybody, dropped)
        if lost:
            raise _retold(self._error, lost)

    # The thread.

    def _see_to_a_thread(self) -> None:
        """Start a thread that commits, unless one waits already.

        It ends with the queue empty, so that an idle store has none, and is no daemon, so that
        the interpreter's end waits for what was acknowledged.
        """
        if self._by_hand:
            return
        with self._mutex:
            if self._thread is not None or not self._pending:
                return
            thread = threading.Thread(target=self._run, name="tablespace-write-queue")
            try:
                thread.start()
                self._thread = thread
            except RuntimeError as error:
                # The interpreter ends, or the system has no more threads.
                logger.warning(
                    "%s: no thread for the write queue (%s): committed by the caller",
                    self._path,
                    error,
                )
        if self._thread is None:
            self.step()

    def _run(self) -> None:
        while True:
            self._stop.wait(self._interval_s)
            try:
                self.step()
            except BaseException:
                with self._mutex:
                    self._thread = None
                raise
            with self._mutex:
                if not self._pending:
                    self._thread = None
                    return

    def close(self, reason: str) -> None:
        """Refuse later puts and commit those before."""
        with self._mutex:
            self._closed = reason
            thread = self._thread
        self._stop.set()
        self.step()
        if thread is not None:
            thread.join()

    def untold(self) -> Exception | None:
        """Return the error of drops that no flush told anybody of, or None."""
        lost = self.dropped - self._told_anybody
        return _retold(self._error, lost) if lost else None


def copy_into(number: int, value: bytes, buffer: Any) -> int:
    """Copy a queued value into a caller's buffer; return its length.

    Raises
    ------
    ValueError
        The buffer, of the key of that number in the call, is shorter than the value.
    """
    with memoryview(buffer) as view:
        if view.readonly:
            raise BufferError("the buffer is not writable")
        if view.nbytes < len(value):
            raise ValueError(
                f"the buffer for key {number} has {view.nbytes} bytes, its value {len(value)}"
            )
        if value:
            view.cast("B")[: len(value)] = value
    return len(value)


def _retold(error: Exception | None, lost: int) -> Exception:
    """Return an error of the same kind that counts the blocks lost by it."""
    text = f"{lost} blocks acknowledged before were not stored and are gone: {error}"
    out: Exception
    if isinstance(error, FullError):
        out = FullError(text)
    elif isinstance(error, OSError):
        out = OSError(error.errno or errno.EIO, text)
    else:
        out = FailedError(text) if isinstance(error, TablespaceError) else RuntimeError(text)
    out.__cause__ = error
    return out


def always_empty(path: str) -> WriteQueue:
    """Return the queue of a store that refuses every put."""

    def nothing() -> None:
        pass

    return WriteQueue(path, SYNC, lambda _: [], lambda _, keys: [], lambda: 0, nothing, nothing)
