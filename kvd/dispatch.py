"""Dispatch: which call of the cache answers which op.

A handler returns its reply, or a coroutine of it when the long tier has to be asked.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from kvd import codec, protocol, purging, quota_requests
from kvd.errors import ProtocolError
from kvd.protocol import Message
from kvd.storing import Keep

if TYPE_CHECKING:
    from kvd.server import Server
    from kvd.session import Session

Answer = Message | Coroutine[Any, Any, Message]
Handler = Callable[["Server", "Session", Any], Answer]


def _get(server: Server, session: Session, request: protocol.Get) -> Answer:
    keys = [request.key]
    return _look_up(server, request.id, request.namespace, keys, request.inline, request.verify)


def _batch_get(server: Server, session: Session, request: protocol.BatchGet) -> Answer:
    return _look_up(
        server, request.id, request.namespace, request.keys, request.inline, request.verify
    )


def _look_up(
    server: Server, request_id: int, name: str, keys: list[bytes], inline: bool, verify: bool
) -> Answer:
    if inline and len(set(keys)) < len(keys):
        raise ProtocolError("bad_request", "a key is named twice; ask inline for each once")
    if verify:
        server.cache.drop_damaged(name, keys)
    hits, missing = server.cache.get(name, keys, inline)
    if not missing:
        return protocol.Found(id=request_id, hits=hits, space=_space(server, name))

    async def rest() -> Message:
        found = await server.cache.fetch(name, keys, inline, hits, missing)
        return protocol.Found(id=request_id, hits=found, space=_space(server, name))

    return rest()


def _space(server: Server, name: str) -> int:
    """Return a namespace's id, which clients need to look in the shared index."""
    return server.cache.namespaces.look(name).id


def _set(server: Server, session: Session, request: protocol.Set) -> Answer:
    item = protocol.SetItem(request.key, request.value, request.checksum)
    keep = Keep.of(request.retention, request.ttl_s)
    results = server.cache.storing.set_inline(session, request.namespace, [item], keep)
    space = _space(server, request.namespace)
    return protocol.StoredReply(id=request.id, results=results, space=space)


def _batch_set(server: Server, session: Session, request: protocol.BatchSet) -> Answer:
    keep = Keep.of(request.retention, request.ttl_s)
    results = server.cache.storing.set_inline(session, request.namespace, request.items, keep)
    space = _space(server, request.namespace)
    return protocol.StoredReply(id=request.id, results=results, space=space)


def _reserve(server: Server, session: Session, request: protocol.Reserve) -> Answer:
    keep = Keep.of(request.retention, request.ttl_s)
    grants = server.cache.storing.reserve(
        session, request.namespace, request.sizes, request.keys, keep
    )
    space = _space(server, request.namespace)
    return protocol.Granted(id=request.id, grants=grants, space=space)


def _commit(server: Server, session: Session, request: protocol.Commit) -> Answer:
    keep = Keep.of(request.retention, request.ttl_s)
    results = server.cache.storing.commit(session, request.namespace, request.items, keep)
    space = _space(server, request.namespace)
    return protocol.StoredReply(id=request.id, results=results, space=space)


def _cancel(server: Server, session: Session, request: protocol.Cancel) -> Answer:
    count = server.cache.storing.cancel(session, request.slots)
    return protocol.Counted(id=request.id, count=count)


def _release(server: Server, session: Session, request: protocol.Release) -> Answer:
    count = 0
    if request.session is not None and request.session != session.id:
        if request.keep or request.lanes:
            raise ProtocolError("bad_request", "only the own session can be released in part")
        count = server.sessions.release(request.session, session.process.pid)
    else:
        server.lanes.release(session, request.lanes)
        if request.keep is not None:
            kept = {(item.slot, item.reservation) for item in request.keep}
            count = server.cache.storing.reservations.keep_only(session, kept)
    return protocol.Counted(id=request.id, count=count)


def _exists(server: Server, session: Session, request: protocol.Exists) -> Answer:
    name = request.namespace
    # Held until the answer: each look at a name nobody stored under would make another.
    namespace = server.cache.namespaces.look(name)
    present, keys = _in_memory(server, request)
    if not keys:
        return protocol.Presence(id=request.id, present=present, space=namespace.id)

    async def rest() -> Message:
        complete = await server.cache.complete(name, keys, present)
        return protocol.Presence(id=request.id, present=complete, space=namespace.id)

    return rest()


async def _locate(server: Server, session: Session, request: protocol.Locate) -> Message:
    locations = await server.cache.locate(request.namespace, request.keys)
    return protocol.Located(id=request.id, locations=locations)


def _match_prefix(server: Server, session: Session, request: protocol.MatchPrefix) -> Answer:
    name = request.namespace
    namespace = server.cache.namespaces.look(name)
    present, keys = _in_memory(server, request)
    if not keys:
        return protocol.Counted(id=request.id, count=_leading(present), space=namespace.id)

    async def rest() -> Message:
        complete = await server.cache.complete(name, keys, present)
        return protocol.Counted(id=request.id, count=_leading(complete), space=namespace.id)

    return rest()


def _in_memory(server: Server, request: protocol.PackedRequest) -> tuple[list[bool], list[bytes]]:
    """Return which keys memory has, and the keys where the long tier is to be asked too."""
    cache = server.cache
    present = cache.in_memory_packed(request.namespace, request.keys)
    if present is not None and (cache.long is None or False not in present):
        return present, []
    keys = codec.unpack_keys(request.keys)
    if present is None:
        present = cache.in_memory(request.namespace, keys)
    return present, [] if cache.long is None or False not in present else keys


def _leading(present: list[bool]) -> int:
    return present.index(False) if False in present else len(present)


def _prefetch(server: Server, session: Session, request: protocol.Prefetch) -> Answer:
    count = server.cache.prefetch(request.namespace, request.keys, request.deadline_s)
    return protocol.Counted(id=request.id, count=count)


def _touch(server: Server, session: Session, request: protocol.Touch) -> Answer:
    count = server.cache.touch(request.namespace, request.keys)
    return protocol.Counted(id=request.id, count=count)


async def _delete(server: Server, session: Session, request: protocol.Delete) -> Message:
    count = await server.cache.delete(request.namespace, request.keys)
    return protocol.Counted(id=request.id, count=count)


async def _clear(server: Server, session: Session, request: protocol.Clear) -> Message:
    cleared = await server.cache.clear(request.namespace)
    return protocol.ClearedReply(id=request.id, cleared=cleared)


async def _flush(server: Server, session: Session, request: protocol.Flush) -> Message:
    flushed = await server.cache.flush(session, request.timeout_s)
    return protocol.FlushedReply(id=request.id, flushed=flushed)


async def _stats(server: Server, session: Session, request: protocol.StatsRequest) -> Message:
    return protocol.StatsReply(id=request.id, stats=await server.stats())


def _namespaces(server: Server, session: Session, request: protocol.NamespacesRequest) -> Answer:
    return protocol.NamespacesReply(id=request.id, names=server.cache.namespaces.names())


async def _purge(server: Server, session: Session, request: protocol.Purge) -> Message:
    return protocol.PurgedReply(id=request.id, purged=await purging.purge(server.cache, request))


async def _quota(server: Server, session: Session, request: protocol.Quota) -> Message:
    quotas = await quota_requests.answer(server.cache, request)
    return protocol.QuotasReply(id=request.id, quotas=quotas)


async def _status(server: Server, session: Session, request: protocol.StatusRequest) -> Message:
    return protocol.StatusReply(id=request.id, status=await server.status())


HANDLERS: dict[type[Message], Handler] = {
    protocol.Get: _get,
    protocol.BatchGet: _batch_get,
    protocol.Set: _set,
    protocol.BatchSet: _batch_set,
    protocol.Reserve: _reserve,
    protocol.Commit: _commit,
    protocol.Cancel: _cancel,
    protocol.Release: _release,
    protocol.Exists: _exists,
    protocol.Locate: _locate,
    protocol.MatchPrefix: _match_prefix,
    protocol.Prefetch: _prefetch,
    protocol.Touch: _touch,
    protocol.Delete: _delete,
    protocol.Clear: _clear,
    protocol.Flush: _flush,
    protocol.StatsRequest: _stats,
    protocol.NamespacesRequest: _namespaces,
    protocol.Purge: _purge,
    protocol.Quota: _quota,
    protocol.StatusRequest: _status,
}
