"""How much of a prompt's beginning kvd has, over all groups and ranks."""

from __future__ import annotations

from collections.abc import Sequence

from kvd import NamespaceHandle
from kvd_connectors.vllm.plan import Group, Plan

# Of each rank: where every group's blocks are kept.
Kept = Sequence[Sequence[tuple[NamespaceHandle, Group]]]


def leading_units(
    plan: Plan, kept: Kept, block_hashes: Sequence[bytes], first: int, last: int
) -> int:
    """Return how many units from the first on every rank and group can serve.

    Parameters
    ----------
    first, last : int
        Units to look at: what lies before the first is in the engine's cache.
    """
    found = last - first
    partial = []
    for groups in kept:
        for blocks, group in groups:
            if not found:
                return 0
            if group.is_partial:
                partial.append((blocks, group))
                continue
            each = plan.unit_tokens // group.block_tokens
            keys = group.keys(block_hashes, first * each, (first + found) * each)
            found = blocks.match_prefix(keys) // each
    if not partial or not found:
        return found
    runs = []
    for blocks, group in partial:
        each = plan.unit_tokens // group.block_tokens
        keys = group.keys(block_hashes, first * each, (first + found) * each)
        runs.append((group, each, _runs(blocks.exists(keys))))
    while found and not all(_serves(plan, *each, first, found) for each in runs):
        found -= 1
    return found


def _serves(plan: Plan, group: Group, each: int, runs: list[int], first: int, units: int) -> bool:
    """Say whether a group has what a hit of so many units needs of it."""
    end = (first + units) * each
    needed = end - max(group.first_needed((first + units) * plan.unit_tokens), first * each)
    return runs[end - first * each - 1] >= needed


def _runs(there: Sequence[bool]) -> list[int]:
    """Return for each place how many in a row, up to it, are there."""
    found: list[int] = []
    run = 0
    for each in there:
        run = run + 1 if each else 0
        found.append(run)
    return found
