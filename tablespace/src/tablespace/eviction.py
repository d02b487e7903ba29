"""Which entries leave a full region: the order of use, the order of storing, or a caller's policy.

A policy is foreign code.  It is told of entries and asked for victims by key, never handed the
index; what it answers is checked, and the least recently used make up for what is wrong.
"""

from __future__ import annotations

import inspect
import logging
import sys
import threading
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Protocol, runtime_checkable

from tablespace._core.event_runs import next_run
from tablespace._core.key_index import KeyIndex
from tablespace._core.victim_list import VictimList

logger = logging.getLogger("tablespace")

ORDERS = ("lru", "fifo")
# Events that wait while another thread tells the policy; beyond it callers wait for that thread.
BACKLOG = 65536
# Keys taken from a policy beyond those wanted, in place of ones that cannot go just now.
SPARE_NAMES = 1024
# What the methods of a policy are called with.
_CALLS = {
    "inserted": ("key", "slot_bytes"),
    "used": ("key",),
    "removed": ("key",),
    "victims": ("slot_bytes", "wanted"),
}
_BATCH_CALLS = {
    "inserted_many": ("keys", "slot_sizes"),
    "used_many": ("keys",),
    "removed_many": ("keys",),
}
_METHODS = {b"i": "inserted", b"u": "used", b"r": "removed"}
# Events of one kind that a policy is told in one call.
RUN = 4096


@runtime_checkable
class EvictionPolicy(Protocol):
    """What `tablespace.open` takes for `eviction`.

    Notes
    -----
    The store calls one method at a time, under a lock of its own, from whichever thread needs it.
    When a region is opened, `inserted` is called for every entry it has, pool by pool, in the
    order of `iter(store)`: least recently used first, as far as that is known.  Storing a key
    anew is `removed`, then `inserted`.  An entry that was evicted, deleted or found damaged is
    `removed`.  Methods must not use the store: writing raises RuntimeError.  What they raise is
    logged once and changes nothing for the store's callers.

    A policy may also have any of `inserted_many(keys, slot_sizes)`, `used_many(keys)` and
    `removed_many(keys)`, see `BatchEvictionPolicy`.  Where it has one, up to 4096 events of that
    kind that follow each other are told in one call of it, in their order, and the method for
    one key is not called: a batch of reads costs one call and one lock.
    """

    def inserted(self, key: bytes, slot_bytes: int) -> None:
        """A key was stored in a slot of this size."""

    def used(self, key: bytes) -> None:
        """A value was read, or named in `touch_many`."""

    def removed(self, key: bytes) -> None:
        """An entry is gone."""

    def victims(self, slot_bytes: int, wanted: int) -> Iterable[bytes]:
        """Name keys in slots of this size that may go, first those that should.

        The store takes as many as it wants and can; it passes over entries that are being read,
        so naming more than `wanted` (a generator over all) is welcome, and what is not taken
        stays.  That a key was taken is told by `removed`.
        """


@runtime_checkable
class BatchEvictionPolicy(EvictionPolicy, Protocol):
    """A policy that is told of many keys at once."""

    def inserted_many(self, keys: Sequence[bytes], slot_sizes: Sequence[int]) -> None:
        """Keys were stored, each in a slot of so many bytes."""

    def used_many(self, keys: Sequence[bytes]) -> None:
        """Values were read, or named in `touch_many`."""

    def removed_many(self, keys: Sequence[bytes]) -> None:
        """Entries are gone."""


def check_eviction(eviction: str | EvictionPolicy) -> None:
    """Raise ValueError unless this is an order's name or has the methods of a policy."""
    if eviction in ORDERS if isinstance(eviction, str) else isinstance(eviction, EvictionPolicy):
        if isinstance(eviction, EvictionPolicy) and not isinstance(eviction, type):
            _check_calls(eviction)
        if not isinstance(eviction, type):
            return
        raise ValueError(  # A class has the methods too, but there is nobody to call.
            f"eviction is the class {eviction.__name__}, not an object. Remedy: "
            f"{eviction.__name__}(...)"
        )
    raise ValueError(
        "eviction must be one of lru, fifo, or an object with the methods inserted, used, "
        f"removed and victims (tablespace.EvictionPolicy), not {eviction!r}"
    )


def _check_calls(policy: EvictionPolicy) -> None:
    """Raise ValueError for a method that cannot be called as the store will."""
    for name, arguments in (_CALLS | _BATCH_CALLS).items():
        if not hasattr(policy, name):
            continue  # Of the three that need not be there.
        try:
            signature = inspect.signature(getattr(policy, name))
        except (TypeError, ValueError):
            continue  # A compiled one, which does not tell.
        try:
            signature.bind(*arguments)
        except TypeError as error:
            raise ValueError(
                f"eviction: {type(policy).__name__}.{name}{signature} cannot be called as "
                f"{name}({', '.join(arguments)}): {error}. Remedy: see tablespace.EvictionPolicy"
            ) from None


class Eviction:
    """Chooses victims for one index.

    Parameters
    ----------
    index : KeyIndex
    order : {"lru", "fifo"} or EvictionPolicy
    path : str
        The region, for the log.

    Notes
    -----
    Any thread may call.  The index queues events under the GIL; they reach the policy in that
    order, from whichever thread comes next, never while the index changes.
    """

    def __init__(self, index: KeyIndex, order: str | EvictionPolicy, path: str) -> None:
        self._index = index
        self._path = path
        self._events: deque[bytes] = deque()
        self._policy = None if isinstance(order, str) else order
        self._telling = threading.Lock()
        self._teller: int | None = None
        self._name = order if isinstance(order, str) else type(order).__name__
        self._complained: str | None = None
        index.keeps_order = self._policy is None and order == "fifo"
        if self._policy is not None:
            self._events = index.events = deque(
                b"i" + size.to_bytes(4, sys.byteorder) + key for key, size in index.sized_keys()
            )
            self.tell(wait=True)

    @property
    def reasons(self) -> list[str]:
        """What was chosen, for `stats().choices`; nothing for the default."""
        if self._name == "lru":
            return []
        kind = "asked for" if self._policy is None else "a policy of the caller's"
        said = [f"eviction {self._name}: {kind}"]
        return said + ([self._complained] if self._complained else [])

    def refuse_reentry(self) -> None:
        """Raise RuntimeError in a thread that is inside the policy: it would wait for itself."""
        if self._teller is not None and self._teller == threading.get_ident():
            raise RuntimeError(
                f"the eviction policy {self._name} uses the store that asks it. "
                "Remedy: let the policy work from its own records"
            )

    def tell(self, *, wait: bool = False) -> None:
        """Let the policy know what happened.

        Where another thread is at it already, the events are left to that one, or to the next
        call, unless too many have gathered.
        """
        if self._policy is None or not self._events or self._teller == threading.get_ident():
            return
        if not self._telling.acquire(blocking=wait or len(self._events) > BACKLOG):
            return
        try:
            self._teller = threading.get_ident()
            self._deliver(len(self._events) if wait else BACKLOG)
        finally:
            self._teller = None
            self._telling.release()

    def _deliver(self, limit: int) -> None:
        while limit > 0 and self._events:
            name = _METHODS[self._events[0][:1]]
            takes_many = hasattr(self._policy, f"{name}_many")
            keys, slot_sizes = next_run(self._events, min(limit, RUN) if takes_many else 1)
            limit -= len(keys)
            if takes_many:
                self._call(f"{name}_many", (keys, slot_sizes) if slot_sizes else (keys,))
            else:
                self._call(name, (keys[0], *slot_sizes))

    def _call(self, name: str, arguments: Iterable[object]) -> None:
        try:
            getattr(self._policy, name)(*arguments)
        except Exception as error:
            self._complain(f"{name}() raised {error!r}")

    def victims(self, wanted: int, pool: int) -> VictimList:
        """Choose up to `wanted` entries of a pool; the leading thread of a commit asks."""
        if self._policy is None:
            return VictimList(self._index, wanted, pool)
        names, problem = self._ask(self._policy, wanted, pool)
        chosen = VictimList(self._index, wanted, pool, keys=names)
        try:
            self._judge(chosen, problem)
        except BaseException:
            chosen.spare()
            raise
        return chosen

    def _judge(self, chosen: VictimList, problem: str | None) -> None:
        """Complain of a policy that named too few; that some are being read is not its fault."""
        reasons = Counter(chosen.passed_over)
        if chosen.named + reasons["being read"] >= chosen.count and problem is None:
            return
        wrong = [problem] if problem else []
        wrong += [f"{count} {why}" for why, count in reasons.items()]
        self._complain(
            f"of {chosen.count} that had to go it named {chosen.named} "
            f"({'; '.join(wrong) or 'and no more'}); the least recently used made up for it"
        )

    def _ask(
        self, policy: EvictionPolicy, wanted: int, pool: int
    ) -> tuple[list[bytes], str | None]:
        """Return the keys that a policy names, and what went wrong on the way."""
        self.tell(wait=True)
        slot_bytes = self._index.allocator.pool_stats()[pool][0]
        names: list[bytes] = []
        with self._telling:
            self._teller = threading.get_ident()
            try:
                names.extend(islice(policy.victims(slot_bytes, wanted), wanted + SPARE_NAMES))
            except Exception as error:
                return names, f"victims() raised {error!r}"
            finally:
                self._teller = None
        return names, None

    def _complain(self, what: str) -> None:
        """Say once that the policy failed; further failures change nothing either."""
        if self._complained is None:
            self._complained = f"eviction policy {self._name} failed: {what}; said once"
            logger.warning("%s: %s", self._path, self._complained)
