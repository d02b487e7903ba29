"""What QUOTA asks for: the quotas of the running daemon, read, set, removed, or loaded anew."""

from __future__ import annotations

from kvd import protocol, quotas
from kvd.cache import Cache
from kvd.errors import ConfigError, ProtocolError
from kvd.quotas import Limits


async def answer(cache: Cache, request: protocol.Quota) -> Limits:
    """Do what a QUOTA asks for, and return every quota.

    Raises
    ------
    ProtocolError
        `no_long_tier`, `unknown_namespace`, `bad_request`, `unavailable`.
    """
    long_tier = cache.long
    if long_tier is None:
        raise ProtocolError("no_long_tier", "quotas are of the long tier, and there is none")
    limits = long_tier.quotas.limits
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
        await long_tier.save_quotas(limits)
    except OSError as error:
        raise ProtocolError(
            "unavailable", f"{quotas.FILE_NAME} is not written: {error}"
        ) from error
    long_tier.quotas.take(limits)
    return limits


async def reload(cache: Cache) -> Limits:
    """Take the quotas that the file has now, and return them.

    Raises
    ------
    ProtocolError
        `unavailable`, when the file cannot be used; then the quotas stay as they were.
    """
    long_tier = cache.long
    if long_tier is None:
        return {}
    try:
        limits = await long_tier.load_quotas()
    except ConfigError as error:
        raise ProtocolError("unavailable", f"the quotas stay as they were: {error}") from error
    long_tier.quotas.take(limits)
    return limits
