"""Write-back: blocks queued for the long tier, written in groups, behind reads."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

from kvd.arena import release
from kvd.block import Block, Retention
from kvd.expiry import suits, to_metadata
from kvd.expiry_limits import ExpiryLimits
from kvd.long_tier import LongTier, Outcome, WriteItem
from kvd.memory_tier import MemoryTier
from kvd.namespaces import NamesFile, Namespaces
from tablespace import ClosedError, FailedError

GROUP_BLOCKS = 64  # One commit. Measured: beyond it the syncs cost little of a group's time.
GROUP_BLOCKS_WHILE_READING = 16  # A read then waits for a quarter of that.
MAX_GROUPS = 4  # At the writer at once: it never idles, and at most 256 blocks wait there.
STALL_S = 2.0  # A group takes milliseconds; a disk this long silent is not worth waiting for.
COMPLAIN_S = 10.0  # A full disk would otherwise fill the log as well.
TOUCH_INTERVAL_S = 0.05
MAX_TOUCHES = 65536  # 100 bytes each; more than one interval of any client.

logger = logging.getLogger(__name__)


class WriteBack:
    """The queue to the long tier. Event loop only.

    Parameters
    ----------
    memory, long_tier, namespaces
        Where blocks come from, go to, and whose names must be on disk before them.
    max_queue_bytes : int
        Bound of what is queued and in flight, none of which can be evicted. A block that finds
        it full stays dirty in memory and is taken in when there is room, unless it had to be
        evicted before, as when the disk stalls: then it is counted dropped.
    """

    def __init__(
        self,
        memory: MemoryTier,
        long_tier: LongTier,
        namespaces: Namespaces,
        max_queue_bytes: int,
    ) -> None:
        self._memory = memory
        self._long = long_tier
        self._namespaces = namespaces
        self._max_queue_bytes = max_queue_bytes
        self._queue: deque[tuple[Block, float]] = deque()
        self.queue_bytes = 0
        self.in_flight_blocks = 0
        self._groups = 0
        self._progress_at = 0.0
        self._complain_after = 0.0
        self._pump_due = False
        self._touched: dict[bytes, None] = {}
        self._touch_timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.limits = ExpiryLimits(long_tier, namespaces.limits)
        self.on_durable: Callable[[Block], None] = lambda block: None

    @property
    def queue_blocks(self) -> int:
        """Return how many blocks wait."""
        return len(self._queue)

    @property
    def idle(self) -> bool:
        """Return whether nothing waits and nothing is in flight."""
        return not self._queue and not self._groups

    def stalled(self) -> bool:
        """Return whether the disk makes no progress, so that dirty blocks must give way."""
        if self._long.failure is not None:
            return True
        return bool(self._groups) and time.monotonic() - self._progress_at > STALL_S

    def offer(self, block: Block, *, anyway: bool = False) -> bool:
        """Queue a block, safe from eviction from now on; False when the queue is full.

        `anyway` ignores the bound, for the drain, which adds nothing else.
        """
        if block.writing:
            return True
        if self._long.failure is not None:
            return False
        if self.queue_bytes + block.length > self._max_queue_bytes and not anyway:
            return False
        block.writing = True
        self._memory.protect(block)
        self._queue.append((block, time.monotonic()))
        self.queue_bytes += block.length
        if not self._pump_due:
            # After the current handler: its other blocks join the same group.
            self._pump_due = True
            asyncio.get_running_loop().call_soon(self._pump)
        return True

    def touch(self, key: bytes) -> None:
        """Refresh the recency of a key (as on disk) on the long tier too, lazily."""
        self._touched.pop(key, None)
        if len(self._touched) < MAX_TOUCHES:
            self._touched[key] = None
        if self._touch_timer is None:
            self._touch_timer = asyncio.get_running_loop().call_later(
                TOUCH_INTERVAL_S, self._send_touches
            )

    async def drain(self, timeout_s: float) -> int:
        """Write every dirty block, long ones first, and return how many were left behind."""
        deadline = time.monotonic() + timeout_s
        for retention in (Retention.LONG, Retention.SHORT):
            for block in reversed(self._memory.dirty_blocks(retention)):
                self.offer(block, anyway=True)
        while not self.idle and time.monotonic() < deadline and self._long.failure is None:
            pending = list(self._tasks)
            if not pending:
                await asyncio.sleep(0)
                continue
            await asyncio.wait(
                pending,
                timeout=max(0.0, deadline - time.monotonic()),
                return_when=asyncio.FIRST_COMPLETED,
            )
        await self.limits.drain(deadline - time.monotonic())
        left = len(self._queue) + self.in_flight_blocks
        self._long.counters.dropped += left
        return left

    def _pump(self) -> None:
        self._pump_due = False
        while self._groups < MAX_GROUPS and self._queue:
            if self._groups and len(self._queue) < GROUP_BLOCKS:
                # The writer is busy anyway: a fuller group costs the same two syncs.
                break
            group = self._take_group()
            if not group:
                continue
            names = self._namespaces.take_unsaved({block.namespace for block, _ in group})
            touched, self._touched = list(self._touched), {}
            if not self._groups:
                self._progress_at = time.monotonic()
            self._groups += 1
            self.in_flight_blocks += len(group)
            task = asyncio.create_task(self._write(group, touched, names))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _take_group(self) -> list[tuple[Block, float]]:
        size = GROUP_BLOCKS_WHILE_READING if self._long.reads_waiting else GROUP_BLOCKS
        group: list[tuple[Block, float]] = []
        while self._queue and len(group) < size:
            block, queued_at = self._queue.popleft()
            if block.gone:
                self.queue_bytes -= block.length
                self._memory.landed(block)
            else:
                group.append((block, queued_at))
        return group

    async def _write(
        self, group: list[tuple[Block, float]], touched: list[bytes], names: NamesFile | None
    ) -> None:
        outcomes = [Outcome.DROPPED] * len(group)
        expiries = [block.expires_ns for block, _ in group]
        views: list[memoryview] = []
        try:
            # Whatever goes wrong, in here or in the engine, costs this group and nothing else.
            # One removed since the group was made is not written: its deletion is asked for
            # already, and would not be done after this.
            wanted = [at for at, (block, _) in enumerate(group) if not block.gone]
            blocks = [group[at][0] for at in wanted]
            views += [self._memory.arena.view(block.slot, block.length) for block in blocks]
            items = [
                WriteItem(
                    block.disk_key,
                    view,
                    block.checksum,
                    to_metadata(block.expires_ns),
                    block.position,
                )
                for block, view in zip(blocks, views, strict=True)
            ]
            written = await self._long.on_writer(self._write_blocking, items, touched, names)
            for at, outcome in zip(wanted, written, strict=True):
                outcomes[at] = outcome
        except Exception as error:
            self._fail(error)
            if names is not None:
                self._namespaces.put_back()
        finally:
            release(views)
            self._groups -= 1
            self.in_flight_blocks -= len(group)
            self._progress_at = time.monotonic()
            self._long.write_latency.add(self._progress_at - group[0][1])
            for (block, _), outcome, expires_ns in zip(group, outcomes, expiries, strict=True):
                self._land(block, outcome, expires_ns)
        self._refill()
        self._pump()

    def _write_blocking(
        self, items: list[WriteItem], touched: list[bytes], names: NamesFile | None
    ) -> list[Outcome]:
        if names is not None:
            self._namespaces.save(names)
        return self._long.write(items, touched)

    def _land(self, block: Block, outcome: Outcome, expires_ns: int) -> None:
        """Take a block back from the writer, which wrote it to expire at `expires_ns`.

        One removed meanwhile only gives its slot back.
        """
        gone = block.gone
        self.queue_bytes -= block.length
        self._memory.landed(block)
        if outcome is Outcome.DURABLE:
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
            self._memory.place(block)
            block.resolve(True)
            self.on_durable(block)
            return
        block.durable = False
        self._long.counters.dropped += 1
        block.resolve(False)
        if outcome is Outcome.CORRUPT:
            self._memory.counters.corrupt += 1
            self._memory.remove(block)
            logger.error(
                "a block of %r changed in memory after its COMMIT and was thrown away: some "
                "client writes where it must not",
                block.namespace.name,
            )
            return
        self._keep_in_memory_only(block)

    def _keep_in_memory_only(self, block: Block) -> None:
        """Keep a dropped block for what it is worth: offered again, nothing would change."""
        block.retention = Retention.EPHEMERAL
        self._memory.place(block)

    def _give_up(self) -> None:
        """Drop whatever waits for a disk that failed for good: a FLUSH must not wait for it."""
        waiting = [block for block, _ in self._queue]
        self._queue.clear()
        for block in waiting:
            self.queue_bytes -= block.length
            self._memory.landed(block)
        waiting += self._memory.dirty_blocks(Retention.LONG)
        for block in waiting:
            if block.gone:
                continue
            block.durable = False
            self._long.counters.dropped += 1
            block.resolve(False)
            self._keep_in_memory_only(block)

    def _refill(self) -> None:
        """Queue blocks that found the queue full."""
        while True:
            block = self._memory.oldest_dirty_long()
            if block is None or not self.offer(block):
                return

    def _send_touches(self) -> None:
        self._touch_timer = None
        if not self._touched:
            return
        touched, self._touched = list(self._touched), {}
        task = asyncio.create_task(self._touch(touched))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _touch(self, keys: list[bytes]) -> None:
        try:
            await self._long.on_writer(self._long.touch, keys)
        except Exception as error:
            logger.debug("recency was not refreshed: %s", error)

    def _fail(self, error: Exception) -> None:
        """Say that a group was not written, and stop for good if the region said so."""
        if isinstance(error, FailedError | ClosedError):
            if self._long.failure is None:
                self._long.failure = f"{type(error).__name__}: {error}"
                logger.error(
                    "the long tier failed and takes no more blocks until the daemon is "
                    "restarted: %s. What it holds is still served",
                    self._long.failure,
                )
                self._give_up()
            return
        now = time.monotonic()
        if now >= self._complain_after:
            self._complain_after = now + COMPLAIN_S
            logger.error("blocks are dropped, the long tier did not take them: %s", error)
