"""Write-back: which blocks go to the long tier, on which path, and what becomes of them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from kvd.admission import SecondHit
from kvd.block import Block, Retention
from kvd.expiry import suits
from kvd.expiry_limits import ExpiryLimits
from kvd.long_paths import LongPaths
from kvd.long_tier import LongTier
from kvd.long_values import Outcome
from kvd.memory_tier import MemoryTier
from kvd.namespaces import NamesFile, Namespaces
from kvd.write_budget import WriteBudget
from kvd.write_lane import WriteLane

logger = logging.getLogger(__name__)


NOT_ADMITTED = "not_admitted"
PATH_AWAY = "path_away"


class WriteBack:
    """The queues to the long tier, one a path. Event loop only.

    Parameters
    ----------
    memory, long_paths, namespaces
        Where blocks come from, go to, and whose names must be on disk before them.
    max_queue_bytes : int
        Bound of what is queued and in flight, each path an equal share of it.
    admission : SecondHit, optional
        Says which blocks are written; by default all.
    budget : WriteBudget, optional
        Bounds what is written in a second.
    flush_interval_s : float
        How long a group that is not full waits for more blocks; a FLUSH waits for nothing.
    """

    def __init__(
        self,
        memory: MemoryTier,
        long_paths: LongPaths,
        namespaces: Namespaces,
        max_queue_bytes: int,
        *,
        admission: SecondHit | None = None,
        budget: WriteBudget | None = None,
        flush_interval_s: float = 0.0,
    ) -> None:
        self.memory = memory
        self._long = long_paths
        self._namespaces = namespaces
        self.admission = admission
        self.budget = budget or WriteBudget(0)
        self.flush_interval_s = flush_interval_s
        share = max(memory.arena.geometry.slab_bytes, max_queue_bytes // len(long_paths.tiers))
        self._lanes = {tier: WriteLane(self, tier, share) for tier in long_paths.tiers}
        self.lanes: Sequence[WriteLane] = list(self._lanes.values())
        self.limits = ExpiryLimits(long_paths, namespaces.limits)
        self.on_durable: Callable[[Block], None] = lambda block: None

    @property
    def queue_blocks(self) -> int:
        """Return how many blocks wait."""
        return sum(lane.queue_blocks for lane in self.lanes)

    @property
    def queue_bytes(self) -> int:
        """Return the bytes of what waits and what is in flight."""
        return sum(lane.queue_bytes for lane in self.lanes)

    @property
    def in_flight_blocks(self) -> int:
        """Return how many blocks are at a writer."""
        return sum(lane.in_flight_blocks for lane in self.lanes)

    @property
    def idle(self) -> bool:
        """Return whether nothing waits and nothing is in flight."""
        return all(lane.idle for lane in self.lanes)

    @property
    def reads_wait(self) -> bool:
        """Return whether lookups wait for a disk."""
        return bool(self._long.reads_waiting)

    def stalled(self) -> bool:
        """Return whether a path makes no progress, so that dirty blocks must give way."""
        up = [lane for lane in self.lanes if lane.tier.is_up]
        return not up or any(lane.stalled for lane in up)

    def _lane(self, disk_key: bytes) -> WriteLane | None:
        tier = self._long.home(disk_key)
        return None if tier is None else self._lanes[tier]

    # -- in ------------------------------------------------------------------------------------

    def admit(self, block: Block) -> None:
        """Decide on a block that was just stored, before it is offered."""
        if self.admission is not None and block.retention >= Retention.SHORT:
            block.admitted = self.admission.stored(block)
            if not block.admitted:
                self.memory.place(block)

    def admit_now(self, block: Block) -> None:
        """Note that a block was stored or used again."""
        if not block.admitted:
            block.admitted = True
            if self.admission is not None:
                self.admission.forget(block)
            if not block.writing:
                self.memory.place(block)

    def refusal(self, block: Block) -> str | None:
        """Return why a block will not be written as things stand, or None."""
        if not block.admitted:
            return NOT_ADMITTED
        lane = self._lane(block.disk_key)
        if lane is None or not lane.tier.is_up:
            return PATH_AWAY
        return None

    def offer(self, block: Block, *, anyway: bool = False) -> bool:
        """Queue a block, safe from eviction from now on; False when it is not taken.

        `anyway` ignores the queue's bound, for the drain, which adds nothing else.
        """
        if block.writing:
            return True
        if not block.admitted:
            return False
        lane = self._lane(block.disk_key)
        if lane is None or not lane.tier.is_up:
            self.excuse(block)
            return False
        return lane.offer(block, anyway=anyway)

    def excuse(self, block: Block) -> None:
        """Let a block leave memory like a clean one, until it is stored or used again."""
        if block.admitted:
            block.admitted = False
            self.memory.place(block)

    def touch(self, key: bytes) -> None:
        """Note the use of a key (as on disk): recency on the long tier, and admission."""
        self.touch_path(key)
        if self.admission is not None:
            block = self.admission.used(key)
            if block is not None:
                self.admit_now(block)
                if block.retention is Retention.LONG:
                    self.offer(block)

    def touch_path(self, key: bytes) -> None:
        """Refresh the recency of a key on the long tier, lazily."""
        lane = self._lane(key)
        if lane is not None:
            lane.touch(key)

    def hurry(self) -> None:
        """Write what is queued now without waiting for groups to fill."""
        if self.flush_interval_s:
            for lane in self.lanes:
                lane.hurry()

    def tick(self) -> None:
        """Do what is due now and then."""
        for lane in self.lanes:
            lane.tick()

    # -- names ---------------------------------------------------------------------------------

    def take_names(self, tier: LongTier, blocks: Sequence[Block]) -> NamesFile | None:
        """Return the names that have to be on a path before these blocks are, or None."""
        return self._namespaces.take_unsaved({block.namespace for block in blocks}, tier.directory)

    def names_unsaved(self, tier: LongTier) -> None:
        """Note that names could not be written there."""
        self._namespaces.put_back(tier.directory)

    def save_names(self, tier: LongTier, names: NamesFile) -> None:
        """Write names to a path. Disk call: for the writer's thread."""
        self._namespaces.save(names, tier.directory)

    # -- out -----------------------------------------------------------------------------------

    def land(self, block: Block, outcome: Outcome, expires_ns: int, reason: str) -> None:
        """Take a block back from the writer, which wrote it to expire at `expires_ns`.

        One removed meanwhile only gives its slot back.
        """
        gone = block.gone
        self.memory.landed(block)
        if outcome is Outcome.DURABLE and len(self.lanes) == 1:
            # With several paths an older copy may lie elsewhere: `shorten` looks.
            self.limits.settle(block.disk_key, expires_ns)
        if gone:
            # If it was deleted, the deletion waits behind this write; if it expired, then the
            # copy on disk does too.
            block.resolve(None)
            return
        if outcome is Outcome.DURABLE:
            block.durable = suits(expires_ns, block.expires_ns)
            again = not block.durable and block.retention is Retention.LONG
            if again and self.offer(block, anyway=True):
                # Refreshed meanwhile: nobody hears that it is durable before that is.
                return
            self.memory.place(block)
            block.resolve(True)
            self.on_durable(block)
            return
        if outcome is not Outcome.CORRUPT:
            self.dropped(block, reason)
            return
        block.durable = False
        self._long.counters.drop("corrupt")
        block.resolve(False)
        self.memory.counters.corrupt += 1
        self.memory.remove(block)
        logger.error(
            "a block of %r changed in memory after its COMMIT and was thrown away: some "
            "client writes where it must not",
            block.namespace.name,
        )

    def dropped(self, block: Block, reason: str) -> None:
        """Keep a dropped block for what it is worth: offered again, nothing would change."""
        block.durable = False
        self._long.counters.drop(reason)
        block.resolve(False)
        block.retention = Retention.EPHEMERAL
        self.memory.place(block)

    # -- the end -------------------------------------------------------------------------------

    async def drain(self, timeout_s: float) -> int:
        """Write every dirty block, the most valuable first; return how many were left behind.

        Long ones go before short ones, and those of the highest rank before the others.
        """
        deadline = time.monotonic() + timeout_s
        # What found the queue full came later than what is in it.
        aside = [lane.set_aside() for lane in self.lanes]
        for retention in (Retention.LONG, Retention.SHORT):
            for block in reversed(self.memory.dirty_blocks(retention)):
                self.offer(block, anyway=True)
        for lane, queued in zip(self.lanes, aside, strict=True):
            lane.put_in_order(queued)
            lane.hurry()
        while not self.idle and time.monotonic() < deadline and self._long.failure is None:
            pending = [task for lane in self.lanes for task in lane.tasks]
            left_s = max(0.0, deadline - time.monotonic())
            if not pending:
                # Held back by the write budget.
                await asyncio.sleep(min(0.01, left_s))
                continue
            await asyncio.wait(pending, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        touches = [call for lane in self.lanes for call in lane.send_touches_now()]
        if touches:
            await asyncio.wait(touches, timeout=max(0.0, deadline - time.monotonic()))
        await self.limits.drain(deadline - time.monotonic())
        left = self.queue_blocks + self.in_flight_blocks
        self._long.counters.drop("stopped", left)
        return left
