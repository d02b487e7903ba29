"""Which prefixes can be restored where a model has other pools beside that of keys and values.

Policies are SGLang's: all pages of a prefix have to be there, or its last ones only.
"""

from __future__ import annotations

from collections.abc import Sequence

ALL_PAGES = "all_pages"
TRAILING_PAGES = "trailing_pages"


def leading(present: Sequence[bool]) -> int:
    """Return how many leading pages are there."""
    for at, there in enumerate(present):
        if not there:
            return at
    return len(present)


def restorable(present: Sequence[bool], policy: str, trailing: int) -> list[int]:
    """Return the lengths of prefixes that a pool's pages suffice for, rising.

    Parameters
    ----------
    present : sequence of bool
        For each page of the longest prefix, whether the pool has it.
    policy : str
        `ALL_PAGES` or `TRAILING_PAGES`.
    trailing : int
        How many last pages of a prefix are needed, under `TRAILING_PAGES`.
    """
    if policy == ALL_PAGES:
        return list(range(1, leading(present) + 1))
    found: list[int] = []
    run = 0
    for length, there in enumerate(present, 1):
        run = run + 1 if there else 0
        if run >= min(trailing, length):
            found.append(length)
    return found
