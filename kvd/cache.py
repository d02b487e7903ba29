"""The cache: what each request means for the two tiers.

Requests that memory can answer are plain calls; those that need the long tier are coroutines.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass, field

from tablespace import TablespaceError

from kvd import protocol
from kvd.block import RETENTION_BY_NAME, Block, Retention
from kvd.errors import ProtocolError
from kvd.long_tier import LongTier
from kvd.memory_tier import MemoryTier, boot_clock_ns
from kvd.namespaces import Namespace, Namespaces
from kvd.promotion import Promoter
from kvd.reservations import Reservations
from kvd.results import Cleared, Flushed, Location
from kvd.session import Session
from kvd.write_back import WriteBack

MAX_CHECKSUM = (1 << 64) - 1
# Slots kept within reach by writing short blocks ahead of their eviction.
REACH_SHARE = 16
MAX_REACH_SLOTS = 256

logger = logging.getLogger(__name__)


@dataclass
class CacheCounters:
    """What was asked of the cache as a whole."""

    sets: int = 0
    stored: int = 0
    refreshed: int = 0
    gets: int = 0
    hits: int = 0
    deletes: int = 0
    refused: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Keep:
    """How long the blocks of one request are to be kept."""

    retention: Retention
    expires_ns: int

    @classmethod
    def of(cls, retention: str, ttl_s: float | None) -> Keep:
        """Translate a request's words."""
        expires_ns = 0 if ttl_s is None else boot_clock_ns() + int(ttl_s * 1e9)
        return cls(RETENTION_BY_NAME[retention], expires_ns)


class Cache:
    """Both tiers behind one face. Event loop only.

    Parameters
    ----------
    memory : MemoryTier
        Always there.
    namespaces : Namespaces
        Identities.
    long_tier : LongTier or None
        With its region open.
    """

    def __init__(
        self, memory: MemoryTier, namespaces: Namespaces, long_tier: LongTier | None
    ) -> None:
        self.memory = memory
        self.namespaces = namespaces
        self.long = long_tier
        self.counters = CacheCounters()
        self.reservations = Reservations(memory)
        self.write_back: WriteBack | None = None
        self._promoter: Promoter | None = None
        if long_tier is not None:
            # Half the arena: the other half stays evictable whatever the disk does.
            self.write_back = WriteBack(
                memory, long_tier, namespaces, max(1, memory.arena.data_bytes // 2)
            )
            self._promoter = Promoter(memory, long_tier)
        self._slot_bytes = memory.arena.slot_bytes
        self._reach_slots = min(
            MAX_REACH_SLOTS, max(1, memory.arena.slot_count // REACH_SHARE)
        )
        self._warned_too_large = False

    # -- lookups -------------------------------------------------------------------------------

    def get(
        self, name: str, keys: list[bytes], inline: bool
    ) -> tuple[list[protocol.Hit | None], list[int]]:
        """Look keys up in memory; return the hits and the positions still to be fetched."""
        namespace = self.namespaces.get(name)
        memory = self.memory
        hits: list[protocol.Hit | None] = []
        missing: list[int] = []
        for position, key in enumerate(keys):
            block = memory.find(namespace, key)
            if block is None:
                hits.append(None)
                missing.append(position)
                continue
            memory.touch(block)
            if self.write_back is not None:
                self.write_back.touch(block.disk_key)
            hits.append(self._hit(block, "memory", inline))
            memory.counters.bytes_out += block.length
        found = len(keys) - len(missing)
        if found and not self.counters.hits:
            logger.info("first hit: a block of %r served from memory", name)
        memory.counters.hits += found
        memory.counters.misses += len(missing)
        self.counters.gets += len(keys)
        self.counters.hits += found
        return hits, missing if self._promoter is not None else []

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
        namespace = self.namespaces.get(name)
        blocks = await self._promoter.fetch(namespace, [keys[index] for index in missing])
        found = 0
        for position, block in zip(missing, blocks, strict=True):
            if block is not None:
                hits[position] = self._hit(block, "long", inline)
                self.memory.touch(block)
                found += 1
        if found and not self.counters.hits:
            logger.info("first hit: a block of %r served from the long tier", name)
        self.long.counters.hits += found
        self.long.counters.misses += len(missing) - found
        self.counters.hits += found
        return hits

    def _hit(self, block: Block, tier: str, inline: bool) -> protocol.Hit:
        arena = self.memory.arena
        data = None
        if inline:
            view = arena.view(block.slot, block.length)
            data = bytes(view)
            view.release()
        return protocol.Hit(
            tier,
            block.length,
            block.checksum,
            block.slot,
            arena.offset(block.slot),
            block.version,
            data,
        )

    async def on_disk(self, namespace: Namespace, keys: list[bytes]) -> list[bool]:
        """Return which keys the long tier has and may be believed to have."""
        if self.long is None or not keys:
            return [False] * len(keys)
        generation = namespace.generation
        try:
            there = await self.long.on_reader(
                self.long.contains, [namespace.prefix + key for key in keys]
            )
        except (TablespaceError, OSError) as error:
            raise ProtocolError("unavailable", f"the long tier: {error}") from error
        if generation != namespace.generation:
            return [False] * len(keys)
        return [
            present and namespace.disk_counts(key)
            for key, present in zip(keys, there, strict=True)
        ]

    def in_memory(self, namespace: Namespace, keys: list[bytes]) -> list[bool]:
        """Return which keys memory has. No recency changes: asking is not using."""
        return [self.memory.find(namespace, key) is not None for key in keys]

    async def exists(self, name: str, keys: list[bytes]) -> list[bool]:
        """Return which keys any tier has; the long tier is asked only for the rest."""
        namespace = self.namespaces.get(name)
        present = self.in_memory(namespace, keys)
        rest = [position for position, there in enumerate(present) if not there]
        on_disk = await self.on_disk(namespace, [keys[position] for position in rest])
        for position, there in zip(rest, on_disk, strict=True):
            present[position] = there
        return present

    async def locate(self, name: str, keys: list[bytes]) -> list[Location]:
        """Return where keys are. On the long tier a block is only ever seen once durable."""
        namespace = self.namespaces.get(name)
        on_disk = await self.on_disk(namespace, keys)
        in_memory = self.in_memory(namespace, keys)
        return [
            Location(memory=here, long=there, durable=there)
            for here, there in zip(in_memory, on_disk, strict=True)
        ]

    def touch(self, name: str, keys: list[bytes]) -> int:
        """Refresh recency in both tiers; return how many were in memory."""
        namespace = self.namespaces.get(name)
        count = 0
        for key in keys:
            block = self.memory.find(namespace, key)
            if block is not None:
                self.memory.touch(block)
                count += 1
            if self.write_back is not None:
                self.write_back.touch(namespace.prefix + key)
        return count

    # -- storing -------------------------------------------------------------------------------

    def refuse(self, status: str) -> str:
        """Count a block that is not stored."""
        self.counters.refused[status] += 1
        return status

    def admit(
        self, session: Session, namespace: Namespace, key: bytes | None, size: int, keep: Keep
    ) -> str | None:
        """Return a block's fate if it needs no slot: refreshed or refused. None: it does."""
        if keep.retention is Retention.NONE:
            return self.refuse(protocol.RETENTION_NONE)
        if size > self._slot_bytes:
            if not self._warned_too_large:
                self._warned_too_large = True
                logger.warning(
                    "a value of %d bytes does not fit slots of %d bytes and is not stored; "
                    "raise --tablespace-slot-bytes. Said once, counted in `refused`",
                    size,
                    self._slot_bytes,
                )
            return self.refuse(protocol.TOO_LARGE)
        if key is not None:
            block = self.memory.find(namespace, key)
            if block is not None:
                return self._refresh(session, block, keep)
        return None

    def reserve(
        self,
        session: Session,
        name: str,
        sizes: list[int],
        keys: list[bytes] | None,
        keep: Keep,
    ) -> list[protocol.Grant]:
        """Give slots to write into, one per size."""
        if keys is not None and len(keys) != len(sizes):
            raise ProtocolError("bad_request", f"{len(keys)} keys for {len(sizes)} sizes")
        namespace = self.namespaces.get(name)
        grants: list[protocol.Grant] = []
        for position, size in enumerate(sizes):
            key = keys[position] if keys is not None else None
            fate = self.admit(session, namespace, key, size, keep)
            if fate is not None:
                self.counters.sets += 1
                grants.append(protocol.Grant(fate))
                continue
            reserved = self.reservations.reserve(session)
            if reserved is None:
                self.counters.sets += 1
                grants.append(protocol.Grant(self.refuse(protocol.NO_ROOM)))
                continue
            slot, reservation = reserved
            grants.append(
                protocol.Grant(
                    protocol.RESERVED, slot, self.memory.arena.offset(slot), reservation
                )
            )
        self._write_short_ahead()
        return grants

    def commit(
        self, session: Session, name: str, items: list[protocol.CommitItem], keep: Keep
    ) -> list[str]:
        """Publish written slots; one word per item."""
        namespace = self.namespaces.get(name)
        results: list[str] = []
        for item in items:
            self.counters.sets += 1
            status = self.reservations.take(session, item.slot, item.reservation)
            if status != protocol.RESERVED:
                results.append(self.refuse(status))
            elif item.length > self._slot_bytes or item.checksum > MAX_CHECKSUM:
                self.memory.unreserve(item.slot)
                results.append(self.refuse(protocol.TOO_LARGE))
            else:
                results.append(
                    self._store(
                        session, namespace, item.key, item.slot, item.length, item.checksum, keep
                    )
                )
        return results

    def cancel(self, session: Session, slots: list[protocol.ReservedSlot]) -> int:
        """Take reserved slots back unused."""
        count = 0
        for item in slots:
            if self.reservations.take(session, item.slot, item.reservation) == protocol.RESERVED:
                self.memory.unreserve(item.slot)
                count += 1
        return count

    def set_inline(
        self, session: Session, name: str, items: list[protocol.SetItem], keep: Keep
    ) -> list[str]:
        """Store values that came in the request."""
        namespace = self.namespaces.get(name)
        results: list[str] = []
        for item in items:
            self.counters.sets += 1
            size = len(item.value)
            fate = self.admit(session, namespace, item.key, size, keep)
            if fate is not None:
                results.append(fate)
                continue
            reserved = self.memory.reserve()
            if reserved is None:
                results.append(self.refuse(protocol.NO_ROOM))
                continue
            view = self.memory.arena.view(reserved[0], size)
            view[:] = item.value
            view.release()
            results.append(
                self._store(
                    session, namespace, item.key, reserved[0], size, item.checksum, keep
                )
            )
        self._write_short_ahead()
        return results

    def _store(
        self,
        session: Session,
        namespace: Namespace,
        key: bytes,
        slot: int,
        length: int,
        checksum: int,
        keep: Keep,
    ) -> str:
        """Publish a written slot under its key, unless the key came in meanwhile."""
        if keep.retention is Retention.NONE:
            self.memory.unreserve(slot)
            return self.refuse(protocol.RETENTION_NONE)
        present = self.memory.find(namespace, key)
        if present is not None:
            self.memory.unreserve(slot)
            return self._refresh(session, present, keep)
        if self._promoter is not None:
            self._promoter.void(namespace, key)
        block = Block(namespace, key, slot, length, checksum, keep.retention, keep.expires_ns)
        self.memory.publish(block)
        self.memory.counters.bytes_in += length
        self.counters.stored += 1
        if keep.retention is Retention.LONG:
            self._make_durable(session, block)
        return protocol.STORED

    def _refresh(self, session: Session, block: Block, keep: Keep) -> str:
        self.counters.refreshed += 1
        self.memory.touch(block)
        if keep.expires_ns != block.expires_ns:
            self.memory.set_expiry(block, keep.expires_ns)
        if keep.retention > block.retention:
            block.retention = keep.retention
            if not block.writing:
                self.memory.place(block)
        if keep.retention is Retention.LONG:
            # Also a block thought durable: the long tier may have evicted it since. The writer
            # looks first, so one that is still there costs no write.
            self._make_durable(session, block)
        elif self.write_back is not None:
            self.write_back.touch(block.disk_key)
        return protocol.REFRESHED

    def _make_durable(self, session: Session, block: Block) -> None:
        """Queue a long block for the long tier and have the session hear of it."""
        if self.write_back is None:
            session.dropped += 1
            return
        queued = self.write_back.offer(block)
        if not queued and block.durable:
            session.durable += 1
        elif not queued and self.long is not None and self.long.failure is not None:
            session.dropped += 1
            self.long.counters.dropped += 1
        else:
            block.watchers.append((session, session.open_ticket()))

    def _write_short_ahead(self) -> None:
        """Write the short blocks that would be evicted next, so that their slots are free."""
        if self.write_back is None:
            return
        for block in self.memory.short_to_write(self._reach_slots):
            if not self.write_back.offer(block):
                return

    # -- removing ------------------------------------------------------------------------------

    async def delete(self, name: str, keys: list[bytes]) -> int:
        """Remove keys from every tier; return how many any tier had."""
        namespace = self.namespaces.get(name)
        keys = list(dict.fromkeys(keys))
        removed = [self._forget(namespace, key) for key in keys]
        self.counters.deletes += len(keys)
        if self.long is None:
            return sum(removed)
        for key in keys:
            namespace.deleting[key] = namespace.deleting.get(key, 0) + 1
        try:
            on_disk = await self.long.on_writer(
                self.long.delete, [namespace.prefix + key for key in keys]
            )
        except (TablespaceError, OSError) as error:
            # The keys stay in `deleting`: what the disk still holds must not come back.
            raise ProtocolError("unavailable", f"the long tier: {error}") from error
        for key in keys:
            left = namespace.deleting[key] - 1
            if left:
                namespace.deleting[key] = left
            else:
                del namespace.deleting[key]
        return sum(here or there for here, there in zip(removed, on_disk, strict=True))

    async def clear(self, name: str) -> Cleared:
        """Remove a namespace from every tier."""
        namespace = self.namespaces.get(name)
        namespace.generation += 1
        blocks = self.memory.blocks_of(namespace)
        counted = frozenset(block.disk_key for block in blocks)
        size_bytes = sum(block.length for block in blocks)
        for block in blocks:
            self.memory.remove(block)
            block.resolve(None)
        if self.long is None:
            return Cleared(len(blocks), size_bytes)
        namespace.clearing += 1
        try:
            on_disk = await self.long.on_writer(self.long.clear, namespace.prefix, counted)
        except (TablespaceError, OSError) as error:
            raise ProtocolError("unavailable", f"the long tier: {error}") from error
        namespace.clearing -= 1
        return Cleared(len(blocks) + on_disk.entries, size_bytes + on_disk.bytes)

    def _forget(self, namespace: Namespace, key: bytes) -> bool:
        if self._promoter is not None:
            self._promoter.void(namespace, key)
        block = self.memory.find(namespace, key)
        if block is None:
            return False
        self.memory.remove(block)
        block.resolve(None)
        return True

    # -- durability ----------------------------------------------------------------------------

    async def flush(self, session: Session, timeout_s: float) -> Flushed:
        """Wait until the session's long blocks are durable or dropped, or the time is up."""
        reached = asyncio.get_running_loop().create_future()

        def answer() -> None:
            if not reached.done():
                reached.set_result(None)

        barrier = session.add_barrier(answer)
        if barrier is not None:
            await asyncio.wait([reached], timeout=timeout_s)
            session.remove_barrier(barrier)
        return session.flushed()
