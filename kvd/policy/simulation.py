"""Replays requests against a rule alone: what a cache of so many blocks would have hit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from tablespace.policy import RankedCache

from kvd.policy.rules import make_rule


class Row(msgspec.Struct, frozen=True):
    """One simulated cache, as ``kvd size --json`` prints it."""

    policy: str
    capacity_blocks: int
    requested_blocks: int
    leading_hits: int
    hit_ratio: float


class Simulation:
    """A cache of `capacity_blocks` blocks under one rule.

    Notes
    -----
    A request's blocks are looked up in order, an absent one is inserted at once. Leading hits
    are those before the request's first miss: what an engine can use.
    """

    def __init__(self, policy: str, capacity_blocks: int) -> None:
        if capacity_blocks < 1:
            raise ValueError(f"a cache of {capacity_blocks} blocks holds nothing; give more")
        self.policy = policy
        self.capacity_blocks = capacity_blocks
        self.requested_blocks = 0
        self.hits = 0
        self.leading_hits = 0
        self._cache = RankedCache(capacity_blocks, make_rule(policy, capacity_blocks))

    def play(self, hash_ids: Sequence[int]) -> int:
        """Play one request and return its leading hits."""
        hits, leading = self._cache.play(hash_ids)
        self.hits += hits
        self.requested_blocks += len(hash_ids)
        self.leading_hits += leading
        return leading

    def row(self) -> Row:
        """Return what happened so far."""
        ratio = self.leading_hits / max(1, self.requested_blocks)
        return Row(
            self.policy,
            self.capacity_blocks,
            self.requested_blocks,
            self.leading_hits,
            round(ratio, 6),
        )


def simulate(policy: str, capacity_blocks: int, requests: Iterable[Sequence[int]]) -> Row:
    """Play all requests, each a sequence of hash ids, and return the row."""
    simulation = Simulation(policy, capacity_blocks)
    for hash_ids in requests:
        simulation.play(hash_ids)
    return simulation.row()


def distinct_blocks(requests: Iterable[Sequence[int]]) -> int:
    """Return how many different blocks the requests name."""
    return len({hash_id for hash_ids in requests for hash_id in hash_ids})
