"""Slots that clients write into: handed out, committed, cancelled, expired, quarantined.

A reserved slot may be written by another process at any moment until that process says it is
done or is gone. So a reservation that is merely old gives no slot back: the slot waits in
quarantine for the client's word or its process's end. One whose connection closed stays as it
is: the client may resume the session and commit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from kvd import protocol
from kvd.memory_tier import NO_SLOT, MemoryTier
from kvd.process import Process
from kvd.session import RESERVATION_S, Session

SESSION_SHARE = 4  # One session may hold a quarter of memory, so that it starves nobody.


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
        self._session_limit = memory.arena.data_bytes // SESSION_SHARE

    def reserve(self, session: Session, size: int) -> tuple[int, int] | None:
        """Return (slot, reservation) for a value of so many bytes, or None without room."""
        return self.reserve_many(session, [size])[0]

    def reserve_many(self, session: Session, sizes: Sequence[int]) -> list[tuple[int, int] | None]:
        """Return the same for each of many sizes: room for all is made in one look."""
        found: list[tuple[int, int] | None] = [None] * len(sizes)
        # A process that drops session after session holds no more than one that keeps its own.
        held = session.held_bytes + session.process.left_bytes
        within: list[int] = []
        for position, size in enumerate(sizes):
            slot_bytes = self._memory.slot_bytes_for(size)
            if held and held + slot_bytes > self._session_limit:
                self._memory.counters.no_room += 1
                continue
            held += slot_bytes
            within.append(position)
        now = self._clock()
        given = self._memory.reserve_each([sizes[position] for position in within])
        for position, reserved in zip(within, given, strict=True):
            slot, reservation = reserved
            if slot != NO_SLOT:
                session.reserved[slot] = (reservation, now)
                session.held_bytes += self._slot_bytes(slot)
                found[position] = reserved
        return found

    def _slot_bytes(self, slot: int) -> int:
        return self._memory.arena.slot_bytes_of(slot)

    def take(self, session: Session, slot: int, reservation: int) -> str:
        """End a reservation: RESERVED when the slot may be published, else why not."""
        held = session.reserved.get(slot)
        if held is not None and held[0] == reservation:
            del session.reserved[slot]
            session.held_bytes -= self._slot_bytes(slot)
            return protocol.RESERVED
        if session.expired.get(slot) == reservation:
            # The client is done with it, only too late: the slot is safe to use again.
            del session.expired[slot]
            session.held_bytes -= self._slot_bytes(slot)
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

    def end(self, session: Session) -> None:
        """Give all slots of a session back: nobody writes into them any more."""
        self.keep_only(session, ())

    def keep_only(self, session: Session, kept: Collection[tuple[int, int]]) -> int:
        """Give back all slots of a session but those of `kept`, pairs of (slot, reservation)."""
        count = 0
        for slot, (reservation, _) in list(session.reserved.items()):
            if (slot, reservation) not in kept:
                del session.reserved[slot]
                session.held_bytes -= self._slot_bytes(slot)
                self._memory.unreserve(slot)
                count += 1
        for slot, reservation in list(session.expired.items()):
            if (slot, reservation) not in kept:
                del session.expired[slot]
                session.held_bytes -= self._slot_bytes(slot)
                self._memory.end_quarantine(slot)
                count += 1
        return count

    def orphan(self, session: Session) -> None:
        """Keep a session's slots out of use until its process ends; nobody resumes it."""
        for slot in session.reserved:
            self._memory.quarantine(slot)
        session.process.orphans += [*session.reserved, *session.expired]
        session.process.orphan_bytes += session.held_bytes
        session.held_bytes = 0
        session.reserved.clear()
        session.expired.clear()

    def free_orphans(self, process: Process) -> None:
        """Give back what a process that ended might have written into."""
        slots, process.orphans = process.orphans, []
        process.orphan_bytes = 0
        for slot in slots:
            self._memory.end_quarantine(slot)
