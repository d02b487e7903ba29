"""A bound on what all connections together hold in the daemon's memory."""

from __future__ import annotations

from typing import Protocol

MAX_HELD_BYTES = 256 << 20
FREE_BYTES = 64 << 10  # So little is not counted: the sessions' own limit bounds it.


class Holder(Protocol):
    """A connection that can be dropped with what it holds."""

    def drop(self, reason: str) -> None:
        """Let go of everything at once."""


class HeldBytes:
    """Unfinished requests and unread replies of all connections. Event loop only.

    When they are too many together, the connection that has held some for longest is dropped:
    a client that works finishes its frames and reads its replies within moments.
    """

    def __init__(self, limit_bytes: int = MAX_HELD_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._held: dict[Holder, int] = {}
        self.total_bytes = 0

    def note(self, holder: Holder, held_bytes: int) -> None:
        """Say what a connection holds now; one that held nothing before is the youngest."""
        self.total_bytes -= self._held.get(holder, 0)
        if held_bytes <= FREE_BYTES:
            self._held.pop(holder, None)
            return
        self._held[holder] = held_bytes
        self.total_bytes += held_bytes
        while self.total_bytes > self._limit_bytes:
            oldest = next(iter(self._held))
            self.total_bytes -= self._held.pop(oldest)
            oldest.drop("the connections hold too much together, and this one the longest")
