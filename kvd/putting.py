"""One request's worth of a put: copied into the shared arena, or sent inline."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvd import protocol
from kvd.connection import Connection
from kvd.errors import ProtocolError, UnavailableError
from tablespace import checksum64

if TYPE_CHECKING:
    from kvd.client import Client

UNAVAILABLE = "unavailable"
CANCEL_S = 0.5  # A daemon this slow to take slots back is told by hanging up.


class Put:
    """Stores blocks of one namespace by one connection.

    Parameters
    ----------
    client, connection, namespace, retention, ttl_s
        Where from, by which session, where to, and for how long.

    Notes
    -----
    Raises UnavailableError when the daemon does not answer. Whatever ends a put - also a signal
    handler's exception - its reserved slots are given back: by CANCEL, or by hanging up where
    it is not known which they are.
    """

    def __init__(
        self,
        client: Client,
        connection: Connection,
        namespace: str,
        retention: Any,
        ttl_s: float | None,
    ) -> None:
        self._client = client
        self._connection = connection
        self._namespace = namespace
        self._retention = retention
        self._ttl_s = ttl_s

    def mapped(self, keys: list[bytes], values: list[memoryview]) -> list[str]:
        """Reserve slots, copy the values in, commit; return one word per value."""
        accepted = 0
        # None: RESERVE is under way, and what it grants is not known.
        held: list[protocol.Grant] | None = []
        writer = object()
        try:
            self._client.begin_write(self._connection, writer)
            held = None
            grants = self._reserve(keys, values)
            held = [grant for grant in grants if grant.status == protocol.RESERVED]
            statuses = [grant.status for grant in grants]
            positions, commits = self._copy(grants, keys, values)
            if commits:
                # A CANCEL behind a COMMIT without an answer finds nothing left to give back.
                results = self._commit(commits)
                held = []
                for position, status in zip(positions, results, strict=True):
                    statuses[position] = status
            if self._retention == "long":
                accepted = _accepted(statuses)
            return statuses
        except ProtocolError as error:
            self._connection.close(str(error))
            raise UnavailableError(str(error)) from error
        finally:
            try:
                if held is None:
                    self._connection.close("a RESERVE was not answered")
                elif held:
                    self._cancel(held)
            finally:
                self._client.end_write(self._connection, writer, accepted)

    def inline(self, keys: list[bytes], values: list[memoryview]) -> list[str]:
        """Send the values themselves, where the arena is not mapped."""
        limit = self._connection.limits.max_value_bytes
        fits = [value.nbytes <= limit for value in values]
        accepted = 0
        writer = object()
        try:
            self._client.begin_write(self._connection, writer)
            reply = self._client.ask(
                protocol.BatchSet(
                    namespace=self._namespace,
                    items=[
                        protocol.SetItem(key, bytes(value), checksum64(value))
                        for key, value, fit in zip(keys, values, fits, strict=True)
                        if fit
                    ],
                    retention=self._retention,
                    ttl_s=self._ttl_s,
                ),
                protocol.StoredReply,
                connection=self._connection,
            )
            answered = iter(reply.results)
            statuses = [next(answered, UNAVAILABLE) if fit else protocol.TOO_LARGE for fit in fits]
            if self._retention == "long":
                accepted = _accepted(statuses)
            return statuses
        finally:
            self._client.end_write(self._connection, writer, accepted)

    def _reserve(self, keys: list[bytes], values: list[memoryview]) -> list[protocol.Grant]:
        granted = self._client.ask(
            protocol.Reserve(
                namespace=self._namespace,
                sizes=[value.nbytes for value in values],
                keys=keys,
                retention=self._retention,
                ttl_s=self._ttl_s,
            ),
            protocol.Granted,
            connection=self._connection,
        )
        if len(granted.grants) != len(keys):
            raise ProtocolError("malformed", "RESERVE was answered for another number of blocks")
        return granted.grants

    def _copy(
        self, grants: list[protocol.Grant], keys: list[bytes], values: list[memoryview]
    ) -> tuple[list[int], list[protocol.CommitItem]]:
        """Fill the granted slots; return which values those are, and what to commit."""
        mapping = self._connection.mapping
        assert mapping is not None
        positions: list[int] = []
        commits: list[protocol.CommitItem] = []
        for position, (grant, key, value) in enumerate(zip(grants, keys, values, strict=True)):
            if grant.status == protocol.RESERVED:
                mapping.write(grant, value)
                positions.append(position)
                commits.append(
                    protocol.CommitItem(
                        grant.slot, grant.reservation, key, value.nbytes, checksum64(value)
                    )
                )
        return positions, commits

    def _commit(self, items: list[protocol.CommitItem]) -> list[str]:
        reply = self._client.ask(
            protocol.Commit(
                namespace=self._namespace,
                items=items,
                retention=self._retention,
                ttl_s=self._ttl_s,
            ),
            protocol.StoredReply,
            connection=self._connection,
        )
        if len(reply.results) != len(items):
            raise ProtocolError("malformed", "COMMIT was answered for another number of blocks")
        return reply.results

    def _cancel(self, grants: list[protocol.Grant]) -> None:
        """Give slots back; where that fails, hang up, which gives them back too."""
        slots = [protocol.ReservedSlot(grant.slot, grant.reservation) for grant in grants]
        try:
            self._connection.call(protocol.Cancel(slots=slots), time.monotonic() + CANCEL_S)
        except (UnavailableError, ProtocolError) as error:
            self._connection.close(f"slots could not be given back: {error}")
        except BaseException:
            self._connection.close("slots could not be given back")
            raise


def _accepted(statuses: Sequence[str]) -> int:
    return sum(status in (protocol.STORED, protocol.REFRESHED) for status in statuses)
