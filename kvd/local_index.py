"""Lookups in the shared index: what a client finds without asking the daemon.

Both clients look here first. It needs a namespace's id, which every reply about the namespace
carries, so the first lookup of each goes to the daemon.
"""

from __future__ import annotations

from collections.abc import Callable

from tablespace.shared import ArenaReader

from kvd.mapping import ArenaMapping
from kvd.protocol import AboutNamespace, Message

MAX_SPACES = 65536  # As many as the daemon keeps; 100 bytes each.


class LocalIndex:
    """The shared index of one connection's arena.

    Parameters
    ----------
    mapping : ArenaMapping
        Where to look.
    daemon_is_there : callable
        Asked now and then, by a system call: whether the connection still stands. A lookup
        that finds it does not is a miss.

    Notes
    -----
    Safe from any thread.
    """

    def __init__(self, mapping: ArenaMapping, daemon_is_there: Callable[[], bool]) -> None:
        self.mapping = mapping
        self._reader = mapping.reader
        self._daemon_is_there = daemon_is_there
        self._spaces: dict[str, int] = {}

    def note(self, request: Message, reply: Message) -> None:
        """Learn a namespace's id from a reply. Another than before is right from now on."""
        if not isinstance(reply, AboutNamespace) or not reply.space:
            return
        name = getattr(request, "namespace", None)
        if name is not None and self._spaces.get(name) != reply.space:
            if len(self._spaces) >= MAX_SPACES:
                self._spaces.clear()
            self._spaces[name] = reply.space

    def look(self, name: str) -> tuple[ArenaReader, int] | None:
        """Return a reader and the namespace's id in it; None when the daemon must be asked."""
        space = self._spaces.get(name)
        if space is None:
            return None
        reader = self._reader
        if not reader.is_current():
            if not self._daemon_is_there():
                return None
            reader.checked()
            if not reader.is_current():
                return None
        return reader, space

    @property
    def holds_leases(self) -> bool:
        """Return whether any lease is held."""
        lane = self._reader.lane
        return lane is not None and lane.held > 0

    def end_leasing(self) -> bool:
        """Refuse further leases if none is held now; return whether that is so."""
        lane = self._reader.lane
        return lane is None or lane.shut_if_idle()

    def stop(self) -> None:
        """Find nothing any more; leases that are held stay until they end."""
        self._reader.stop()
