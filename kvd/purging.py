"""Purging on a running daemon: what leaves every tier, and what can then not come back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvd import protocol, temp_guard
from kvd.block import Block
from kvd.cache import Cache
from kvd.errors import ProtocolError
from kvd.events import CLEARED, LONG, REMOVED
from kvd.namespaces import MAX_NAMESPACES, PREFIX_BYTES, disk_prefix
from kvd.region_purge import Freed, Selection
from kvd.results import Purged, TierPurged
from kvd.temp_guard import Swept
from tablespace import TablespaceError

logger = logging.getLogger(__name__)

UNNAMED = "unnamed:"  # Leads the label of a namespace whose name is not known, then its prefix.
BATCH_KEYS = 4096


def label_of(prefix: bytes, name: str | None) -> str:
    """Return what a namespace is called: its name, or what stands for one not known."""
    return name if name is not None else UNNAMED + prefix.hex()


def prefix_of(label: str, known: frozenset[str], present: frozenset[bytes]) -> bytes | None:
    """Return the prefix of a namespace by its name or label; None when there is none of it.

    Parameters
    ----------
    label : str
        Taken as it is: a name is never matched in part.
    known : frozenset of str
        Names with blocks somewhere.
    present : frozenset of bytes
        Prefixes of the long tier's entries.
    """
    prefix = disk_prefix(label)
    if label in known or prefix in present:
        return prefix
    if label.startswith(UNNAMED):
        try:
            prefix = bytes.fromhex(label.removeprefix(UNNAMED))
        except ValueError:
            return None
        if len(prefix) == PREFIX_BYTES and prefix in present:
            return prefix
    return None


async def purge(cache: Cache, request: protocol.Purge) -> Purged:
    """Do what a PURGE asks for.

    Raises
    ------
    ProtocolError
        `unknown_namespace`, `bad_request`, `unavailable`.
    """
    if (request.namespace is not None) + request.all + request.tmp != 1:
        raise ProtocolError("bad_request", "a purge is of one namespace, of all, or of tmp files")
    try:
        if request.tmp:
            return await _purge_temporary(cache, request.dry_run)
        prefixes = None if request.namespace is None else _prefixes(cache, request.namespace)
        selection = Selection(prefixes, request.older_than_s)
        # A namespace that is gone is known by its name no more.
        names = {prefix: space.name for prefix, space in cache.namespaces.by_prefix().items()}
        if request.dry_run:
            purged = await _count(cache, selection)
        elif request.older_than_s is None:
            purged = await _purge_whole(cache, selection, request.zero)
        else:
            purged = await _purge_old(cache, selection, request.zero)
        return purged.reply(names)
    except (TablespaceError, OSError) as error:
        raise ProtocolError("unavailable", f"the long tier: {error}") from error


def _prefixes(cache: Cache, label: str) -> frozenset[bytes]:
    known = frozenset(cache.namespaces.names())
    prefix = prefix_of(label, known, _on_disk(cache))
    if prefix is None:
        raise ProtocolError("unknown_namespace", f"there is no namespace {label!r}")
    return frozenset({prefix})


@dataclass
class Taken:
    """What a purge took from the tiers."""

    blocks: list[Block]
    freed: Freed
    dry_run: bool = False
    zeroed_bytes: int = 0

    def reply(self, names: dict[bytes, str]) -> Purged:
        """Return what to answer."""
        prefixes = {block.namespace.prefix for block in self.blocks} | self.freed.prefixes
        size_bytes = sum(block.length for block in self.blocks)
        return Purged(
            TierPurged(
                len(self.blocks), sum(block.slot_bytes for block in self.blocks), size_bytes
            ),
            TierPurged(self.freed.entries, self.freed.size_bytes, self.freed.value_bytes),
            sorted(label_of(prefix, names.get(prefix)) for prefix in prefixes)[:MAX_NAMESPACES],
            self.dry_run,
            zeroed_bytes=self.zeroed_bytes + self.freed.zeroed_bytes,
        )


async def _purge_temporary(cache: Cache, dry_run: bool) -> Purged:
    swept = await asyncio.gather(
        *(
            tier.on_scrubber(temp_guard.sweep, tier.directory, dry_run=dry_run)
            for tier in cache.tiers
            if tier.is_open
        )
    )
    return swept_away(swept, dry_run)


def swept_away(swept: Sequence[Swept], dry_run: bool) -> Purged:
    """Return what sweeps of several paths come to."""
    return Purged(
        TierPurged(),
        TierPurged(),
        [],
        dry_run,
        tmp_files=sum(each.files for each in swept),
        tmp_files_bytes=sum(each.bytes for each in swept),
        tmp_files_kept=sum(each.kept for each in swept),
    )


def _on_disk(cache: Cache) -> frozenset[bytes]:
    """Return the prefixes of all entries of the long tier."""
    return frozenset(prefix for tier in cache.tiers for prefix in tier.ledger.census.usage())


def _is_on_disk(cache: Cache, key: bytes) -> bool:
    return any(key in tier.ledger.census for tier in cache.tiers)


async def _count(cache: Cache, selection: Selection) -> Taken:
    blocks = _in_memory(cache, selection)
    freed = Freed()
    if cache.long is not None:
        freed = await cache.long.purge(selection, dry_run=True)
    return Taken(blocks, freed, dry_run=True)


async def _purge_whole(cache: Cache, selection: Selection, zero: bool) -> Taken:
    """Remove namespaces as they are now: moves under way are void, what is put later stays."""
    names = cache.namespaces
    meant = [
        space.name
        for prefix, space in names.by_prefix().items()
        if selection.prefixes is None or prefix in selection.prefixes
    ]
    with names.hold(selection.prefixes):
        blocks = _in_memory(cache, selection)
        zeroed = _remove(cache, blocks, zero)
        freed = Freed()
        if cache.long is not None:
            freed = await cache.long.purge(selection, zero=zero)
            for name in meant:
                cache.events.tell(CLEARED, LONG, name)
    on_disk = _on_disk(cache)
    for prefix, space in names.by_prefix().items():
        chosen = selection.prefixes is None or prefix in selection.prefixes
        if chosen and prefix not in on_disk and not cache.memory.blocks_of(space):
            names.forget(space)
    await _save_names(cache)
    return Taken(blocks, freed, zeroed_bytes=zeroed)


async def _purge_old(cache: Cache, selection: Selection, zero: bool) -> Taken:
    """Remove blocks stored long ago; others of the same namespaces stay and are served."""
    old = _in_memory(cache, selection)
    zeroed = 0
    freed = Freed()
    keys = [block.disk_key for block in old]
    if cache.long is not None:
        keys += await cache.long.select(selection)
    keys = list(dict.fromkeys(keys))
    removed: list[Block] = []
    for first in range(0, max(1, len(keys)), BATCH_KEYS):
        part = keys[first : first + BATCH_KEYS]
        spaces = cache.namespaces.by_prefix()
        unasked = frozenset(key[:PREFIX_BYTES] for key in part) - spaces.keys()
        marked = [
            (spaces[key[:PREFIX_BYTES]], key[PREFIX_BYTES:])
            for key in part
            if key[:PREFIX_BYTES] in spaces
        ]
        with cache.namespaces.hold(unasked), cache.deleting_on_disk(marked):
            blocks = cache.void(marked)
            zeroed += _remove(cache, blocks, zero)
            removed += blocks
            if cache.long is not None:
                on_disk = [
                    (space, key) for space, key in marked if _is_on_disk(cache, space.prefix + key)
                ]
                freed += await cache.long.purge_keys(part, zero=zero)
                for space, key in on_disk:
                    cache.events.tell(REMOVED, LONG, space.name, (key,))
    return Taken(removed, freed, zeroed_bytes=zeroed)


def _in_memory(cache: Cache, selection: Selection) -> list[Block]:
    """Return the blocks in memory that a purge means."""
    before = None
    if selection.older_than_s is not None:
        before = time.monotonic() - selection.older_than_s
    found: list[Block] = []
    for prefix, space in cache.namespaces.by_prefix().items():
        if selection.prefixes is None or prefix in selection.prefixes:
            found += [
                block
                for block in cache.memory.blocks_of(space)
                if before is None or block.since_s <= before
            ]
    return found


def _remove(cache: Cache, blocks: Sequence[Block], zero: bool) -> int:
    """Take blocks out of memory and return how many bytes were overwritten."""
    zeroed = 0
    if not zero:
        cache.memory.remove_many(list(blocks))
    for block in blocks:
        if zero:
            cache.memory.remove(block)
        block.resolve(None)
        if zero and cache.memory.is_free(block.slot):
            # Not one that a disk call or a reader still holds: its bytes are somebody's.
            with cache.memory.arena.view_at(block.offset, block.length) as view:
                view[:] = bytes(block.length)
            zeroed += block.length
    return zeroed


async def _save_names(cache: Cache) -> None:
    """Let the files of names tell of no namespace that is gone."""
    for tier in cache.tiers:
        if not tier.is_up:
            continue
        names = cache.namespaces.take_unsaved((), tier.directory)
        if names is None:
            continue
        try:
            await tier.on_writer(cache.namespaces.save, names, tier.directory)
        except OSError as error:
            # What was purged is gone; only a list of names is longer than need be.
            cache.namespaces.put_back(tier.directory)
            tier.names_problem = str(error)
            logger.warning("%s still lists what was purged: %s", tier.directory, error)
        except asyncio.CancelledError:
            cache.namespaces.put_back(tier.directory)
            raise
