"""Lookups in the shared index: what a client finds without asking the daemon.

Both clients look here first. It needs a namespace's id, which every reply about the namespace
carries, so the first lookup of each goes to the daemon.
"""

from __future__ import annotations

from collections.abc import Callable

from tablespace.shared import ArenaReader

from kvd import forks
from kvd.mapping import ArenaMapping
from kvd.protocol import AboutNamespace, Message

MAX_SPACES = 65536  # As many as the daemon keeps; 100 bytes each.


class LocalIndex:
    """The shared index of one connection's arena.

    Parameters
    ----------
    mapping : ArenaMapping
        Where to look.

    lane_id : int
        What the daemon calls its lane; 0 without one.

    Notes
    -----
    Safe from any thread.
    """

    def __init__(self, mapping: ArenaMapping, lane_id: int = 0) -> None:
        self.mapping = mapping
        self.lane_id = lane_id
        self._reader = mapping.reader
        self._spaces: dict[str, tuple[ArenaReader, int]] = {}
        # The lane is the parent's.
        forks.stop_in_child(self)

    def note(self, request: Message, reply: Message) -> None:
        """Learn a namespace's id from a reply. Another than before is right from now on."""
        if not isinstance(reply, AboutNamespace) or not reply.space:
            return
        name = getattr(request, "namespace", "")
        known = self._spaces.get(name)
        if name and (known is None or known[1] != reply.space):
            if len(self._spaces) >= MAX_SPACES:
                self._spaces.clear()
            self._spaces[name] = (self._reader, reply.space)

    def look(
        self, name: str, daemon_is_there: Callable[[], bool]
    ) -> tuple[ArenaReader, int] | None:
        """Return a reader and the namespace's id in it; None when the daemon must be asked.

        Parameters
        ----------
        name : str
            The namespace.
        daemon_is_there : callable
            Whether the connection still stands, by a system call: asked every `CHECK_S`. A
            lookup that finds it does not is a miss.
        """
        found = self._spaces.get(name)
        if found is None or self._reader.is_current():
            return found
        if daemon_is_there():
            self._reader.checked()
            if self._reader.is_current():
                return found
        return None

    def end_leasing(self) -> bool:
        """Refuse further leases if none is held now; return whether that is so."""
        lane = self._reader.lane
        return lane is None or lane.shut_if_idle()

    def stop(self) -> None:
        """Find nothing any more; leases that are held stay until they end."""
        self._reader.stop()
