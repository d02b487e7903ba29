"""The long tier as a whole: its paths, one region each, and the regions that it follows.

A key is written on one path, which rendezvous hashing on the regions' uuids chooses: with another
path more or less only that path's share of the keys moves. It is looked for on all of them, in
their indexes in memory, so what was written before stays found; and deleted on all.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from kvd.followed import Followed
from kvd.latency import LatencyRing
from kvd.long_limits import MAX_SLOT_BYTES, MAX_SLOT_SIZES
from kvd.long_tier import LongTier
from kvd.long_values import LongCounters
from kvd.owed_deletions import OwedDeletions
from kvd.region_purge import Freed, Selection
from kvd.results import Cleared
from kvd.slab_geometry import PAGE_BYTES
from tablespace import ClosedError, FailedError, TablespaceError, checksum64

DEFAULT_TIMEOUT_S = 2.0

Source = LongTier | Followed
T = TypeVar("T")

logger = logging.getLogger(__name__)


class AwayError(TablespaceError):
    """A path that the request needs is down; it is done there once the path is back."""


class LongPaths:
    """All paths of the long tier. Event loop only.

    Parameters
    ----------
    tiers : sequence of LongTier
        The paths; those that are open take part in the placement.
    followed : sequence of Followed
        Looked into after the own ones.
    auto_slots : bool
        Whether the regions are given slots of the sizes that clients announce.
    timeout_s : float
        What a lookup waits for the disk; what comes later is a miss for it.
    """

    def __init__(
        self,
        tiers: Sequence[LongTier],
        followed: Sequence[Followed] = (),
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        auto_slots: bool = False,
    ) -> None:
        self.tiers = list(tiers)
        self.followed = list(followed)
        self.timeout_s = timeout_s
        self.auto_slots = auto_slots
        self.counters: LongCounters = self.tiers[0].counters
        self.promotion_latency = LatencyRing()
        self.reads_waiting = 0
        self.on_back: Callable[[LongTier], None] = lambda tier: None
        self.sources: list[Source] = [*self.tiers, *self.followed]
        self._reviving: set[asyncio.Task[None]] = set()
        self._being_revived: set[Source] = set()
        self.write_latency = LatencyRing()
        self.owed = OwedDeletions(self.tiers)
        for tier in self.tiers:
            tier.counters = self.counters
            tier.write_latency = self.write_latency

    # -- what it is ----------------------------------------------------------------------------

    @property
    def max_bytes(self) -> int:
        """Return the budget of all paths together."""
        return sum(tier.max_bytes for tier in self.tiers)

    @property
    def slot_bytes(self) -> int:
        """Return the largest slot of any region: the largest value that may be read."""
        return max(tier.slot_bytes for tier in self.tiers)

    @property
    def failure(self) -> str | None:
        """Return why no path at all takes writes, or None."""
        if any(tier.is_up for tier in self.tiers):
            return None
        return "; ".join(
            f"{tier.directory}: {tier.failure or tier.health.problem or 'not open'}"
            for tier in self.tiers
        )

    @property
    def trouble(self) -> str | None:
        """Return why blocks reach no path at all as things are, or None.

        Other than after a `failure`, the next blocks are tried all the same.
        """
        if self.failure is not None or not all(
            tier.refusal or not tier.is_up for tier in self.tiers
        ):
            return self.failure
        return "; ".join(
            f"{tier.directory}: {tier.refusal or tier.failure or tier.health.problem}"
            for tier in self.tiers
        )

    def home(self, key: bytes) -> LongTier | None:
        """Return the path that a key (as on disk) is written on; None while none was opened."""
        placed = [tier for tier in self.tiers if tier.uuid is not None]
        if len(placed) < 2:
            return placed[0] if placed else None
        return max(placed, key=lambda tier: checksum64(bytes.fromhex(tier.uuid or "") + key))

    # -- lookups -------------------------------------------------------------------------------

    async def find(self, keys: Sequence[bytes], *, to_read: bool = False) -> list[Source | None]:
        """Return where each key is: on its own path, another one, a followed region, nowhere.

        A path that is away, or that stands still, has nothing. With `to_read` one that stands
        still is tried now and then.

        Raises
        ------
        TablespaceError, OSError
            No path at all could be asked.
        """
        found: list[Source | None] = [None] * len(keys)
        # So that what one has is still read when another one does not answer.
        deadline = time.monotonic() + self.timeout_s / 2
        error: Exception | None = None
        asked = False
        own = [tier for tier in self.tiers if self._may_ask(tier, to_read)]
        answers = await self._answers(own, keys, self.timeout_s / 4)
        for tier, answer in zip(own, answers, strict=True):
            if isinstance(answer, Exception):
                error = answer
                continue
            asked = True
            for position, there in enumerate(answer):
                if there and (found[position] is None or self.home(keys[position]) is tier):
                    found[position] = tier
        for source in self.followed:
            rest = [position for position, where in enumerate(found) if where is None]
            if not rest:
                break
            if not self._may_ask(source, to_read):
                continue
            left_s = max(0.0, deadline - time.monotonic()) / 2
            (answer,) = await self._answers(
                [source], [keys[position] for position in rest], left_s
            )
            if isinstance(answer, Exception):
                continue
            for position, there in zip(rest, answer, strict=True):
                if there:
                    found[position] = source
        if error is not None and not asked and len(own) == len(self.tiers):
            raise error
        return found

    def find_at_once(
        self, keys: Sequence[bytes], *, to_read: bool = False
    ) -> list[Source | None] | None:
        """Return the same as `find` where nobody has to be waited for, else None.

        So it is with one path that is open and nothing followed: its index is in memory.
        """
        tier = self.tiers[0]
        if len(self.tiers) > 1 or self.followed or not tier.is_open:
            return None
        if not self._may_ask(tier, to_read):
            return [None] * len(keys)
        return [tier if there else None for there in tier.contains(keys)]

    def _may_ask(self, source: Source, to_read: bool) -> bool:
        if not source.is_open and (source.health.problem is not None or len(self.tiers) > 1):
            return False
        if isinstance(source, Followed) and source.looks.stands_still(self.timeout_s / 4):
            return False
        if to_read:
            return source.progress.admits(self.timeout_s)
        return not source.progress.stands_still(self.timeout_s)

    async def _answers(
        self, sources: Sequence[Source], keys: Sequence[bytes], timeout_s: float
    ) -> list[list[bool] | Exception]:
        """Ask indexes, all at once."""
        calls: list[asyncio.Future[list[bool]] | list[bool] | Exception] = []
        for source in sources:
            try:
                if isinstance(source, LongTier) and source.is_open:
                    # All in memory: two changes of threads would take longer than the look.
                    calls.append(source.contains(keys))
                else:
                    calls.append(source.on_index(source.contains, keys))
            except (TablespaceError, OSError, RuntimeError) as error:
                calls.append(error)
        futures = [call for call in calls if isinstance(call, asyncio.Future)]
        if futures:
            await asyncio.wait(futures, timeout=timeout_s)
        return [_result(call) if isinstance(call, asyncio.Future) else call for call in calls]

    # -- changes -------------------------------------------------------------------------------

    async def delete(self, keys: Sequence[bytes]) -> list[bool]:
        """Delete keys durably wherever they are and return which were anywhere.

        Everything is asked for before the first wait, so that no later write is overtaken.

        Raises
        ------
        AwayError
            The path that has some of them takes no writes now; they are hidden until it does,
            and deleted then.
        TablespaceError, OSError
        """
        for source in self.followed:
            source.hidden.add(keys)
        found = [False] * len(keys)
        removed = await self._remove(
            lambda tier: tier.on_writer(tier.delete, keys),
            lambda tier: tier.hidden.add(keys),
            lambda tier: any(self.home(key) is tier for key in keys),
        )
        for there in removed:
            found = [one or other for one, other in zip(found, there, strict=True)]
        return found

    async def clear(self, prefix: bytes, counted: frozenset[bytes]) -> Cleared:
        """Delete a namespace durably on every path; as `delete` otherwise."""
        for source in self.followed:
            source.hidden.add_prefix(prefix)
        parts = await self._remove(
            lambda tier: tier.on_writer(tier.clear, prefix, counted),
            lambda tier: tier.hidden.add_prefix(prefix),
        )
        return Cleared(sum(part.entries for part in parts), sum(part.bytes for part in parts))

    async def shorten(self, limits: Sequence[tuple[bytes, int]]) -> list[bool]:
        """Make copies expire no later than at their limits; True where none lasts longer."""
        done = [True] * len(limits)
        calls = []
        for tier in self.tiers:
            if tier.is_up:
                calls.append((tier, tier.on_writer(tier.shorten, limits)))
            elif tier.uuid is not None:
                done = [False] * len(limits)
        for part in await self._all(calls, lambda tier: None):
            done = [one and other for one, other in zip(done, part, strict=True)]
        return done

    async def _remove(
        self,
        call: Callable[[LongTier], Awaitable[T]],
        owe: Callable[[LongTier], None],
        matters: Callable[[LongTier], bool] = lambda tier: True,
    ) -> list[T]:
        """Remove something on every path; owe it, over restarts too, to those that are away.

        Raises
        ------
        AwayError
            A path is away for which this `matters`.
        """
        away = [tier for tier in self.tiers if not tier.is_up]
        calls = [(tier, call(tier)) for tier in self.tiers if tier.is_up]
        indebted = list(away)
        for tier in away:
            owe(tier)

        def owe_too(tier: LongTier) -> None:
            owe(tier)
            indebted.append(tier)

        kept = False
        try:
            parts = await self._all(calls, owe_too)
        finally:
            if indebted:
                kept = await self.owed.save()
        for tier in away:
            if matters(tier):
                raise _away(tier, kept)
        return parts

    async def _all(
        self,
        calls: Sequence[tuple[LongTier, Awaitable[T]]],
        owe: Callable[[LongTier], None],
    ) -> list[T]:
        """Return what all calls return, or raise the first error once all have ended."""
        results = await asyncio.gather(*(call for _, call in calls), return_exceptions=True)
        values: list[T] = []
        error: BaseException | None = None
        for (tier, _), result in zip(calls, results, strict=True):
            if isinstance(result, BaseException):
                error = error or result
                if isinstance(result, FailedError):
                    tier.fail(result)
                    owe(tier)
            else:
                values.append(result)
        if error is not None:
            raise error
        return values

    def wants_slots_for(self, block_bytes: int) -> bool:
        """Return whether blocks of this size, which a client announced, fit no slots well."""
        size = _slot_size(block_bytes)
        if not self.auto_slots or not 0 < size <= MAX_SLOT_BYTES:
            return False
        return any(tier.is_up and _fits_badly(size, tier.slot_sizes) for tier in self.tiers)

    async def add_slots_for(self, block_bytes: int) -> None:
        """Give the regions slots for blocks of this size; each is opened again for that."""
        size = _slot_size(block_bytes)
        for tier in self.tiers:
            if tier.is_up and _fits_badly(size, tier.slot_sizes):
                try:
                    if await tier.on_writer(tier.add_slot_size, size):
                        logger.info("%s has slots of %d bytes from now on", tier.directory, size)
                except (TablespaceError, OSError, ValueError) as error:
                    tier.fail(error)

    # -- purging -------------------------------------------------------------------------------

    async def select(self, selection: Selection) -> list[bytes]:
        """Return the keys that a purge means, on every path that is open."""
        found: list[bytes] = []
        for tier in self.tiers:
            if tier.is_up:
                found += await tier.on_index(tier.select, selection)
        return found

    async def purge(
        self, selection: Selection, *, dry_run: bool = False, zero: bool = False
    ) -> Freed:
        """Delete, durably, what a purge of whole namespaces means; as `delete` otherwise."""

        def owe(tier: LongTier) -> None:
            if dry_run or selection.older_than_s is not None:
                return
            if selection.prefixes is None:
                tier.hidden.add_all()
            for prefix in selection.prefixes or ():
                tier.hidden.add_prefix(prefix)

        if not dry_run:
            self._hide_followed(selection)
        parts = await self._remove(
            lambda tier: tier.on_writer(tier.purge, selection, dry_run=dry_run, zero=zero), owe
        )
        return sum(parts, Freed())

    def _hide_followed(self, selection: Selection) -> None:
        for source in self.followed:
            if selection.prefixes is None:
                source.hidden.add_all()
            for prefix in selection.prefixes or ():
                source.hidden.add_prefix(prefix)

    async def purge_keys(self, keys: Sequence[bytes], *, zero: bool = False) -> Freed:
        """Delete keys durably; as `delete` otherwise."""
        for source in self.followed:
            source.hidden.add(keys)
        parts = await self._remove(
            lambda tier: tier.on_writer(tier.purge_keys, keys, zero=zero),
            lambda tier: tier.hidden.add(keys),
        )
        return sum(parts, Freed())

    # -- coming back ---------------------------------------------------------------------------

    def tick(self) -> None:
        """Try what is down and due, and note how old entries are where nothing is written."""
        for tier in self.tiers:
            if tier.ledger.ages.falls_due():
                with contextlib.suppress(ClosedError):  # The daemon is stopping: it is saved then.
                    tier.on_writer(tier.ledger.ages.save)
        for source in self.sources:
            if source.health.is_due and source not in self._being_revived:
                self._being_revived.add(source)
                task = asyncio.get_running_loop().create_task(self._revive(source))
                self._reviving.add(task)
                task.add_done_callback(self._reviving.discard)

    async def _revive(self, source: Source) -> None:
        try:
            if isinstance(source, Followed):
                await source.on_index(source.open_region)
            else:
                await source.on_writer(source.reopen_region)
                await self.owed.came_back(source)
        except Exception as error:
            if isinstance(error, ClosedError):
                return
            problem = f"{type(error).__name__}: {error}"
            if source.health.problem != problem:
                logger.warning("%s is still away: %s", source.directory, problem)
            source.health.failed(problem)
            return
        finally:
            self._being_revived.discard(source)
        source.health.back()
        if isinstance(source, LongTier):
            source.failure = source.refusal = None
            await self.owed.save()
            self.on_back(source)
        logger.info("%s was opened again", source.directory)

    # -- the end -------------------------------------------------------------------------------

    async def close(self) -> None:
        """Close every region, its snapshot written; all at once."""
        calls: list[Awaitable[None]] = [tier.on_writer(tier.close_region) for tier in self.tiers]
        calls += [source.on_index(source.close_region) for source in self.followed]
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    def shut_down(self) -> None:
        """Stop all threads; what they are doing now is not waited for."""
        for source in self.sources:
            source.shut_down()


def _result(call: asyncio.Future[list[bool]]) -> list[bool] | Exception:
    if not call.done():
        return TimeoutError("the index did not answer in time")
    error = call.exception()
    if error is None:
        return call.result()
    return error if isinstance(error, Exception) else RuntimeError(repr(error))


def _slot_size(block_bytes: int) -> int:
    return -(-block_bytes // PAGE_BYTES) * PAGE_BYTES


def _fits_badly(size: int, sizes: Sequence[int]) -> bool:
    """Return whether a block would waste more than an eighth of its slot, or has none."""
    if len(sizes) >= MAX_SLOT_SIZES:
        return False
    fitting = min((each for each in sizes if each >= size), default=None)
    return fitting is None or fitting - size > fitting // 8


def _away(tier: LongTier, kept: bool) -> AwayError:
    why = tier.failure or tier.health.problem or "not open"
    return AwayError(
        f"{tier.directory} takes no writes now ({why}); what it has of this is hidden, and is "
        f"deleted when it is back{'' if kept else ', if this daemon still runs then'}"
    )
