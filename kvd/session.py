"""A session: what one connected client reserved, stored and still waits for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from kvd.process import Process
from kvd.results import Flushed

RESERVATION_S = 60.0  # Far above any copy; a slot kept longer is out of use, see Reservations.


@dataclass
class Barrier:
    """A FLUSH in waiting: everything stored before `ticket` must be resolved."""

    ticket: int
    answer: Callable[[], None]


class Carrier(Protocol):
    """A connection that a session is used by."""

    def leave_session(self) -> None:
        """Have nothing to do with the session any more: hang up at once."""


@dataclass
class Session:
    """One client's session. Event loop only.

    It outlives its connections: a closed socket is not a dead process. See `kvd.sessions`.

    Attributes
    ----------
    process : Process
        Whose session it is.
    connection : Carrier or None
        The connection it is used by; None while the client is away.
    reserved : dict
        Slot to (reservation, time of reserving).
    expired : dict
        Reservations kept too long: answered `expired`, but the slots stay out of use while the
        process may still write into them.
    held_bytes : int
        Of the slots of both.
    lanes : list of int
        Its lanes, see `kvd.lanes`.
    """

    id: int
    client: str = ""
    engine: str | None = None
    process: Process = field(default_factory=Process)
    connection: Carrier | None = None
    reserved: dict[int, tuple[int, float]] = field(default_factory=dict)
    expired: dict[int, int] = field(default_factory=dict)
    held_bytes: int = 0
    lanes: list[int] = field(default_factory=list)
    durable: int = 0
    dropped: int = 0
    _next_ticket: int = 0
    _pending: OrderedDict[int, None] = field(default_factory=OrderedDict)
    _barriers: list[Barrier] = field(default_factory=list)

    @property
    def held_slots(self) -> int:
        """Return how many slots its process may write into because of it."""
        return len(self.reserved) + len(self.expired)

    @property
    def holds_something(self) -> bool:
        """Return whether its process may write into slots or hold leases because of it."""
        return bool(self.reserved or self.expired or self.lanes)

    def open_ticket(self) -> int:
        """Note a long block that is not durable yet and return its ticket."""
        ticket = self._next_ticket
        self._next_ticket += 1
        self._pending[ticket] = None
        return ticket

    def resolve(self, ticket: int, durable: bool | None) -> None:
        """Note that a block is durable, dropped, or (None) removed by request."""
        if ticket not in self._pending:
            return
        del self._pending[ticket]
        if durable:
            self.durable += 1
        elif durable is not None:
            self.dropped += 1
        if self._barriers:
            self._answer_barriers()

    def flushed(self) -> Flushed:
        """Return how the session's long blocks stand now."""
        return Flushed(self.durable, self.dropped, len(self._pending))

    def add_barrier(self, answer: Callable[[], None]) -> Barrier | None:
        """Have `answer` called once all that was stored so far is resolved; None: it is."""
        if not self._pending:
            return None
        barrier = Barrier(self._next_ticket, answer)
        self._barriers.append(barrier)
        return barrier

    def remove_barrier(self, barrier: Barrier) -> None:
        """Forget a barrier whose time is up."""
        if barrier in self._barriers:
            self._barriers.remove(barrier)

    def end_barriers(self) -> None:
        """Answer every FLUSH: the client is gone."""
        barriers, self._barriers = self._barriers, []
        for barrier in barriers:
            barrier.answer()

    def _answer_barriers(self) -> None:
        # Tickets are handed out in order, so the oldest pending one decides for all.
        oldest = next(iter(self._pending), self._next_ticket)
        ready = [barrier for barrier in self._barriers if barrier.ticket <= oldest]
        if ready:
            self._barriers = [barrier for barrier in self._barriers if barrier not in ready]
            for barrier in ready:
                barrier.answer()
