"""The rules by their names on the command line."""

from __future__ import annotations

from collections.abc import Callable

from kvd.policy.ranked import FifoRule, LruRule, Rule
from kvd.policy.value import ValueRule

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
