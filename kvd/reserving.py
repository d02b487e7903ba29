"""Reserved slots as a caller writes into them: `with blocks.reserve(sizes) as slots`."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from kvd import protocol
from kvd.client_session import ClientSession, Writer
from kvd.errors import ProtocolError, UnavailableError
from kvd.frames import INLINE_BATCH_BYTES
from kvd.putting import UNAVAILABLE, Put, accepted_count
from kvd.values import checked_keep, checked_key, checked_sizes
from tablespace import checksum64

if TYPE_CHECKING:
    from kvd.client import Client

logger = logging.getLogger(__name__)


class Slot:
    """One reserved slot.

    Attributes
    ----------
    size_bytes : int
        What was asked for.
    view : memoryview or None
        Writable, `size_bytes` long, page-aligned where the arena is mapped. None when no slot was
        granted (`status` says why) and once the slot is committed.
    status : str
        "reserved", then what COMMIT answered; or why there is no slot.
    """

    __slots__ = ("grant", "size_bytes", "status", "view")

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.view: memoryview | None = None
        self.status = UNAVAILABLE
        self.grant: protocol.Grant | None = None  # None also for a private buffer.


class Slots:
    """Slots to write values into where they will stay; made by `NamespaceHandle.reserve`.

    Without a mapping of the arena the views are private buffers, sent when they are committed:
    the results are the same.

    Notes
    -----
    Leaving the block gives back what was not committed. Nobody may write into a view, or into
    what was made of it (an array, a DMA's target), after it was committed or the block was left:
    the slot may hold another's block by then. Such a write is found out by its checksum. For
    one thread at a time; not usable in a forked child.
    """

    def __init__(self, client: Client, namespace: str, sizes: Sequence[int]) -> None:
        self._client = client
        self._namespace = namespace
        self._slots = [Slot(size) for size in checked_sizes(sizes)]
        self._session: ClientSession | None = None
        self._writer = Writer()
        self._accepted = 0
        self._inline = False
        self._pid = os.getpid()
        self._open = False

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, position: int) -> Slot:
        return self._slots[position]

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def __enter__(self) -> Slots:
        if self._session is not None or self._open:
            raise ValueError("slots are reserved once; call reserve() again for more")
        self._open = True
        try:
            self._reserve()
        except UnavailableError:
            self._end()
            for slot in self._slots:
                slot.grant, slot.status = None, UNAVAILABLE
            self._open = True
        except BaseException:
            self._end()
            raise
        self._count_refused()
        return self

    def give_up(self) -> None:
        """Enter the block without any slot, as without a daemon."""
        self._open = True
        self._count_refused()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give back what was not committed; the end of the block does it."""
        self._end()

    def commit(
        self,
        keys: Sequence[bytes | None],
        *,
        retention: str = "long",
        ttl_s: float | None = None,
    ) -> list[bool]:
        """Publish what was written, without a copy.

        Parameters
        ----------
        keys : sequence of (bytes or None)
            One per slot; None leaves a slot to a later call.
        retention, ttl_s
            As of `NamespaceHandle.put_many`.

        Returns
        -------
        list of bool
            Per slot, whether its key is present afterwards. The reasons are counted in
            `Client.refusals`; it never raises for size, room or an absent daemon.

        Raises
        ------
        ValueError
            For keys that do not fit the slots, a slot committed before, or outside the block.
        """
        if not self._open:
            raise ValueError("slots are committed inside the block that reserved them")
        if len(keys) != len(self._slots):
            raise ValueError(f"each slot needs a key: keys {len(keys)}, slots {len(self._slots)}")
        ttl_s = checked_keep(retention, ttl_s)
        results = [False] * len(keys)
        chosen: list[tuple[int, bytes]] = []
        for position, (key, slot) in enumerate(zip(keys, self._slots, strict=True)):
            if key is None:
                continue
            chosen.append((position, checked_key(key)))
            if slot.view is None and slot.status in (protocol.STORED, protocol.REFRESHED):
                raise ValueError(f"slot {position} was committed already")
        written = [
            (position, key) for position, key in chosen if self._slots[position].view is not None
        ]
        size = self._batch_size()
        for first in range(0, len(written), size):
            self._commit_part(written[first : first + size], retention, ttl_s)
        for position, _ in written:
            slot = self._slots[position]
            results[position] = slot.status in (protocol.STORED, protocol.REFRESHED)
        refused = [
            self._slots[position].status for position, _ in written if not results[position]
        ]
        if refused:
            self._client.refuse(refused)
        return results

    # -- inside --------------------------------------------------------------------------------

    def _count_refused(self) -> None:
        refused = [slot.status for slot in self._slots if slot.view is None]
        if refused:
            self._client.refuse(refused)

    def _reserve(self) -> None:
        client = self._client
        self._session = session = client.session()
        client.begin_write(session, self._writer)
        self._inline = client.connection_of(session).mapping is None
        if self._inline:
            limit = session.limits.max_value_bytes
            for slot in self._slots:
                fits = slot.size_bytes <= limit
                slot.status = protocol.RESERVED if fits else protocol.TOO_LARGE
                slot.view = memoryview(bytearray(slot.size_bytes)) if fits else None
            return
        put = Put(client, session, self._namespace, "long", None)
        for first in range(0, len(self._slots), protocol.MAX_BATCH_KEYS):
            part = self._slots[first : first + protocol.MAX_BATCH_KEYS]
            grants = put.reserve([slot.size_bytes for slot in part], None, self._writer)
            for slot, grant in zip(part, grants, strict=True):
                slot.status = grant.status
                if grant.status == protocol.RESERVED:
                    mapping = put.mapping
                    assert mapping is not None
                    slot.grant = grant
                    view = mapping.slot_view(grant, slot.size_bytes)
                    self._writer.views.append((weakref.ref(view.obj), grant))
                    slot.view = view

    def _batch_size(self) -> int:
        session = self._session
        if session is None or not self._inline:
            return protocol.MAX_BATCH_KEYS
        limits = session.limits
        room = max(1, INLINE_BATCH_BYTES // max(1, limits.max_value_bytes))
        return min(room, max(1, limits.max_batch_blocks))

    def _commit_part(
        self, part: list[tuple[int, bytes]], retention: str, ttl_s: float | None
    ) -> None:
        """Publish some slots and note what became of them."""
        assert self._session is not None
        slots = [self._slots[position] for position, _ in part]
        views = [slot.view for slot in slots if slot.view is not None]
        put = Put(self._client, self._session, self._namespace, retention, ttl_s)
        try:
            if os.getpid() != self._pid:
                raise UnavailableError("reserved by the process that forked this one")
            if slots[0].grant is None:
                statuses = put.inline([key for _, key in part], views)
            else:
                items = [
                    protocol.CommitItem(
                        slot.grant.slot, slot.grant.reservation, key, view.nbytes, checksum64(view)
                    )
                    for slot, view, (_, key) in zip(slots, views, part, strict=True)
                    if slot.grant is not None
                ]
                statuses = put.commit(items, self._writer)
                if retention == "long":
                    self._accepted += accepted_count(statuses)
        except (ProtocolError, UnavailableError):
            statuses = [UNAVAILABLE] * len(part)
        for slot, status in zip(slots, statuses, strict=True):
            slot.status = status
            if status in (protocol.STORED, protocol.REFRESHED):
                slot.view = None

    def _end(self) -> None:
        """Give back what is held, but what somebody still has a view of."""
        self._open = False
        if self._session is None or os.getpid() != self._pid:
            return
        for slot in self._slots:
            view, slot.view = slot.view, None
            if view is None or slot.grant is None:
                continue
            try:
                view.release()
            except BufferError:
                pass  # Something was made of it; its slot goes back once that is gone.
            del view
        self._client.end_write(self._session, self._writer, self._accepted)
