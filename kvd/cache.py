"""The cache: what each request means for the two tiers.

Requests that memory can answer are plain calls; those that need the long tier are coroutines.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kvd import protocol
from kvd.admission import SecondHit
from kvd.block import Block
from kvd.errors import ProtocolError
from kvd.events import CLEARED, LONG, REMOVED, EventHub
from kvd.frames import MAX_FRAME_BYTES
from kvd.long_paths import LongPaths, Source
from kvd.long_tier import LongTier
from kvd.memory_tier import MemoryTier
from kvd.namespaces import Namespace, Namespaces
from kvd.prefetching import Prefetcher
from kvd.promotion import Loose, Promoter
from kvd.quotas import Quotas
from kvd.results import Cleared, Flushed, Location
from kvd.session import Session
from kvd.storing import CacheCounters, Storing
from kvd.write_back import WriteBack
from kvd.write_budget import WriteBudget
from tablespace import TablespaceError, checksum64

if TYPE_CHECKING:
    from typing_extensions import Buffer

# Slots kept within reach by writing short blocks ahead of their eviction.
REACH_SHARE = 8
MAX_REACH_SLOTS = 256
SWEEP_BLOCKS = 1024  # A tick's share of expired blocks: about a millisecond.
# Half a frame: what one reply may carry inline, with room for what the long tier adds.
MAX_INLINE_BYTES = MAX_FRAME_BYTES // 2

logger = logging.getLogger(__name__)


class Cache:
    """Both tiers behind one face. Event loop only.

    Parameters
    ----------
    memory : MemoryTier
        Always there.
    namespaces : Namespaces
        Identities.
    long_paths : LongPaths or None
        With the regions open that can be.
    admission, budget, flush_interval_s
        As `WriteBack` takes them.
    """

    def __init__(
        self,
        memory: MemoryTier,
        namespaces: Namespaces,
        long_paths: LongPaths | None,
        *,
        admission: SecondHit | None = None,
        budget: WriteBudget | None = None,
        flush_interval_s: float = 0.0,
    ) -> None:
        self.memory = memory
        self.namespaces = namespaces
        self.long = long_paths
        self.counters = CacheCounters()
        self.events = EventHub(memory)
        self._prefetcher: Prefetcher | None = None
        self.tiers = long_paths.tiers if long_paths is not None else []
        self.quotas = Quotas([tier.ledger for tier in self.tiers]) if self.tiers else None
        self.write_back: WriteBack | None = None
        self._promoter: Promoter | None = None
        if long_paths is not None:
            # Half the arena: the other half stays evictable whatever the disk does.
            queue_bytes = max(memory.arena.geometry.slab_bytes, memory.arena.data_bytes // 2)
            self.write_back = WriteBack(
                memory,
                long_paths,
                namespaces,
                queue_bytes,
                admission=admission,
                budget=budget,
                flush_interval_s=flush_interval_s,
            )
            self._promoter = Promoter(memory, long_paths)
            self._prefetcher = Prefetcher(self._promoter)
            self.write_back.on_durable = self.events.durable
            memory.may_drop_dirty = self.write_back.stalled
            memory.on_reserve = self._write_short_ahead
        self._reach_slots = min(MAX_REACH_SLOTS, max(1, memory.arena.slot_count // REACH_SHARE))
        self.storing = Storing(
            memory,
            namespaces,
            long_paths,
            self.write_back,
            self._promoter,
            self.counters,
            self.quotas,
        )

    # -- lookups -------------------------------------------------------------------------------

    def get(
        self, name: str, keys: list[bytes], inline: bool
    ) -> tuple[list[protocol.Hit | None], list[int]]:
        """Look keys up in memory; return the hits and the positions still to be fetched.

        Values that go inline are copied last, by `fetch` when there is something to fetch: a
        reply in waiting then holds none.
        """
        namespace = self.namespaces.look(name)
        memory = self.memory
        hits: list[protocol.Hit | None] = []
        missing: list[int] = []
        if inline and len(keys) * memory.arena.slot_bytes > MAX_INLINE_BYTES and len(keys) > 1:
            raise ProtocolError(
                "limit",
                f"{len(keys)} values might not fit a reply; ask for at most "
                f"{max(1, MAX_INLINE_BYTES // memory.arena.slot_bytes)} inline",
            )
        for position, key in enumerate(keys):
            block = memory.find(namespace, key)
            if block is None:
                hits.append(None)
                missing.append(position)
                continue
            memory.touch(block)
            if self.write_back is not None:
                self.write_back.touch(block.disk_key)
            hits.append(self._hit(block, "memory"))
            memory.counters.bytes_out += block.length
        found = len(keys) - len(missing)
        if found and not self.counters.hits:
            logger.info("first hit: a block of %r served from memory", name)
        memory.counters.hits += found
        memory.counters.misses += len(missing)
        self.counters.gets += len(keys)
        self.counters.hits += found
        if self._promoter is not None and missing:
            return hits, missing
        if inline:
            self._check_inline(hits)
            self._copy_values(namespace, keys, hits)
            self.counters.inline += found
        return hits, []

    async def fetch(
        self,
        name: str,
        keys: list[bytes],
        inline: bool,
        hits: list[protocol.Hit | None],
        missing: list[int],
    ) -> list[protocol.Hit | None]:
        """Complete `hits` with what the long tier has of the missing keys."""
        assert self._promoter is not None and self.long is not None
        namespace = self.namespaces.look(name)
        blocks = await self._promoter.fetch(namespace, [keys[index] for index in missing])
        found = 0
        for position, block in zip(missing, blocks, strict=True):
            if block is None:
                continue
            found += 1
            if isinstance(block, Loose):
                hits[position] = protocol.Hit(
                    "long", len(block.value), block.checksum, -1, -1, 0, block.value
                )
            else:
                # Its rank is fresh: publishing was this use.
                hits[position] = self._hit(block, "long")
                if self.write_back is not None and not block.durable:
                    # Stored meanwhile, not read: the disk has not seen this use.
                    self.write_back.touch(block.disk_key)
        if found:
            self.namespaces.keep(namespace)
            if not self.counters.hits:
                logger.info("first hit: a block of %r served from the long tier", name)
        self.long.counters.hits += found
        self.long.counters.misses += len(missing) - found
        self.counters.hits += found
        if inline:
            self._check_inline(hits)
            self._copy_values(namespace, keys, hits)
        self.counters.inline += sum(hit is not None and hit.data is not None for hit in hits)
        return hits

    def _hit(self, block: Block, tier: str) -> protocol.Hit:
        return protocol.Hit(
            tier,
            block.length,
            block.checksum,
            block.slot,
            block.offset,
            block.version,
        )

    def _check_inline(self, hits: list[protocol.Hit | None]) -> None:
        """Refuse what would not fit a reply: values of a class larger than the default one."""
        size_bytes = sum(hit.length for hit in hits if hit is not None)
        if size_bytes > MAX_INLINE_BYTES and len(hits) > 1:
            raise ProtocolError(
                "limit", f"values of {size_bytes} bytes do not fit a reply; ask for fewer inline"
            )

    def _copy_values(
        self, namespace: Namespace, keys: list[bytes], hits: list[protocol.Hit | None]
    ) -> None:
        """Put the values into hits that go inline, just before they are sent.

        What memory has lost since it was found is a miss after all.
        """
        arena = self.memory.arena
        for position, (key, hit) in enumerate(zip(keys, hits, strict=True)):
            if hit is None or hit.data is not None:
                continue
            block = self.memory.find(namespace, key)
            if block is None:
                hits[position] = None
                self.counters.hits -= 1
                continue
            found = self._hit(block, hit.tier)
            with arena.view_at(block.offset, block.length) as view:
                found.data = bytes(view)
            hits[position] = found

    def drop_damaged(self, name: str, keys: list[bytes]) -> None:
        """Throw away blocks whose bytes in memory are not what was committed.

        A good copy on the long tier is then found by the lookup that follows.
        """
        namespace = self.namespaces.look(name)
        for key in dict.fromkeys(keys):
            block = self.memory.find(namespace, key)
            if block is None:
                continue
            with self.memory.arena.view_at(block.offset, block.length) as view:
                if checksum64(view) == block.checksum:
                    continue
            self.memory.counters.corrupt += 1
            self.memory.remove(block)
            block.resolve(None if block.durable else False)
            logger.error(
                "a block of %r changed in memory after its COMMIT and was thrown away: some "
                "client writes where it must not",
                name,
            )

    def prefetch(self, name: str, keys: list[bytes], deadline_s: float) -> int:
        """Have the long tier's blocks brought into memory; return how many are to be read.

        Those already there are used, as far as eviction is concerned.
        """
        namespace = self.namespaces.look(name)
        absent: list[bytes] = []
        for key in dict.fromkeys(keys):
            block = self.memory.find(namespace, key)
            if block is None:
                absent.append(key)
            else:
                self.memory.touch(block)
                if self.write_back is not None:
                    self.write_back.touch(block.disk_key)
        if self._prefetcher is None:
            return 0
        return self._prefetcher.offer(namespace, absent, deadline_s)

    async def on_disk(self, namespace: Namespace, keys: list[bytes]) -> list[Source | None]:
        """Return what on the long tier has each key and may be believed to have it."""
        if self.long is None or not keys:
            return [None] * len(keys)
        generation = namespace.generation
        try:
            found = await self.long.find([namespace.prefix + key for key in keys])
        except (TablespaceError, OSError) as error:
            raise ProtocolError("unavailable", f"the long tier: {error}") from error
        if generation != namespace.generation:
            return [None] * len(keys)
        return [
            source if source is not None and namespace.disk_counts(key) else None
            for key, source in zip(keys, found, strict=True)
        ]

    def in_memory(self, name: str, keys: list[bytes]) -> list[bool]:
        """Return which keys memory has. No recency changes: asking is not using."""
        return self.memory.present(self.namespaces.look(name), keys)

    def in_memory_packed(self, name: str, packed: Buffer) -> list[bool] | None:
        """Return the same of packed keys; None where they have to be unpacked for that."""
        namespace = self.namespaces.look(name)
        return self.memory.present_packed(namespace, packed, protocol.MAX_BATCH_KEYS)

    async def complete(self, name: str, keys: list[bytes], present: list[bool]) -> list[bool]:
        """Return which keys any tier has; the long tier is asked only for the rest."""
        namespace = self.namespaces.look(name)
        rest = [position for position, there in enumerate(present) if not there]
        on_disk = await self.on_disk(namespace, [keys[position] for position in rest])
        for position, source in zip(rest, on_disk, strict=True):
            present[position] = source is not None
        return present

    async def locate(self, name: str, keys: list[bytes]) -> list[Location]:
        """Return where keys are. On the long tier a block is only ever seen once durable.

        One that only a followed region has is not durable: its host may evict it at any time.
        """
        namespace = self.namespaces.look(name)
        on_disk = await self.on_disk(namespace, keys)
        in_memory = self.in_memory(name, keys)
        return [
            Location(memory=here, long=source is not None, durable=isinstance(source, LongTier))
            for here, source in zip(in_memory, on_disk, strict=True)
        ]

    def touch(self, name: str, keys: list[bytes]) -> int:
        """Refresh recency in both tiers; return how many were in memory."""
        namespace = self.namespaces.look(name)
        count = 0
        for key in keys:
            block = self.memory.find(namespace, key)
            if block is not None:
                self.memory.touch(block)
                count += 1
            if self.write_back is not None:
                self.write_back.touch(namespace.prefix + key)
        return count

    # -- removing ------------------------------------------------------------------------------

    async def delete(self, name: str, keys: list[bytes]) -> int:
        """Remove keys from every tier; return how many any tier had."""
        namespace = self.namespaces.look(name)
        keys = list(dict.fromkeys(keys))
        removed = self._forget(namespace, keys)
        self.counters.deletes += len(keys)
        if self.long is None:
            return sum(removed)
        disk_keys = [namespace.prefix + key for key in keys]
        try:
            # Not after a failure: the caller was told, and what is stored next must be found.
            with self.deleting_on_disk([(namespace, key) for key in keys]):
                on_disk = await self.long.delete(disk_keys)
        except (TablespaceError, OSError) as error:
            raise ProtocolError("unavailable", f"the long tier: {error}") from error
        gone = [key for key, there in zip(keys, on_disk, strict=True) if there]
        self.events.tell(REMOVED, LONG, name, gone)
        return sum(here or there for here, there in zip(removed, on_disk, strict=True))

    async def clear(self, name: str) -> Cleared:
        """Remove a namespace from every tier."""
        namespace = self.namespaces.look(name)
        namespace.generation += 1
        blocks = self.memory.blocks_of(namespace)
        counted = frozenset(block.disk_key for block in blocks)
        size_bytes = sum(block.length for block in blocks)
        self.memory.remove_many(blocks)
        for block in blocks:
            block.resolve(None)
        if self.long is None:
            return Cleared(len(blocks), size_bytes)
        namespace.clearing += 1
        try:
            on_disk = await self.long.clear(namespace.prefix, counted)
        except (TablespaceError, OSError) as error:
            raise ProtocolError("unavailable", f"the long tier: {error}") from error
        finally:
            namespace.clearing -= 1
        self.events.tell(CLEARED, LONG, name)
        if not self.memory.blocks_of(namespace):
            self.namespaces.forget(namespace)
        return Cleared(len(blocks) + on_disk.entries, size_bytes + on_disk.bytes)

    @contextlib.contextmanager
    def deleting_on_disk(self, marked: Sequence[tuple[Namespace, bytes]]) -> Iterator[None]:
        """Let what the long tier has under these keys not count meanwhile."""
        for space, key in marked:
            space.deleting[key] = space.deleting.get(key, 0) + 1
        try:
            yield
        finally:
            for space, key in marked:
                left = space.deleting[key] - 1
                if left:
                    space.deleting[key] = left
                else:
                    del space.deleting[key]

    def void(self, marked: Sequence[tuple[Namespace, bytes]]) -> list[Block]:
        """Make reads under way for keys publish nothing; return the blocks memory has of them."""
        blocks: list[Block] = []
        for space, key in marked:
            if self._promoter is not None:
                self._promoter.void(space, key)
            block = self.memory.find(space, key)
            if block is not None:
                blocks.append(block)
        return blocks

    def _forget(self, namespace: Namespace, keys: list[bytes]) -> list[bool]:
        """Take keys out of memory; return which were there."""
        if self._promoter is not None:
            for key in keys:
                self._promoter.void(namespace, key)
        found = [self.memory.find(namespace, key) for key in keys]
        blocks = [block for block in found if block is not None]
        self.memory.remove_many(blocks)
        for block in blocks:
            block.resolve(None)
        return [block is not None for block in found]

    def _write_short_ahead(self) -> None:
        """Write the short blocks that would be evicted next, so that their slots are free."""
        if self.write_back is None:
            return
        for block in self.memory.short_to_write(self._reach_slots):
            if not self.write_back.offer(block):
                return

    def tick(self) -> None:
        """Do what is due now and then: expiry, slots that clients or the disk let go of."""
        self.memory.sweep(SWEEP_BLOCKS)
        if self.long is not None and self.write_back is not None:
            self.long.tick()
            self.write_back.tick()
        self.memory.reclaim()
        self.memory.taking.keep_promises()
        if self._promoter is not None:
            self._promoter.reclaim()

    # -- durability ----------------------------------------------------------------------------

    async def flush(self, session: Session, timeout_s: float) -> Flushed:
        """Wait until the session's long blocks are durable or dropped, or the time is up."""
        reached = asyncio.get_running_loop().create_future()

        def answer() -> None:
            if not reached.done():
                reached.set_result(None)

        if self.write_back is not None:
            self.write_back.hurry()
        barrier = session.add_barrier(answer)
        if barrier is not None:
            await asyncio.wait([reached], timeout=timeout_s)
            session.remove_barrier(barrier)
        return session.flushed()
