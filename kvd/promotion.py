"""Promotion: blocks of the long tier read straight into arena slots, once however many ask."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

from kvd.arena import release
from kvd.block import Block, Retention
from kvd.expiry import boot_clock_ns
from kvd.long_paths import LongPaths, Source
from kvd.long_tier import LongTier
from kvd.long_values import ReadValue
from kvd.memory_tier import NO_SLOT, MemoryTier
from kvd.namespaces import Namespace

READ_BLOCKS = 64  # One read call; longer lookups are spread over the reading threads.
LOOSE_BYTES = 16 << 20  # What one lookup may carry inline when memory has no slot for it.
MAX_LOOSE_BYTES = 64 << 20  # What all lookups may read so at a time; beyond it they miss.

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Promotion:
    """One block on its way into memory.

    Attributes
    ----------
    generation : int
        The namespace's, when the read began; another one at publishing time voids it.
    void : bool
        Its key was deleted or stored anew meanwhile.
    position : int
        Of its key in the lookup that began it.
    slot : int
        Where it goes; NO_SLOT until there is one.
    room : int
        How many bytes it needs there.
    block : Block or None
        The result.
    """

    namespace: Namespace
    key: bytes
    source: Source
    slot: int
    room: int
    generation: int
    position: int = 0
    void: bool = False
    block: Block | None = None
    task: asyncio.Task[None] | None = None


@dataclass(frozen=True)
class Loose:
    """A block read past memory, which had no slot for it: sent inline."""

    value: bytes
    checksum: int


class Promoter:
    """Single-flight reads from the long tier. Event loop only.

    A read that takes longer than the tier's `timeout_s` is a miss for the asker, and still
    promotes; its slots stay out of use until it ends.
    """

    def __init__(self, memory: MemoryTier, long_paths: LongPaths) -> None:
        self._memory = memory
        self._long = long_paths
        self._flying: dict[tuple[int, bytes], Promotion] = {}
        self._stranded: list[tuple[int, memoryview]] = []
        self._loose_bytes = 0

    def void(self, namespace: Namespace, key: bytes) -> None:
        """Make sure that a read under way for a key publishes nothing."""
        promotion = self._flying.pop((namespace.id, key), None)
        if promotion is not None:
            promotion.void = True

    async def fetch(
        self, namespace: Namespace, keys: list[bytes], *, loose: bool = True
    ) -> list[Block | Loose | None]:
        """Return the blocks of keys that memory did not have, promoted; None for a miss.

        Without `loose`, those that memory has no slot for are not read.
        """
        self._long.reads_waiting += 1
        try:
            return await self._fetch(namespace, keys, loose)
        finally:
            self._long.reads_waiting -= 1

    async def _fetch(
        self, namespace: Namespace, keys: list[bytes], loose_too: bool
    ) -> list[Block | Loose | None]:
        generation = namespace.generation
        deadline = time.monotonic() + self._long.timeout_s
        on_disk = await self._present(namespace, keys, deadline)
        rooms = await self._rooms(namespace, keys, on_disk, deadline)
        found: list[Block | Promotion | None] = []
        fresh: list[Promotion] = []
        try:
            for position, (key, source, room) in enumerate(zip(keys, on_disk, rooms, strict=True)):
                # Everything may have changed while the index was asked.
                current = self._memory.find(namespace, key)
                flying = self._flying.get((namespace.id, key))
                if current is not None:
                    found.append(current)
                elif flying is not None:
                    # A read that hangs is not waited for by everybody who comes after.
                    hangs = flying.source.progress.stands_still(self._long.timeout_s)
                    found.append(None if hangs else flying)
                elif (
                    source is not None
                    and namespace.generation == generation
                    and namespace.disk_counts(key)
                ):
                    promotion = Promotion(
                        namespace, key, source, NO_SLOT, room, generation, position
                    )
                    self._flying[namespace.id, key] = promotion
                    fresh.append(promotion)
                    found.append(promotion)
                else:
                    found.append(None)
            roomless = self._give_slots(fresh)
            for source, part in _by_source(fresh):
                task = asyncio.create_task(self._read(source, part))
                for promotion in part:
                    promotion.task = task
        except BaseException:
            for promotion in fresh:
                if promotion.slot == NO_SLOT:
                    self._take_off(promotion)
                elif promotion.task is None:
                    self._land(promotion, None)
            raise
        await self._wait(found, deadline)
        blocks: list[Block | Loose | None] = []
        for item in found:
            block = item.block if isinstance(item, Promotion) else item
            blocks.append(block if block is not None and not block.gone else None)
        if roomless and loose_too:
            where = [(promotion.position, promotion.source) for promotion in roomless]
            loose = asyncio.create_task(self._read_loose(namespace, keys, where, blocks))
            await asyncio.wait([loose], timeout=max(0.0, deadline - time.monotonic()))
            # What comes after the deadline must not change an answer that is under way.
            blocks = list(blocks)
        return blocks

    async def _read_loose(
        self,
        namespace: Namespace,
        keys: list[bytes],
        where: list[tuple[int, Source]],
        blocks: list[Block | Loose | None],
    ) -> None:
        """Read what memory had no slot for into fresh bytes, as many as may be."""
        slot_bytes = self._long.slot_bytes
        room = min(LOOSE_BYTES, MAX_LOOSE_BYTES - self._loose_bytes)
        # One that is larger than its share still goes, when nothing else does.
        where = where[: room // slot_bytes or (0 if self._loose_bytes else 1)]
        held_bytes = len(where) * slot_bytes
        self._loose_bytes += held_bytes
        try:
            for source in dict.fromkeys(source for _, source in where):
                positions = [position for position, other in where if other is source]
                await self._read_into(source, namespace, keys, positions, blocks)
        finally:
            self._loose_bytes -= held_bytes

    async def _read_into(
        self,
        source: Source,
        namespace: Namespace,
        keys: list[bytes],
        positions: list[int],
        blocks: list[Block | Loose | None],
    ) -> None:
        generation = namespace.generation
        buffers = [bytearray(self._long.slot_bytes) for _ in positions]
        views = [memoryview(buffer) for buffer in buffers]
        disk_keys = [namespace.prefix + keys[position] for position in positions]
        values = await self._read_values(source, disk_keys, views)
        if generation != namespace.generation:
            return
        for position, view, value in zip(positions, views, values, strict=True):
            if (
                value is not None
                and namespace.disk_counts(keys[position])
                and not 0 < value.expires_ns <= boot_clock_ns()
            ):
                blocks[position] = Loose(bytes(view[: value.length]), value.checksum)

    async def _present(
        self, namespace: Namespace, keys: list[bytes], deadline: float
    ) -> list[Source | None]:
        disk_keys = [namespace.prefix + key for key in keys]
        try:
            at_once = self._long.find_at_once(disk_keys, to_read=True)
            if at_once is not None:
                return at_once
            asked = self._long.find(disk_keys, to_read=True)
            return await asyncio.wait_for(asked, deadline - time.monotonic())
        except Exception as error:
            logger.warning("the long tier could not be asked: %s", error)
            return [None] * len(keys)

    async def _wait(self, found: list[Block | Promotion | None], deadline: float) -> None:
        tasks = {
            item.task for item in found if isinstance(item, Promotion) and item.task is not None
        }
        if tasks:
            await asyncio.wait(tasks, timeout=max(0.0, deadline - time.monotonic()))

    def _give_slots(self, fresh: list[Promotion]) -> list[Promotion]:
        """Reserve a slot for each promotion; take those off `fresh` that got none, return them."""
        slots = self._memory.reserve_many([each.room for each in fresh]) if fresh else []
        for promotion, slot in zip(fresh, slots, strict=True):
            promotion.slot = slot
        roomless = [each for each in fresh if each.slot == NO_SLOT]
        fresh[:] = [each for each in fresh if each.slot != NO_SLOT]
        for promotion in roomless:
            self._take_off(promotion)
        self._long.counters.promotions_no_room += len(roomless)
        return roomless

    async def _read(self, source: Source, promotions: list[Promotion]) -> None:
        started = time.monotonic()
        keys = [promotion.namespace.prefix + promotion.key for promotion in promotions]
        values: list[ReadValue | None] = [None] * len(promotions)
        views: list[memoryview] = []
        try:
            views += [
                self._memory.arena.view(
                    promotion.slot, self._memory.arena.slot_bytes_of(promotion.slot)
                )
                for promotion in promotions
            ]
            values = await self._read_values(source, keys, views)
        finally:
            held = {id(view) for view in release(views)}
            for position, (promotion, value) in enumerate(zip(promotions, values, strict=True)):
                if position < len(views) and id(views[position]) in held:
                    self._strand(promotion, views[position])
                else:
                    self._land(promotion, value)
        self._long.promotion_latency.add(time.monotonic() - started)
        now = boot_clock_ns()
        expired = [
            key
            for key, value in zip(keys, values, strict=True)
            if value is not None and 0 < value.expires_ns <= now
        ]
        if expired and isinstance(source, LongTier):
            await self._delete_expired(source, expired)

    def _strand(self, promotion: Promotion, view: memoryview) -> None:
        """Keep a slot out of use that the disk may still write into."""
        self._take_off(promotion)
        self._memory.quarantine(promotion.slot)
        self._stranded.append((promotion.slot, view))

    def reclaim(self) -> None:
        """Take slots back into use that the engine has let go of since its call failed."""
        stranded, self._stranded = self._stranded, []
        for slot, view in stranded:
            if release([view]):
                self._stranded.append((slot, view))
            else:
                self._memory.end_quarantine(slot)

    async def _delete_expired(self, tier: LongTier, keys: list[bytes]) -> None:
        try:
            await tier.on_writer(tier.delete_expired, keys)
        except Exception as error:
            logger.debug("%d expired blocks stay on disk: %s", len(keys), error)

    async def _read_values(
        self, source: Source, keys: list[bytes], views: list[memoryview]
    ) -> list[ReadValue | None]:
        try:
            return await source.on_reader(source.read, keys, views)
        except Exception as error:
            logger.warning("reading %d blocks failed: %s", len(keys), error)
            self._long.counters.reads_failed += len(keys)
            return [None] * len(keys)

    async def _rooms(
        self,
        namespace: Namespace,
        keys: list[bytes],
        sources: list[Source | None],
        deadline: float,
    ) -> list[int]:
        """Return how many bytes each value needs in memory, with what was not found as nothing."""
        rooms = [0] * len(keys)
        for source in dict.fromkeys(each for each in sources if each is not None):
            where = [position for position, each in enumerate(sources) if each is source]
            disk_keys = [namespace.prefix + keys[position] for position in where]
            if isinstance(source, LongTier):
                found = source.rooms_for(disk_keys)
            else:
                # Its index may have to be brought up to date, over a network.
                try:
                    asked = source.on_index(source.rooms_for, disk_keys)
                    found = await asyncio.wait_for(asked, deadline - time.monotonic())
                except Exception as error:
                    logger.warning("%s could not be asked: %s", source.directory, error)
                    found = []
                    for position in where:
                        sources[position] = None
            for position, room in zip(where, found, strict=False):
                rooms[position] = room
        return rooms

    def _take_off(self, promotion: Promotion) -> None:
        where = (promotion.namespace.id, promotion.key)
        if self._flying.get(where) is promotion:
            del self._flying[where]

    def _land(self, promotion: Promotion, value: ReadValue | None) -> None:
        namespace, key = promotion.namespace, promotion.key
        self._take_off(promotion)
        current = self._memory.find(namespace, key)
        if (
            value is None
            or current is not None
            or promotion.void
            or promotion.generation != namespace.generation
            or not namespace.disk_counts(key)
            or 0 < value.expires_ns <= boot_clock_ns()
        ):
            self._memory.unreserve(promotion.slot)
            promotion.block = current
            return
        block = Block(
            namespace,
            key,
            promotion.slot,
            value.length,
            value.checksum,
            Retention.LONG,
            namespace.limited(key, value.expires_ns),
            promotion.position,
        )
        # Of a followed region too: it came from a disk, so its eviction costs no write.
        block.durable = True
        self._memory.publish(block, promoted=True)
        promotion.block = block
        if not isinstance(promotion.source, LongTier):
            promotion.source.hits += 1
        self._long.counters.blocks_promoted += 1
        self._long.counters.bytes_read += value.length


def _by_source(promotions: list[Promotion]) -> list[tuple[Source, list[Promotion]]]:
    """Cut promotions into read calls: one region each, and no more than one thread's share."""
    parts: list[tuple[Source, list[Promotion]]] = []
    for source in dict.fromkeys(promotion.source for promotion in promotions):
        own = [promotion for promotion in promotions if promotion.source is source]
        parts += [
            (source, own[first : first + READ_BLOCKS]) for first in range(0, len(own), READ_BLOCKS)
        ]
    return parts
