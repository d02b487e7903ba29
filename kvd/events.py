"""Events: who wants to hear which blocks come and go, and what waits to be told.

For routers that send a request where its prefix is. A subscriber that does not keep up loses
events and is told how many; the daemon never waits for it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from kvd.block import Block
from kvd.errors import ProtocolError
from kvd.memory_tier import MemoryTier
from kvd.protocol import Event, Events

STORED = "stored"
REMOVED = "removed"
CLEARED = "cleared"
MEMORY = "memory"
LONG = "long"

MAX_FEEDS = 64  # Routers, of which a host has few.
MAX_WAITING = 8192  # Of one subscriber; 300 bytes each at most.
FRAME_EVENTS = 2048
GATHER_S = 0.01  # Events of so long go into one frame.

One = tuple[str, str, str, bytes | None]


class Feed:
    """One subscriber's queue. Event loop only.

    Parameters
    ----------
    request_id : int
        Of its SUBSCRIBE: what EVENTS carry.
    namespaces : list of str or None
        Which to tell of; None: all.
    push : callable
        Sends one message, or returns False when the subscriber does not keep up.
    """

    def __init__(
        self, request_id: int, namespaces: Sequence[str] | None, push: Callable[[Events], bool]
    ) -> None:
        self._request_id = request_id
        self._namespaces = None if namespaces is None else frozenset(namespaces)
        self._push = push
        self._waiting: deque[One] = deque()
        self._lost = 0
        self._timer: asyncio.TimerHandle | None = None

    def add(self, event: One) -> None:
        """Queue an event; the oldest one makes room."""
        if self._namespaces is not None and event[2] not in self._namespaces:
            return
        if len(self._waiting) >= MAX_WAITING:
            self._waiting.popleft()
            self._lost += 1
        self._waiting.append(event)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(GATHER_S, self.send)

    def send(self) -> None:
        """Send what waits, as far as the subscriber keeps up."""
        self._stop_timer()
        while self._waiting:
            part = [one for one, _ in zip(self._waiting, range(FRAME_EVENTS), strict=False)]
            lost = self._lost
            if not self._push(Events(id=self._request_id, lost=lost, events=_grouped(part))):
                return
            self._lost -= lost
            for _ in part:
                self._waiting.popleft()

    def close(self) -> None:
        """Forget what waits."""
        self._stop_timer()
        self._waiting.clear()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class EventHub:
    """All feeds. Event loop only.

    Parameters
    ----------
    memory : MemoryTier
        Is asked to tell of its blocks while anybody listens.
    """

    def __init__(self, memory: MemoryTier) -> None:
        self._memory = memory
        self._feeds: set[Feed] = set()

    def add(self, feed: Feed) -> None:
        """Let a feed hear of everything from now on.

        Raises
        ------
        ProtocolError
            `limit`, when there are too many.
        """
        if len(self._feeds) >= MAX_FEEDS:
            raise ProtocolError("limit", f"there are {MAX_FEEDS} subscribers already")
        self._feeds.add(feed)
        self._memory.on_stored = self._stored
        self._memory.on_removed = self._removed

    def remove(self, feed: Feed) -> None:
        """Let a feed hear of nothing any more."""
        self._feeds.discard(feed)
        feed.close()
        if not self._feeds:
            self._memory.on_stored = None
            self._memory.on_removed = None

    def tell(
        self, kind: str, tier: str, namespace: str, keys: Sequence[bytes | None] = (None,)
    ) -> None:
        """Queue events of one kind; a `cleared` one names no key."""
        if not self._feeds:
            return
        for key in keys:
            event = (kind, tier, namespace, key)
            for feed in self._feeds:
                feed.add(event)

    def durable(self, block: Block) -> None:
        """Note that the long tier has a block."""
        self.tell(STORED, LONG, block.namespace.name, (block.key,))

    def _stored(self, block: Block) -> None:
        self.tell(STORED, MEMORY, block.namespace.name, (block.key,))

    def _removed(self, block: Block) -> None:
        self.tell(REMOVED, MEMORY, block.namespace.name, (block.key,))


def _grouped(events: Sequence[One]) -> list[Event]:
    """Put neighbours that differ in the key only into one event; the order stays."""
    grouped: list[Event] = []
    for kind, tier, namespace, key in events:
        keys = [] if key is None else [key]
        last = grouped[-1] if grouped else None
        if (
            last is not None
            and keys
            and last.keys
            and (last.kind, last.tier, last.namespace) == (kind, tier, namespace)
        ):
            last.keys.extend(keys)
        else:
            grouped.append(Event(kind, tier, namespace, keys))
    return grouped
