"""Write lanes: the blocks on their way to one path of the long tier, in groups, behind reads."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvd.arena import release
from kvd.block import Block, Retention
from kvd.expiry import to_metadata
from kvd.free_space import BelowFloorError
from kvd.long_tier import LongTier
from kvd.long_values import Outcome, PartlyWrittenError, WriteItem
from kvd.namespaces import NamesFile
from tablespace import ClosedError, FailedError

if TYPE_CHECKING:
    from kvd.write_back import WriteBack

GROUP_BLOCKS = 64  # One commit. Measured: beyond it the syncs cost little of a group's time.
GROUP_BLOCKS_WHILE_READING = 16  # A read then waits for a quarter of that.
MAX_GROUPS = 4  # At the writer at once: it never idles, and at most 256 blocks wait there.
STALL_S = 2.0  # A group takes milliseconds; a disk this long silent is not worth waiting for.
HELD_BACK_S = 1.0  # The write budget limits: room does not come within milliseconds.
COMPLAIN_S = 10.0  # A full disk would otherwise fill the log as well.
TOUCH_INTERVAL_S = 0.05
MAX_TOUCHES = 65536  # 100 bytes each; more than one interval of any client.

logger = logging.getLogger(__name__)


@dataclass
class Group:
    """Blocks written together, when each was queued, and when each expires as written."""

    blocks: list[Block]
    queued_at: list[float]
    expiries: list[int]
    views: list[memoryview]
    size_bytes: int
    names: NamesFile | None = None
    names_problem: OSError | None = None


class WriteLane:
    """The queue to one path. Event loop only.

    Parameters
    ----------
    owner : WriteBack
        Decides what becomes of a block that was written or dropped.
    tier : LongTier
        The path.
    max_queue_bytes : int
        Bound of what is queued and in flight, none of which can be evicted. A block that finds
        it full stays dirty in memory and is taken in when there is room, unless it had to be
        evicted before, as when the disk stalls: then it is counted dropped.
    """

    def __init__(self, owner: WriteBack, tier: LongTier, max_queue_bytes: int) -> None:
        self._owner = owner
        self.tier = tier
        self._memory = owner.memory
        self._max_queue_bytes = max_queue_bytes
        self._queue: deque[tuple[Block, float]] = deque()
        self._overflow: dict[Block, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._held_back_at = -HELD_BACK_S
        self._hurried = False
        self.queue_bytes = 0
        self.in_flight_blocks = 0
        self._groups = 0
        self._progress_at = 0.0
        self._bytes_put = 0
        self._complain_after = 0.0
        self._complain_of_names_after = 0.0
        self._pump_due = False
        self._touched: dict[bytes, None] = {}
        self._touch_timer: asyncio.TimerHandle | None = None
        self._touching = False
        self.tasks: set[asyncio.Task[None]] = set()

    @property
    def queue_blocks(self) -> int:
        """Return how many blocks wait."""
        return len(self._queue)

    @property
    def idle(self) -> bool:
        """Return whether nothing waits and nothing is in flight."""
        return not self._queue and not self._groups

    @property
    def stalled(self) -> bool:
        """Return whether dirty blocks must give way: no progress, or no budget to make any."""
        if not self.tier.is_up:
            return True
        now = time.monotonic()
        if now - self._held_back_at < HELD_BACK_S:
            return True
        return bool(self._groups) and now - self._progress_at > STALL_S

    # -- blocks --------------------------------------------------------------------------------

    def offer(self, block: Block, *, anyway: bool) -> bool:
        """Queue a block, safe from eviction from now on; False when the queue is full."""
        if not self.tier.is_up:
            return False
        if self.queue_bytes + block.length > self._max_queue_bytes and not anyway:
            if block.retention is Retention.LONG:
                self._overflow[block] = None
                if len(self._overflow) > 2 * self._memory.arena.slot_count:
                    self._overflow = {each: None for each in self._overflow if not each.gone}
            return False
        self._overflow.pop(block, None)
        block.writing = True
        self._memory.protect(block)
        self._queue.append((block, time.monotonic()))
        self.queue_bytes += block.length
        self._pump_soon()
        return True

    def set_aside(self) -> list[tuple[Block, float]]:
        """Take the queue apart for the drain, the block queued last first."""
        aside = list(reversed(self._queue))
        self._queue.clear()
        return aside

    def put_in_order(self, aside: list[tuple[Block, float]]) -> None:
        """Put what was set aside behind what came since, then long blocks before short ones."""
        waiting = [*self._queue, *aside]
        waiting.sort(key=lambda item: -item[0].retention)
        self._queue = deque(waiting)

    def hurry(self) -> None:
        """Hold no group back to be filled: somebody waits for what is queued now."""
        if self._queue:
            self._hurried = True
            self._pump_soon()

    def give_up(self) -> None:
        """Drop whatever waits for a path that is down: a FLUSH must not wait for it."""
        waiting = [block for block, _ in self._queue]
        self._queue.clear()
        for block in waiting:
            self.queue_bytes -= block.length
            self._memory.landed(block)
        overflow, self._overflow = self._overflow, {}
        for block in (*waiting, *overflow):
            if not block.gone and not block.writing and not block.durable:
                self._owner.dropped(block, "path_away")

    def tick(self) -> None:
        """Notice that the path went down otherwise than by a write."""
        if not self.tier.is_up and (self._queue or self._overflow):
            self.give_up()

    # -- recency -------------------------------------------------------------------------------

    def touch(self, key: bytes) -> None:
        """Refresh the recency of a key on the path too, lazily."""
        self._touched.pop(key, None)
        if len(self._touched) < MAX_TOUCHES:
            self._touched[key] = None
        self._touch_soon()

    def _send_touches(self) -> None:
        self._touch_timer = None
        if not self._touched or self._touching:
            # The writer is behind: what is used meanwhile goes in one piece, not in line.
            return
        touched, self._touched = list(self._touched), {}
        self._touching = True
        self._run(self._touch(touched))

    def send_touches_now(self) -> list[asyncio.Future[None]]:
        """Refresh what was touched last: the region is closed next. Return what to wait for."""
        if self._touch_timer is not None:
            self._touch_timer.cancel()
            self._touch_timer = None
        touched, self._touched = list(self._touched), {}
        if not touched or not self.tier.is_up:
            return []
        return [asyncio.ensure_future(self._touch(touched))]

    async def _touch(self, keys: list[bytes]) -> None:
        try:
            await self.tier.on_writer(self.tier.touch, keys)
        except Exception as error:
            logger.debug("recency was not refreshed: %s", error)
        finally:
            self._touching = False
            if self._touched:
                self._touch_soon()

    def _touch_soon(self) -> None:
        if self._touch_timer is None:
            self._touch_timer = asyncio.get_running_loop().call_later(
                TOUCH_INTERVAL_S, self._send_touches
            )

    # -- writing -------------------------------------------------------------------------------

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def _pump_soon(self) -> None:
        if not self._pump_due:
            # After the current handler: its other blocks join the same group.
            self._pump_due = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump_later(self, delay_s: float) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._timer_rang)

    def _timer_rang(self) -> None:
        self._timer = None
        self._pump()

    def _pump(self) -> None:
        self._pump_due = False
        while self._groups < MAX_GROUPS and self._queue:
            if not self.tier.is_up:
                self.give_up()
                return
            if len(self._queue) < GROUP_BLOCKS:
                if self._groups:
                    # The writer is busy anyway: a fuller group costs the same two syncs.
                    break
                age_s = time.monotonic() - self._queue[0][1]
                wait_s = self._owner.flush_interval_s - age_s
                if wait_s > 0 and not self._hurried:
                    self._pump_later(wait_s)
                    break
            wait_s = self._owner.budget.wait_s()
            if wait_s > 0:
                self._held_back_at = time.monotonic()
                self._pump_later(wait_s)
                break
            group = self._take_group()
            if group.blocks:
                self._send(group)
        if not self._queue:
            self._hurried = False

    def _take_group(self) -> Group:
        size = GROUP_BLOCKS_WHILE_READING if self._owner.reads_wait else GROUP_BLOCKS
        most_bytes = self._owner.budget.group_bytes
        group = Group([], [], [], [], 0)
        while self._queue and len(group.blocks) < size:
            block, queued_at = self._queue.popleft()
            if block.gone:
                self.queue_bytes -= block.length
                self._memory.landed(block)
                continue
            group.blocks.append(block)
            group.queued_at.append(queued_at)
            group.size_bytes += block.length
            if most_bytes is not None and group.size_bytes >= most_bytes:
                break
        return group

    def _send(self, group: Group) -> None:
        """Hand a group to the writer now, so that whatever is asked of it later comes later.

        A deletion that got there first would be undone by the write.
        """
        tier = self.tier
        group.names = self._owner.take_names(tier, group.blocks)
        touched, self._touched = list(self._touched), {}
        if not self._groups:
            self._progress_at = time.monotonic()
        self._groups += 1
        self.in_flight_blocks += len(group.blocks)
        self._owner.budget.spend(group.size_bytes)
        group.expiries += [block.expires_ns for block in group.blocks]
        call: asyncio.Future[list[Outcome]] | Exception
        try:
            arena = self._memory.arena
            group.views += [arena.view_at(block.offset, block.length) for block in group.blocks]
            items = [
                WriteItem(
                    block.disk_key,
                    view,
                    block.checksum,
                    to_metadata(block.expires_ns),
                    block.position,
                )
                for block, view in zip(group.blocks, group.views, strict=True)
            ]
            call = tier.on_writer(self._write_blocking, group, items, touched)
        except Exception as error:
            call = error
        self._run(self._finish(group, call))

    async def _finish(self, group: Group, call: asyncio.Future[list[Outcome]] | Exception) -> None:
        outcomes = [Outcome.DROPPED] * len(group.blocks)
        reason = "no_room"
        names_saved = False
        try:
            # Whatever goes wrong, in here or in the engine, costs this group and nothing else.
            if isinstance(call, Exception):
                raise call
            outcomes = await call
            names_saved = True
            self.tier.health.worked()
            self.tier.refusal = None
        except PartlyWrittenError as error:
            outcomes, names_saved = error.outcomes, True
            reason = self._fail(error.cause)
        except Exception as error:
            reason = self._fail(error)
            self.tier.refusal = self.tier.failure or str(error)
        finally:
            self._note_names(group, names_saved)
            release(group.views)
            self._groups -= 1
            self.in_flight_blocks -= len(group.blocks)
            self._progress_at = time.monotonic()
            self.tier.write_latency.add(self._progress_at - group.queued_at[0])
            put, self._bytes_put = self.tier.bytes_put - self._bytes_put, self.tier.bytes_put
            # What was there already, or was dropped, did not wear the disk.
            self._owner.budget.spend(put - group.size_bytes)
            for block, outcome, expires_ns in zip(
                group.blocks, outcomes, group.expiries, strict=True
            ):
                self.queue_bytes -= block.length
                self._owner.land(block, outcome, expires_ns, reason)
        if not self.tier.is_up:
            self.give_up()
        self._refill()
        self._pump()

    def _write_blocking(
        self, group: Group, items: list[WriteItem], touched: list[bytes]
    ) -> list[Outcome]:
        if group.names is not None:
            try:
                self._owner.save_names(self.tier, group.names)
            except OSError as error:
                # Blocks are found without it; the region has room of its own on a full disk.
                group.names_problem = error
        return self.tier.write(items, touched)

    def _note_names(self, group: Group, saved: bool) -> None:
        """Have names written with the next group that were not with this one."""
        if group.names is None:
            return
        problem = group.names_problem
        self.tier.names_problem = None if problem is None else str(problem)
        if saved and problem is None:
            return
        self._owner.names_unsaved(self.tier)
        now = time.monotonic()
        if problem is not None and now >= self._complain_of_names_after:
            self._complain_of_names_after = now + COMPLAIN_S
            logger.warning(
                "the names of namespaces are not written to %s: %s. Their blocks are; after a "
                "restart they have no name until a client asks for them",
                self.tier.directory,
                problem,
            )

    def _refill(self) -> None:
        """Queue blocks that found the queue full."""
        while self._overflow:
            block = next(iter(self._overflow))
            if block.gone or block.writing or block.durable:
                del self._overflow[block]
            elif not self.offer(block, anyway=False):
                return

    def _fail(self, error: Exception) -> str:
        """Say that a group was not written, stop if the region said so, return the reason."""
        if isinstance(error, FailedError | ClosedError):
            self.tier.fail(error)
            return "path_away"
        now = time.monotonic()
        if now >= self._complain_after:
            self._complain_after = now + COMPLAIN_S
            logger.error(
                "blocks are dropped, the long tier in %s did not take them: %s",
                self.tier.directory,
                error,
            )
        return "free_floor" if isinstance(error, BelowFloorError) else "write_error"
