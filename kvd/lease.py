"""A lease: blocks read in place in shared memory, pinned until the end of a `with` block."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from kvd.mapping import ArenaMapping
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

    __slots__ = ("_handle", "_keys", "_pinned", "_views")

    def __init__(self, handle: NamespaceHandle, keys: Sequence[bytes]) -> None:
        self._handle = handle
        self._keys = keys if type(keys) is list else list(keys)
        self._views: list[memoryview | None] = []
        # Per arena read from: mostly one, two after a reconnection half-way.
        self._pinned: list[tuple[Connection, ArenaMapping, list[int]]] = []

    def __enter__(self) -> list[memoryview | None]:
        if self._views or self._pinned:
            raise RuntimeError("this lease was entered before; make another")
        try:
            return self._take()
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
        if self._pinned:
            self._end()

    def _take(self) -> list[memoryview | None]:
        keys = self._keys
        handle = self._handle
        views = self._views
        found = handle.local_lookup()
        if found is None:
            views += [None] * len(checked_keys(keys))
            missing = list(range(len(keys)))
        else:
            connection, reader, space = found
            mapping = connection.mapping
            assert mapping is not None
            places: list[int] = []
            self._pinned.append((connection, mapping, places))
            missing = []
            for position, key in enumerate(keys):
                place = reader.lease(space, key, places)
                if place is None:
                    views.append(None)
                    missing.append(position)
                else:
                    views.append(mapping.view(*place))
        if missing:
            handle.look_up_rest(keys, missing, self._take_hit)
        return list(views)

    def _take_hit(self, connection: Connection, position: int, hit: Hit) -> bool:
        """Lease what the daemon found; False when it changed meanwhile."""
        if hit.data is not None:
            self._views[position] = memoryview(hit.data)
            return True
        mapping = connection.mapping
        assert mapping is not None
        view = mapping.lease_hit(hit, self._places_of(connection, mapping))
        if view is None and (mapping.reader.lane is None or mapping.reader.lane.is_full):
            copied = mapping.copy_bytes(hit)
            view = None if copied is None else memoryview(copied)
        self._views[position] = view
        return view is not None

    def _places_of(self, connection: Connection, mapping: ArenaMapping) -> list[int]:
        for _, known, places in self._pinned:
            if known is mapping:
                return places
        fresh: list[int] = []
        self._pinned.append((connection, mapping, fresh))
        return fresh

    def _end(self) -> None:
        for view in self._views:
            if view is not None:
                try:
                    view.release()
                except BufferError:
                    pass  # Something was made of it, which is worth nothing from now on.
        pinned, self._pinned = self._pinned, []
        for connection, mapping, places in pinned:
            if connection.is_own_process:
                mapping.reader.release(places)
                if not connection.alive:
                    self._handle.lease_ended(connection)
