"""A lease: blocks read in place in shared memory, pinned until the end of a `with` block."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from kvd import forks
from kvd.values import checked_keys

if TYPE_CHECKING:
    from kvd.connection import Connection
    from kvd.namespace_handle import NamespaceHandle
    from kvd.protocol import Hit


class Lease:
    """Read-only views of blocks, made by `NamespaceHandle.lease`.

    Entering returns a list of memoryview or None (a miss), one per key. Until the block ends
    the daemon neither evicts those blocks nor uses their slots again, also when they are
    deleted meanwhile. Leaving releases the views: a later use of one is a ValueError. What was
    made of a view (a slice, an array over it) is worth nothing after the block.

    Keys beyond what a session may pin - a quarter of the slots, at most 4,096 - come as copies.
    """

    __slots__ = ("_forks", "_handle", "_keys", "_others", "_pinned", "_places", "_views")

    def __init__(self, handle: NamespaceHandle, keys: Sequence[bytes]) -> None:
        self._handle = handle
        self._keys = keys if type(keys) is list else list(keys)
        self._forks = forks.count
        self._views: list[memoryview | None] = []
        # Whose arena the places are leases of; others only after a reconnection half-way.
        self._pinned: Connection | None = None
        self._places: list[int] = []
        self._others: list[tuple[Connection, list[int]]] = []

    def __enter__(self) -> list[memoryview | None]:
        if self._views or self._pinned is not None:
            raise RuntimeError("this lease was entered before; make another")
        try:
            found = self._handle.local_lookup()
            if found is None:
                checked_keys(self._keys)
                self._views = [None] * len(self._keys)
            else:
                self._pinned, reader, space = found
                self._views = reader.lease_many(space, self._keys, self._places)
            if len(self._places) < len(self._keys):
                missing = [at for at, view in enumerate(self._views) if view is None]
                self._handle.look_up_rest(self._keys, missing, self._take)
            return self._views
        except BaseException:
            self._end()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()

    def __del__(self) -> None:
        # Where an exception of a signal handler came between __enter__ and the block.
        if getattr(self, "_places", None) or getattr(self, "_others", None):
            self._end()

    def _take(self, connection: Connection, position: int, hit: Hit) -> bool:
        """Lease what the daemon found; False when it changed meanwhile."""
        if hit.data is not None:
            self._views[position] = memoryview(hit.data)
            return True
        mapping = connection.mapping
        assert mapping is not None
        view = mapping.lease_hit(hit, self._places_of(connection))
        if view is None and (mapping.reader.lane is None or mapping.reader.lane.is_full):
            copied = mapping.copy_bytes(hit)
            view = None if copied is None else memoryview(copied)
        self._views[position] = view
        return view is not None

    def _places_of(self, connection: Connection) -> list[int]:
        if self._pinned is None:
            self._pinned = connection
        if self._pinned is connection:
            return self._places
        for other, places in self._others:
            if other is connection:
                return places
        fresh: list[int] = []
        self._others.append((connection, fresh))
        return fresh

    def _end(self) -> None:
        for view in self._views:
            if view is not None:
                try:
                    view.release()
                except BufferError:
                    pass  # Something was made of it, which is worth nothing from now on.
        if self._forks != forks.count:
            return  # The parent's leases are the parent's to end.
        if self._pinned is not None:
            self._let_go(self._pinned, self._places)
        while self._others:
            self._let_go(*self._others.pop())

    def _let_go(self, connection: Connection, places: list[int]) -> None:
        mapping = connection.mapping
        if mapping is not None:
            mapping.reader.release(places)
        if connection.broken is not None:
            self._handle.lease_ended(connection)
