"""What QUOTA asks for: the quotas of the running daemon, read, set, removed, or loaded anew."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from kvd import protocol, quotas
from kvd.cache import Cache
from kvd.errors import ConfigError, ProtocolError
from kvd.long_tier import LongTier
from kvd.quotas import Limits
from tablespace import ClosedError

WAIT_S = 5.0  # For a path whose disk hangs; the others do meanwhile.

logger = logging.getLogger(__name__)


async def answer(cache: Cache, request: protocol.Quota) -> Limits:
    """Do what a QUOTA asks for, and return every quota.

    Raises
    ------
    ProtocolError
        `no_long_tier`, `unknown_namespace`, `bad_request`, `unavailable`.
    """
    if cache.quotas is None:
        raise ProtocolError("no_long_tier", "quotas are of the long tier, and there is none")
    if request.action == "list":
        return cache.quotas.limits
    if request.action == "reload":
        return await reload(cache)
    if request.namespace is None:
        raise ProtocolError("bad_request", f"QUOTA {request.action} names a namespace")
    async with cache.quotas.changing:
        limits = cache.quotas.limits
        if request.action == "remove":
            if limits.pop(request.namespace, None) is None:
                raise ProtocolError("unknown_namespace", f"{request.namespace!r} has no quota")
        elif request.limit_bytes is None:
            raise ProtocolError("bad_request", "QUOTA set says limit_bytes")
        else:
            limits[request.namespace] = request.limit_bytes
        problems = await _save(cache.tiers, limits)
        if len(problems) == len(cache.tiers):
            raise ProtocolError(
                "unavailable", f"{quotas.FILE_NAME} is not written: {'; '.join(problems)}"
            )
        cache.quotas.take(limits)
    return limits


async def load(cache: Cache) -> None:
    """Take the quotas that the newest file of all open paths has, and copy them to the others.

    Raises
    ------
    ConfigError
        It cannot be used; then the quotas stay as they were.
    """
    if cache.quotas is None:
        return
    async with cache.quotas.changing:
        tiers = [tier for tier in cache.tiers if tier.is_open] or cache.tiers[:1]
        asked = [tier.on_reader(quotas.stamp, tier.directory) for tier in tiers]
        await asyncio.wait(asked, timeout=WAIT_S)
        stamps = [
            call.result() if call.done() and call.exception() is None else -1 for call in asked
        ]
        first = tiers[stamps.index(max(stamps))]
        limits = await first.on_reader(quotas.load, first.directory)
        cache.quotas.take(limits)
        await _save([tier for tier in tiers if tier is not first], limits)


async def keep(cache: Cache, tier: LongTier) -> None:
    """Copy the quotas to a path that is back: others may have come meanwhile."""
    if cache.quotas is not None:
        async with cache.quotas.changing:
            await _save([tier], cache.quotas.limits)


async def _save(tiers: Sequence[LongTier], limits: Limits) -> list[str]:
    """Write quotas to paths, each by its own thread; return why some did not take them."""
    calls: dict[LongTier, asyncio.Future[None]] = {}
    problems: list[str] = []
    for tier in tiers:
        if not tier.is_open:
            problems.append(f"{tier.directory}: not open")
            continue
        try:
            calls[tier] = tier.on_writer(quotas.keep, tier.directory, limits)
        except ClosedError as error:
            problems.append(f"{tier.directory}: {error}")
    if calls:
        await asyncio.wait(calls.values(), timeout=WAIT_S)
    for tier, call in calls.items():
        if not call.done():
            call.add_done_callback(_ignore)
            problems.append(f"{tier.directory}: not within {WAIT_S:g} s")
        elif (failure := call.exception()) is not None:
            problems.append(f"{tier.directory}: {failure}")
    for problem in problems:
        logger.warning("%s is not written: %s", quotas.FILE_NAME, problem)
    return problems


def _ignore(call: asyncio.Future[None]) -> None:
    if not call.cancelled():
        call.exception()


async def reload(cache: Cache) -> Limits:
    """Take the quotas that the newest file has now, and return them.

    Raises
    ------
    ProtocolError
        `unavailable`, when the file cannot be used; then the quotas stay as they were.
    """
    if cache.quotas is None:
        return {}
    try:
        await load(cache)
    except ConfigError as error:
        raise ProtocolError("unavailable", f"the quotas stay as they were: {error}") from error
    return cache.quotas.limits
