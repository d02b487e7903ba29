"""Fault plans: which operation fails, when, how, and for how long. A plan is a table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

KINDS = (
    "read",
    "write",
    "sync",
    "length",
    "reserve",
    "open",
    "rename",
    "link",
    "unlink",
    "names-sync",
    "make",
    "submit",
    "reap",
    "queue",
)


@dataclass(frozen=True)
class Fault:
    """One row of a plan.

    Attributes
    ----------
    kind : str
        Operation kind (`KINDS`); empty for any.
    nth : int
        Which one fails, counted from 1 among those that the row matches.
    errno : int
        The error it fails with; 0 for none.
    short : bool
        The transfer moves only a part (at least one byte where it can).
    delay : bool
        The transfer completes after all others.
    lose : bool
        The transfer takes place, or not, and its completion never comes: a wait for it ends with
        the queue's time limit, at once.
    lie : bool
        A sync is acknowledged and not done.
    interrupt : bool
        SIGINT is raised for the main thread as the operation ends.
    persistent : bool
        All from the nth on, rather than the nth alone.
    label : str
        Only operations on files whose first name holds this text.
    """

    kind: str
    nth: int = 1
    errno: int = 0
    short: bool = False
    delay: bool = False
    lose: bool = False
    lie: bool = False
    interrupt: bool = False
    persistent: bool = False
    label: str = ""

    def __post_init__(self) -> None:
        if self.kind and self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, not {self.kind!r}")


@dataclass
class FaultPlan:
    """Counts operations and says which of them fail.

    Attributes
    ----------
    rows : tuple of Fault
    met : int
        How many operations a fault was answered to.
    counts : list of int
        Operations matched so far, one number a row.
    """

    rows: tuple[Fault, ...]
    met: int = 0
    counts: list[int] = field(default_factory=list)

    def __init__(self, *rows: Fault | Iterable[Fault]) -> None:
        flat: list[Fault] = []
        for row in rows:
            flat.extend([row] if isinstance(row, Fault) else row)
        self.rows = tuple(flat)
        self.met = 0
        self.counts = [0] * len(flat)

    def meet(self, kind: str, label: str) -> Fault | None:
        """Count an operation; return the first row that makes it fail, or None."""
        found = None
        for at, row in enumerate(self.rows):
            if (row.kind and row.kind != kind) or row.label not in label:
                continue
            self.counts[at] += 1
            hit = self.counts[at] >= row.nth if row.persistent else self.counts[at] == row.nth
            if hit and found is None:
                found = row
        if found is not None:
            self.met += 1
        return found


def lying_disk(label: str = "") -> FaultPlan:
    """A disk that acknowledges every sync of matching files and does none of them."""
    return FaultPlan(Fault("sync", lie=True, persistent=True, label=label))
