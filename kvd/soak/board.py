"""The board: counters of every client in a file that all map, so that a kill loses none."""

from __future__ import annotations

import mmap
from enum import IntEnum
from pathlib import Path

WORD_BYTES = 8


class Cell(IntEnum):
    """One counter of a client's row. Of the first row, the soak's own, only two are used."""

    PAUSE = (
        0  # The soak: the number of the pause that is on, 0 for none. A client: the one it keeps.
    )
    STOP = 1  # The soak alone.
    CALLS = 2
    STORED = 3
    REFUSED = 4
    HITS = 5
    MISSES = 6
    LEASED = 7
    DELETED = 8
    UNAVAILABLE = 9
    CHECKED_BYTES = 10
    WRONG_BYTES = 11
    WRONG_BLOCKS = 12


class Board:
    """Rows of counters, one per client, each written by one process at a time.

    Parameters
    ----------
    path : pathlib.Path
        The file.
    rows : int, optional
        How many clients; makes the file anew. Without it the file is there.
    """

    def __init__(self, path: Path, rows: int | None = None) -> None:
        if rows is not None:
            path.write_bytes(bytes((rows + 1) * len(Cell) * WORD_BYTES))
        with open(path, "r+b") as file:
            self._words = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
        self.clients = len(self._words) // len(Cell) - 1

    def get(self, row: int, cell: Cell) -> int:
        """Return a counter; row 0 is the soak's."""
        return self._words[row * len(Cell) + cell]

    def put(self, row: int, cell: Cell, value: int) -> None:
        """Set a counter."""
        self._words[row * len(Cell) + cell] = value

    def add(self, row: int, cell: Cell, value: int = 1) -> None:
        """Raise a counter. Of a row for its one process."""
        self._words[row * len(Cell) + cell] += value

    def total(self, cell: Cell) -> int:
        """Return the sum over all clients."""
        return sum(self.get(row, cell) for row in range(1, self.clients + 1))
