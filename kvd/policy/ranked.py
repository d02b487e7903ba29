"""What a rule ranks, and the two simple rules."""

from __future__ import annotations

from typing import Protocol


class Ranked(Protocol):
    """What a rule ranks. The lowest rank leaves first.

    Attributes
    ----------
    rank : float
        Set by `stored` and `used`.
    used_at : int
        The rule's reference number of the last use.
    reuses : int
        How often it was worth having, as far as the rule counts.
    identity : int
        A hash of its key, the same whenever it comes back.
    position : int
        How many blocks of its prompt lie before it, as far as known.
    fill : float
        Share of its slot that it fills, 0 to 1.
    """

    rank: float
    used_at: int
    reuses: int

    @property
    def identity(self) -> int: ...

    @property
    def position(self) -> int: ...

    @property
    def fill(self) -> float: ...


class Rule(Protocol):
    """Gives ranks. One rule serves one cache, from one thread at a time.

    Attributes
    ----------
    resolution : float
        Differences of rank that matter, per unit; 0: all, and the ranks are in order of time.
    """

    @property
    def resolution(self) -> float: ...

    def stored(self, item: Ranked) -> None:
        """Rank an entry that comes in."""

    def used(self, item: Ranked) -> None:
        """Rank an entry that is read."""

    def left(self, item: Ranked) -> None:
        """Learn that an entry was evicted."""


class LruRule:
    """Least recently used first."""

    resolution = 0.0

    def __init__(self) -> None:
        self._references = 0

    def stored(self, item: Ranked) -> None:
        """Rank an entry behind all others."""
        self.used(item)

    def used(self, item: Ranked) -> None:
        """Rank an entry behind all others."""
        self._references += 1
        item.used_at = self._references
        item.rank = float(self._references)

    def left(self, item: Ranked) -> None:
        """Remember nothing."""


class FifoRule(LruRule):
    """First stored first."""

    def stored(self, item: Ranked) -> None:
        """Rank an entry behind all others."""
        super().used(item)

    def used(self, item: Ranked) -> None:
        """Change nothing."""
