"""Replays requests against a rule alone: what a cache of so many blocks would have hit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from kvd.policy.queue import EvictionQueue
from kvd.policy.rules import make_rule


class Row(msgspec.Struct, frozen=True):
    """One simulated cache, as ``kvd size --json`` prints it."""

    policy: str
    capacity_blocks: int
    requested_blocks: int
    leading_hits: int
    hit_ratio: float


class Entry:
    """A block of the simulated cache."""

    __slots__ = ("identity", "position", "rank", "reuses", "used_at")

    fill = 1.0

    def __init__(self, hash_id: int, position: int) -> None:
        self.identity = hash_id
        self.position = position
        self.rank = 0.0
        self.used_at = 0
        self.reuses = 0


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
        self._rule = make_rule(policy, capacity_blocks)
        self._entries: dict[int, Entry] = {}
        self._queue: EvictionQueue[Entry] = EvictionQueue()

    def play(self, hash_ids: Sequence[int]) -> int:
        """Play one request and return its leading hits."""
        rule, entries, queue = self._rule, self._entries, self._queue
        leading = None
        for position, hash_id in enumerate(hash_ids):
            entry = entries.get(hash_id)
            if entry is not None:
                self.hits += 1
                rule.used(entry)
                continue
            if leading is None:
                leading = position
            if len(entries) >= self.capacity_blocks:
                victim = queue.first()
                assert victim is not None
                queue.discard(victim)
                del entries[victim.identity]
                rule.left(victim)
            entry = Entry(hash_id, position)
            rule.stored(entry)
            entries[hash_id] = entry
            queue.add(entry)
        if leading is None:
            leading = len(hash_ids)
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
