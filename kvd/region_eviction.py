"""Eviction from one region: the policy it is opened with, and room made in the background."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tablespace.policy import FifoRule

from kvd.long_limits import DEFAULT_SLOT_BYTES
from kvd.policy.region_policy import RegionPolicy
from kvd.policy.rules import DEFAULT_POLICY, LONG_HALF_LIFE_S, make_rule

if TYPE_CHECKING:
    from kvd.long_values import WriteItem
    from tablespace import Store, StoreStats

MAX_REMEMBERED = 1 << 22
"""Entries that a region's policy remembers by at most: 64 to 128 bytes of memory each."""

STEP_BLOCKS = 256
"""Deleted at a time on the writing thread: writes go on in between."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvictionFlags:
    """How the long tier evicts.

    Attributes
    ----------
    policy : {"value", "lru", "fifo"}
    watermark : float
        Share of the slots in use at which room is made in the background; at 1 it never is, and
        writes make their own.
    ratio : float
        Share of what is in use then that goes.
    """

    policy: str = DEFAULT_POLICY
    watermark: float = 0.9
    ratio: float = 0.1


class RegionEviction:
    """Chooses what leaves a region. `step` is for the writing thread.

    Parameters
    ----------
    flags : EvictionFlags
    max_bytes : int
        Budget of the region: how much the policy has to know of.

    Attributes
    ----------
    max_bytes : int
        What the region has of that.
    """

    def __init__(self, flags: EvictionFlags, max_bytes: int) -> None:
        self.flags = flags
        self.max_bytes = max_bytes
        self._slot_bytes = DEFAULT_SLOT_BYTES
        self._targets: dict[int, int] = {}
        self._evictions = 0
        self._reclaimed_bytes = 0
        # Until it is opened: what a policy remembers takes memory by the size of the region.
        self.policy = RegionPolicy(FifoRule())

    def _fresh(self) -> RegionPolicy:
        capacity = min(MAX_REMEMBERED, max(1, self.max_bytes // self._slot_bytes))
        return RegionPolicy(make_rule(self.flags.policy, capacity, half_life_s=LONG_HALF_LIFE_S))

    def reopen(self, slot_sizes: Sequence[int]) -> RegionPolicy:
        """Return a policy that knows nothing, for a region about to be opened.

        The sizes of its slots, smallest first, may be unknown before; of several the middle one
        says for how many entries there may be: which of them will fill is not known.
        """
        if slot_sizes:
            self._slot_bytes = slot_sizes[len(slot_sizes) // 2]
        self._evictions, self._reclaimed_bytes = self.evictions, self.reclaimed_bytes
        self._targets.clear()
        self.policy = self._fresh()
        return self.policy

    @property
    def evictions(self) -> int:
        """Return how many entries left to make room, in the background or for a write."""
        return self._evictions + self.policy.evictions

    @property
    def reclaimed_bytes(self) -> int:
        """Return the bytes of their slots."""
        return self._reclaimed_bytes + self.policy.reclaimed_bytes

    def expect(self, items: Iterable[WriteItem]) -> None:
        """Tell the policy of blocks about to be written."""
        for item in items:
            self.policy.expect(item.key, item.position, len(item.view))

    def step(self, store: Store) -> bool:
        """Delete some entries where the watermark is passed; return whether more are to go."""
        if self.flags.watermark >= 1.0:
            return False
        stats = store.stats()
        if not self._targets:
            used_bytes = sum((pool.slots - pool.free) * pool.slot_bytes for pool in stats.pools)
            if used_bytes <= self.flags.watermark * self._room_bytes(stats):
                return False
            self._targets = {
                pool.slot_bytes: int((pool.slots - pool.free) * (1 - self.flags.ratio))
                for pool in stats.pools
            }
        for pool in stats.pools:
            excess = pool.slots - pool.free - self._targets.get(pool.slot_bytes, pool.slots)
            wanted = min(excess, STEP_BLOCKS)
            victims = self.policy.victims(pool.slot_bytes, wanted)[:wanted] if wanted > 0 else []
            # Where nothing goes, all that is in use is being read or written just now.
            if not victims or not store.evict_many(victims) or len(victims) == excess:
                self._targets.pop(pool.slot_bytes, None)
        # A pool whose last container another one took over is no more.
        sizes = {pool.slot_bytes for pool in stats.pools}
        self._targets = {size: left for size, left in self._targets.items() if size in sizes}
        return bool(self._targets)

    def _room_bytes(self, stats: StoreStats) -> int:
        """Return what all slots could hold: a pool has only those of containers it took so far."""
        if len(stats.pools) == 1:
            return stats.capacity * stats.slot_bytes
        return self.max_bytes
