"""Slots that clients write into: handed out, committed, cancelled, expired, quarantined.

A reserved slot may be written by another process at any moment until that process says it is
done or is gone. So a reservation that is merely old, or whose connection merely closed, gives
no slot back: the slot waits in quarantine for the client's word or its process's end.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from kvd import protocol
from kvd.memory_tier import MemoryTier
from kvd.session import RESERVATION_S, Session

SESSION_SHARE = 4  # One session may hold a quarter of the slots, so that it starves nobody.


class Reservations:
    """Reservations of all sessions. Event loop only.

    Parameters
    ----------
    memory : MemoryTier
        Gives and takes the slots.
    clock : callable
        Seconds, monotonic.
    """

    def __init__(self, memory: MemoryTier, clock: Callable[[], float] = time.monotonic) -> None:
        self._memory = memory
        self._clock = clock
        self._session_limit = max(1, memory.arena.slot_count // SESSION_SHARE)
        # Slots of closed sessions whose process may live on, by session id.
        self._orphans: dict[int, tuple[int, list[int]]] = {}
        self._orphaned: Counter[int] = Counter()  # How many of these slots, by process.

    def reserve(self, session: Session) -> tuple[int, int] | None:
        """Return (slot, reservation), or None when there is no room for this session."""
        # A process that drops session after session holds no more than one that keeps its own.
        held = len(session.reserved) + len(session.expired) + self._orphaned[session.pid]
        if held >= self._session_limit:
            self._memory.counters.no_room += 1
            return None
        reserved = self._memory.reserve()
        if reserved is not None:
            session.reserved[reserved[0]] = (reserved[1], self._clock())
        return reserved

    def take(self, session: Session, slot: int, reservation: int) -> str:
        """End a reservation: RESERVED when the slot may be published, else why not."""
        held = session.reserved.get(slot)
        if held is not None and held[0] == reservation:
            del session.reserved[slot]
            return protocol.RESERVED
        if session.expired.get(slot) == reservation:
            # The client is done with it, only too late: the slot is safe to use again.
            del session.expired[slot]
            self._memory.end_quarantine(slot)
            return protocol.EXPIRED
        return protocol.UNKNOWN_RESERVATION

    def expire(self, session: Session) -> None:
        """Quarantine what a session reserved too long ago."""
        limit = self._clock() - RESERVATION_S
        for slot, (reservation, reserved_at) in list(session.reserved.items()):
            if reserved_at > limit:
                break  # Insertion order is reservation order.
            del session.reserved[slot]
            session.expired[slot] = reservation
            self._memory.quarantine(slot)

    def end(self, session: Session) -> bool:
        """End all of a session's reservations; True when slots stay quarantined for it."""
        slots = list(session.reserved) + list(session.expired)
        for slot in session.reserved:
            self._memory.quarantine(slot)
        session.reserved.clear()
        session.expired.clear()
        if session.writer_is_done:
            for slot in slots:
                self._memory.end_quarantine(slot)
            return False
        if slots:
            self._orphans[session.id] = (session.pid, slots)
            self._orphaned[session.pid] += len(slots)
        return bool(slots)

    def release(self, session_id: int, pid: int | None = None) -> None:
        """Free the quarantined slots of a closed session: its process is gone or said so.

        With `pid` only if the session was that process's: one client cannot free another's.
        """
        owner, slots = self._orphans.get(session_id, (0, []))
        if pid is not None and owner != pid:
            return
        self._orphans.pop(session_id, None)
        if slots:
            self._orphaned[owner] -= len(slots)
            if not self._orphaned[owner]:
                del self._orphaned[owner]
        for slot in slots:
            self._memory.end_quarantine(slot)
