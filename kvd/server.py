"""The server: who is connected, sessions, and the few things that happen on a timer."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from kvd.announced import Announced
from kvd.arena import Arena
from kvd.cache import Cache
from kvd.dispatch import HANDLERS
from kvd.durations import RequestTimes
from kvd.frames import (
    INLINE_BATCH_BYTES,
    MAX_FRAME_BYTES,
    MAX_PLAIN_BYTES,
)
from kvd.held_bytes import HeldBytes
from kvd.lanes import Lanes
from kvd.peers import Access
from kvd.reports import gather
from kvd.results import Stats, Status
from kvd.sessions import MAX_SESSIONS, Sessions
from kvd.sizing import Sizing
from kvd.status import status_of_daemon

if TYPE_CHECKING:
    from kvd.served_connection import ServedConnection

TICK_S = 0.5  # Heartbeat (lookups miss when it is 2 s old), expiry, reservations.
MAX_BATCH_BLOCKS = 256
RECEIVE_BYTES = 256 << 10  # The longest that asyncio receives at a time.

logger = logging.getLogger(__name__)


class Server:
    """Everything that serves. Event loop only.

    Parameters
    ----------
    arena, cache
        Ready to use.
    notes : list of str
        What was chosen at start; STATS repeats it.
    access : Access
        Who may connect besides the daemon's own user.
    max_connections : int
        At once; one more is told so and hung up on.
    """

    def __init__(
        self,
        arena: Arena,
        cache: Cache,
        notes: list[str],
        access: Access | None = None,
        max_connections: int = MAX_SESSIONS,
    ) -> None:
        self.arena = arena
        self.cache = cache
        self.notes = notes
        self.access = access if access is not None else Access()
        self.max_connections = max_connections
        self.sizing = Sizing(arena.data_bytes, notes)
        self.announced = Announced(cache.memory.classes, notes)
        self.connections: set[ServedConnection] = set()
        self.errors = 0
        self.held = HeldBytes()
        # What any connection receives, until it was read: within one call of the loop.
        self.receiving = memoryview(bytearray(RECEIVE_BYTES))
        self.times = RequestTimes(HANDLERS)
        self.last_tick = time.monotonic()
        self.lanes = Lanes(cache)
        self.sessions = Sessions(cache.storing.reservations, self.lanes, max_connections)
        self._started = time.monotonic()
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine to its end, whatever happens to the connection it answers."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def tick(self) -> None:
        """Do what is due every `TICK_S`."""
        self.arena.beat()
        self.last_tick = time.monotonic()
        self.lanes.tick()
        self.cache.tick()
        for session in self.sessions:
            self.cache.storing.reservations.expire(session)

    def note_block_size(self, client: str, block_bytes: int) -> int:
        """Make room for blocks of a size that a client announced; return their slots' size.

        Says so where there are none, or only larger ones.
        """
        paths = self.cache.long
        if paths is not None and paths.wants_slots_for(block_bytes):
            self.run(paths.add_slots_for(block_bytes))
        elif paths is not None and block_bytes > paths.slot_bytes > 0:
            self.announced.note_too_large_for_disk(client, block_bytes, paths.slot_bytes)
        return self.announced.note(client, block_bytes)

    def max_batch_blocks(self, slot_bytes: int) -> int:
        """Return how many blocks of a size one request may ask for."""
        slots = self.arena.geometry.slots_in_all(slot_bytes)
        return max(1, min(MAX_BATCH_BLOCKS, slots // 8))

    def max_frame_bytes(self, slot_bytes: int) -> int:
        """Return the longest frame of a session that has blocks of a size."""
        values = min(INLINE_BATCH_BYTES, self.max_batch_blocks(slot_bytes) * slot_bytes)
        largest = self.cache.memory.classes.largest_bytes
        return min(MAX_FRAME_BYTES, max(values, largest) + MAX_PLAIN_BYTES)

    async def stats(self) -> Stats:
        """Collect the counters of every part."""
        sessions = self.sessions.open_ones()
        self.lanes.fold()
        return await gather(
            self.cache,
            pid=os.getpid(),
            uptime_s=round(time.monotonic() - self._started, 3),
            sessions=len(sessions),
            engines=sum(1 for session in sessions if session.engine),
            errors=self.errors,
            notes=self.notes,
        )

    async def status(self) -> Status:
        """Collect how full the long tier is and how it fares."""
        return await status_of_daemon(
            self.cache,
            pid=os.getpid(),
            uptime_s=round(time.monotonic() - self._started, 3),
            notes=self.notes,
        )

    def close_connections(self) -> None:
        """Hang up on every client."""
        for connection in list(self.connections):
            connection.hang_up()
