"""The rules by their names on the command line, and what they rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvd.policy.value import ValueRule


class Ranked(Protocol):
    """What a rule ranks. The lowest rank leaves first.

    Attributes
    ----------
    rank : float
        Never falls between `stored` and the entry's end.
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
    """Gives ranks. One rule serves one cache, from one thread at a time."""

    def stored(self, item: Ranked) -> None:
        """Rank an entry that comes in."""

    def used(self, item: Ranked) -> None:
        """Rank an entry that is read."""

    def left(self, item: Ranked) -> None:
        """Learn that an entry was evicted."""


class LruRule:
    """Least recently used first."""

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


POLICIES = ("value", "lru", "fifo")
DEFAULT_POLICY = "value"


def make_rule(
    name: str,
    capacity: int,
    *,
    half_life_s: float | None = None,
    clock: Callable[[], float] | None = None,
) -> Rule:
    """Return a fresh rule.

    Parameters
    ----------
    name : {"value", "lru", "fifo"}
    capacity : int
        Entries the cache holds.
    half_life_s, clock
        Of `value`: seconds in which an unused entry loses half its worth, by this clock.

    Raises
    ------
    ValueError
        For another name.
    """
    if name == "lru":
        return LruRule()
    if name == "fifo":
        return FifoRule()
    if name == "value":
        return ValueRule(capacity, half_life_s=half_life_s, clock=clock)
    raise ValueError(f"no eviction policy {name!r}; the policies are {', '.join(POLICIES)}")
