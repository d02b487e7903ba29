"""What QUOTA asks for: the quotas of the running daemon, read, set, removed, or loaded anew."""

from __future__ import annotations

from kvd import protocol, quotas
from kvd.cache import Cache
from kvd.errors import ConfigError, ProtocolError
from kvd.long_tier import LongTier
from kvd.quotas import Limits


def keeper(cache: Cache) -> LongTier:
    """Return the path whose file has the quotas for all: the first that is open."""
    return next((tier for tier in cache.tiers if tier.is_open), cache.tiers[0])


async def answer(cache: Cache, request: protocol.Quota) -> Limits:
    """Do what a QUOTA asks for, and return every quota.

    Raises
    ------
    ProtocolError
        `no_long_tier`, `unknown_namespace`, `bad_request`, `unavailable`.
    """
    if cache.quotas is None:
        raise ProtocolError("no_long_tier", "quotas are of the long tier, and there is none")
    limits = cache.quotas.limits
    if request.action == "list":
        return limits
    if request.action == "reload":
        return await reload(cache)
    if request.namespace is None:
        raise ProtocolError("bad_request", f"QUOTA {request.action} names a namespace")
    if request.action == "remove":
        if limits.pop(request.namespace, None) is None:
            raise ProtocolError("unknown_namespace", f"{request.namespace!r} has no quota")
    elif request.limit_bytes is None:
        raise ProtocolError("bad_request", "QUOTA set says limit_bytes")
    else:
        limits[request.namespace] = request.limit_bytes
    try:
        first = keeper(cache)
        await first.on_writer(quotas.save, first.directory, limits)
    except OSError as error:
        raise ProtocolError(
            "unavailable", f"{quotas.FILE_NAME} is not written: {error}"
        ) from error
    cache.quotas.take(limits)
    return limits


async def reload(cache: Cache) -> Limits:
    """Take the quotas that the file has now, and return them.

    Raises
    ------
    ProtocolError
        `unavailable`, when the file cannot be used; then the quotas stay as they were.
    """
    if cache.quotas is None:
        return {}
    try:
        first = keeper(cache)
        limits = await first.on_writer(quotas.load, first.directory)
    except ConfigError as error:
        raise ProtocolError("unavailable", f"the quotas stay as they were: {error}") from error
    cache.quotas.take(limits)
    return limits
