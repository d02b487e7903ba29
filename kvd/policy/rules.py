"""The rules by their names on the command line."""

from __future__ import annotations

from collections.abc import Callable

from tablespace.policy import FifoRule, LruRule, Rule, ValueRule

POLICIES = ("value", "lru", "fifo")
DEFAULT_POLICY = "value"

LONG_HALF_LIFE_S = 86400.0
"""On the long tier a block unused for a day is worth half, however little traffic there was."""


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
