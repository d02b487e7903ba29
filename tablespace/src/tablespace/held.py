"""What puts acknowledged before any sync leave to be made durable."""

from __future__ import annotations

from dataclasses import dataclass, field

from tablespace._core.line_codec import LineWriter

# Appended in one write, within what the journal may grow past its bound.
HELD_LINE_BYTES = 1 << 20
# Each container touched is a sync of its own when the records are settled.
HELD_CONTAINERS = 64


@dataclass
class HeldRecords:
    """Journal lines kept back until the data they name is synced.

    The blocks are written already, to slots that were durably free.  The lines become one group
    of the journal: a later group's number would prove that the former was synced.

    Attributes
    ----------
    writer : LineWriter
        The lines.
    group : int
        Number of the first record, and so of the group; 0 while there is none.
    containers : set of int
        Containers to sync before the lines are appended.
    blocks, value_bytes : int
        What was acknowledged and would be lost by a crash now.
    """

    writer: LineWriter = field(default_factory=LineWriter)
    group: int = 0
    containers: set[int] = field(default_factory=set)
    blocks: int = 0
    value_bytes: int = 0

    def is_full(self) -> bool:
        """Say whether no further group may be held."""
        return len(self.writer) >= HELD_LINE_BYTES or len(self.containers) >= HELD_CONTAINERS
