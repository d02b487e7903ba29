"""Storing: how a block gets into memory, and from there into the queue to the long tier."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field

from kvd import protocol
from kvd.block import RETENTION_BY_NAME, Block, Retention
from kvd.errors import ProtocolError
from kvd.expiry import boot_clock_ns
from kvd.long_paths import LongPaths
from kvd.memory_tier import MemoryTier
from kvd.namespaces import Namespace, Namespaces
from kvd.promotion import Promoter
from kvd.quotas import Quotas
from kvd.reservations import Reservations
from kvd.session import Session
from kvd.write_back import NOT_ADMITTED, WriteBack

MAX_CHECKSUM = (1 << 64) - 1

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
    inline: int = 0  # Blocks that went through the socket, either way.
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


class Storing:
    """The requests that store: SET, RESERVE, COMMIT, CANCEL. Event loop only.

    Parameters
    ----------
    memory, namespaces, long_paths, write_back, promoter
        The cache's parts; the last three are None without a long tier.
    counters : CacheCounters
        Shared with the cache.
    quotas : Quotas, optional
        Of the long tier.
    """

    def __init__(
        self,
        memory: MemoryTier,
        namespaces: Namespaces,
        long_paths: LongPaths | None,
        write_back: WriteBack | None,
        promoter: Promoter | None,
        counters: CacheCounters,
        quotas: Quotas | None = None,
    ) -> None:
        self.reservations = Reservations(memory)
        self._memory = memory
        self._namespaces = namespaces
        self._long = long_paths
        self._write_back = write_back
        self._promoter = promoter
        self._counters = counters
        self._quotas = quotas
        self._warned_too_large = False

    def refuse(self, status: str) -> str:
        """Count a block that is not stored."""
        self._counters.refused[status] += 1
        return status

    def admit(
        self, session: Session, namespace: Namespace, key: bytes | None, size: int, keep: Keep
    ) -> str | None:
        """Return a block's fate if it needs no slot: refreshed or refused. None: it does."""
        if keep.retention is Retention.NONE:
            return self.refuse(protocol.RETENTION_NONE)
        if keep.expires_ns and self._write_back is not None and self._write_back.limits.is_full:
            return self.refuse(protocol.NO_ROOM)
        largest = self._memory.classes.largest_bytes
        if size > largest:
            if not self._warned_too_large:
                self._warned_too_large = True
                logger.warning(
                    "a value of %d bytes does not fit slots of %d bytes and is not stored; "
                    "raise --tablespace-slot-bytes, or have the client announce its block_bytes. "
                    "Said once, counted in `refused`",
                    size,
                    largest,
                )
            return self.refuse(protocol.TOO_LARGE)
        if key is not None:
            block = self._memory.find(namespace, key)
            if block is not None:
                return self._refresh(session, block, keep)
            if self._over_quota(namespace, key, size, keep):
                return self.refuse_by_quota(namespace)
        return None

    def refuse_by_quota(self, namespace: Namespace) -> str:
        """Count a block that its namespace's quota has no room for."""
        assert self._quotas is not None
        self._quotas.rejected[namespace.name] += 1
        return self.refuse(protocol.QUOTA)

    def _over_quota(self, namespace: Namespace, key: bytes, size: int, keep: Keep) -> bool:
        if self._quotas is None or keep.retention < Retention.SHORT:
            return False
        return not self._quotas.has_room(namespace, key, size)

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
            raise ProtocolError(
                "bad_request", f"each key needs a size: keys {len(keys)}, sizes {len(sizes)}"
            )
        namespace = self._namespaces.get(name)
        fates = [
            self.admit(
                session, namespace, keys[position] if keys is not None else None, size, keep
            )
            for position, size in enumerate(sizes)
        ]
        slots = iter(
            self.reservations.reserve_many(
                session, [size for size, fate in zip(sizes, fates, strict=True) if fate is None]
            )
        )
        grants: list[protocol.Grant] = []
        for fate in fates:
            reserved = next(slots) if fate is None else None
            if reserved is None:
                self._counters.sets += 1
                grants.append(protocol.Grant(fate or self.refuse(protocol.NO_ROOM)))
                continue
            slot, reservation = reserved
            grants.append(
                protocol.Grant(
                    protocol.RESERVED, slot, self._memory.arena.offset(slot), reservation
                )
            )
        return grants

    def commit(
        self, session: Session, name: str, items: list[protocol.CommitItem], keep: Keep
    ) -> list[str]:
        """Publish written slots; one word per item."""
        namespace = self._namespaces.get(name)
        results: list[str] = []
        for position, item in enumerate(items):
            self._counters.sets += 1
            status = self.reservations.take(session, item.slot, item.reservation)
            if status != protocol.RESERVED:
                results.append(self.refuse(status))
            elif (
                item.length > self._memory.arena.slot_bytes_of(item.slot)
                or item.checksum > MAX_CHECKSUM
            ):
                self._memory.unreserve(item.slot)
                results.append(self.refuse(protocol.TOO_LARGE))
            else:
                results.append(
                    self._store(
                        session,
                        namespace,
                        item.key,
                        item.slot,
                        item.length,
                        item.checksum,
                        keep,
                        position,
                    )
                )
        return results

    def cancel(self, session: Session, slots: list[protocol.ReservedSlot]) -> int:
        """Take reserved slots back unused."""
        count = 0
        for item in slots:
            if self.reservations.take(session, item.slot, item.reservation) == protocol.RESERVED:
                self._memory.unreserve(item.slot)
                count += 1
        return count

    def set_inline(
        self, session: Session, name: str, items: list[protocol.SetItem], keep: Keep
    ) -> list[str]:
        """Store values that came in the request."""
        namespace = self._namespaces.get(name)
        results: list[str] = []
        for position, item in enumerate(items):
            self._counters.sets += 1
            size = len(item.value)
            fate = self.admit(session, namespace, item.key, size, keep)
            if fate is not None:
                results.append(fate)
                continue
            reserved = self._memory.reserve(size)
            if reserved is None:
                results.append(self.refuse(protocol.NO_ROOM))
                continue
            self._counters.inline += 1
            view = self._memory.arena.view(reserved[0], size)
            view[:] = item.value
            view.release()
            results.append(
                self._store(
                    session,
                    namespace,
                    item.key,
                    reserved[0],
                    size,
                    item.checksum,
                    keep,
                    position,
                )
            )
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
        position: int,
    ) -> str:
        """Publish a written slot under its key, unless the key came in meanwhile."""
        if keep.retention is Retention.NONE:
            self._memory.unreserve(slot)
            return self.refuse(protocol.RETENTION_NONE)
        present = self._memory.find(namespace, key)
        if present is not None:
            self._memory.unreserve(slot)
            return self._refresh(session, present, keep)
        if self._over_quota(namespace, key, length, keep):
            self._memory.unreserve(slot)
            return self.refuse_by_quota(namespace)
        if self._promoter is not None:
            self._promoter.void(namespace, key)
        block = Block(
            namespace, key, slot, length, checksum, keep.retention, keep.expires_ns, position
        )
        self._memory.publish(block)
        self._memory.counters.bytes_in += length
        self._counters.stored += 1
        if self._quotas is not None and keep.retention >= Retention.SHORT:
            self._quotas.waits(block)
        if self._write_back is not None:
            # A copy may be on disk from before, whatever becomes of this one.
            self._write_back.limits.set(block.disk_key, block.expires_ns)
            self._write_back.admit(block)
        if keep.retention is Retention.LONG:
            self._make_durable(session, block)
        return protocol.STORED

    def _refresh(self, session: Session, block: Block, keep: Keep) -> str:
        if block.retention < Retention.SHORT <= keep.retention:
            if self._over_quota(block.namespace, block.key, block.length, keep):
                return self.refuse_by_quota(block.namespace)
            if self._quotas is not None:
                self._quotas.waits(block)
        self._counters.refreshed += 1
        self._memory.touch(block)
        if self._write_back is not None and keep.retention >= Retention.SHORT:
            self._write_back.admit_now(block)
        if keep.expires_ns != block.expires_ns:
            self._set_expiry(block, keep.expires_ns)
        if keep.retention > block.retention:
            block.retention = keep.retention
            if not block.writing:
                self._memory.place(block)
        if keep.retention is Retention.LONG:
            # Also a block thought durable: the long tier may have evicted it since. The writer
            # looks first, so one that is still there costs no write.
            self._make_durable(session, block)
        elif self._write_back is not None:
            self._write_back.touch(block.disk_key)
        return protocol.REFRESHED

    def _set_expiry(self, block: Block, expires_ns: int) -> None:
        self._memory.set_expiry(block, expires_ns)
        if self._write_back is None:
            return
        self._write_back.limits.set(block.disk_key, expires_ns)
        if block.durable and not block.writing:
            # The copy on disk may be of another time to live. The writer looks, and writes it
            # again if so.
            block.durable = False
            self._memory.place(block)
            if block.retention is Retention.LONG:
                self._write_back.offer(block)

    def _make_durable(self, session: Session, block: Block) -> None:
        """Queue a long block for the long tier and have the session hear of it."""
        if self._write_back is None:
            session.dropped += 1
            return
        refusal = self._write_back.refusal(block)
        if refusal is not None and self._long is not None:
            session.dropped += 1
            self._long.counters.drop(refusal)
            if not block.writing:
                self._write_back.excuse(block)
            if refusal == NOT_ADMITTED:
                # It may lie there from before.
                self._write_back.touch_path(block.disk_key)
            return
        queued = self._write_back.offer(block)
        if not queued and block.durable:
            # Whether the disk still has it is not known before the writer has looked.
            block.durable = False
            self._memory.place(block)
        block.watchers.append((session, session.open_ticket()))
