"""One request's worth of a put: copied into the shared arena, or sent inline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvd import protocol
from kvd.client_session import ClientSession, Writer
from kvd.connection import Connection
from kvd.errors import ProtocolError, UnavailableError
from kvd.mapping import ArenaMapping
from tablespace import checksum64

if TYPE_CHECKING:
    from kvd.client import Client

UNAVAILABLE = "unavailable"


class Put:
    """Stores blocks of one namespace in one session.

    Parameters
    ----------
    client, session, namespace, retention, ttl_s
        Where from, in which session, where to, and for how long.

    Notes
    -----
    Raises UnavailableError when the daemon does not answer. Whatever ends a put - also a signal
    handler's exception - its reserved slots are given back: by CANCEL, or by hanging up and
    going on with the session where it is not known which they are.
    """

    def __init__(
        self,
        client: Client,
        session: ClientSession,
        namespace: str,
        retention: Any,
        ttl_s: float | None,
    ) -> None:
        self._client = client
        self._session = session
        self._namespace = namespace
        self._retention = retention
        self._ttl_s = ttl_s
        self._connection: Connection | None = None

    @property
    def mapping(self) -> ArenaMapping | None:
        """Return where the slots lie that were reserved, also when that connection broke."""
        return None if self._connection is None else self._connection.mapping

    def mapped(self, keys: list[bytes], values: list[memoryview]) -> list[str]:
        """Reserve slots, copy the values in, commit; return one word per value."""
        accepted = 0
        client, session = self._client, self._session
        writer = Writer()
        try:
            client.begin_write(session, writer)
            grants = self.reserve([value.nbytes for value in values], keys, writer)
            statuses = [grant.status for grant in grants]
            positions, commits = self._copy(grants, keys, values)
            if commits:
                results = self.commit(commits, writer)
                for position, status in zip(positions, results, strict=True):
                    statuses[position] = status
            if self._retention == "long":
                accepted = accepted_count(statuses)
            return statuses
        except ProtocolError as error:
            self._break(str(error))
            raise UnavailableError(str(error)) from error
        finally:
            client.end_write(session, writer, accepted)

    def inline(self, keys: list[bytes], values: list[memoryview]) -> list[str]:
        """Send the values themselves, where the arena is not mapped."""
        limit = self._session.limits.max_value_bytes
        fits = [value.nbytes <= limit for value in values]
        accepted = 0
        writer = Writer()
        try:
            self._client.begin_write(self._session, writer)
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
                connection=self._client.connection_of(self._session),
            )
            answered = iter(reply.results)
            statuses = [next(answered, UNAVAILABLE) if fit else protocol.TOO_LARGE for fit in fits]
            if self._retention == "long":
                accepted = accepted_count(statuses)
            return statuses
        finally:
            self._client.end_write(self._session, writer, accepted)

    def reserve(
        self, sizes: list[int], keys: list[bytes] | None, writer: Writer
    ) -> list[protocol.Grant]:
        """Have the writer hold slots, one per size where there is room."""
        self._connection = connection = self._client.connection_of(self._session)
        answered = False
        try:
            granted = self._client.ask(
                protocol.Reserve(
                    namespace=self._namespace,
                    sizes=sizes,
                    keys=keys,
                    retention=self._retention,
                    ttl_s=self._ttl_s,
                ),
                protocol.Granted,
                connection=connection,
            )
            if len(granted.grants) != len(sizes):
                raise ProtocolError(
                    "malformed", "RESERVE was answered for another number of blocks"
                )
            self._client.hold(self._session, connection, writer, granted.grants)
            answered = True
            return granted.grants
        finally:
            if not answered:
                # What it grants is not known: the next connection gives it back.
                connection.close("a RESERVE was not answered")

    def _break(self, reason: str) -> None:
        connection = self._session.connection
        if connection is not None:
            connection.close(reason)

    def _copy(
        self, grants: list[protocol.Grant], keys: list[bytes], values: list[memoryview]
    ) -> tuple[list[int], list[protocol.CommitItem]]:
        """Fill the granted slots; return which values those are, and what to commit."""
        mapping = self.mapping
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

    def commit(self, items: list[protocol.CommitItem], writer: Writer) -> list[str]:
        """Publish what the writer wrote; it holds those slots no more."""
        reply = self._client.ask(
            protocol.Commit(
                namespace=self._namespace,
                items=items,
                retention=self._retention,
                ttl_s=self._ttl_s,
            ),
            protocol.StoredReply,
            connection=self._client.connection_of(self._session),
        )
        if len(reply.results) != len(items):
            raise ProtocolError("malformed", "COMMIT was answered for another number of blocks")
        # A CANCEL behind a COMMIT without an answer finds nothing left to give back.
        ended = {(item.slot, item.reservation) for item in items}
        writer.held[:] = [
            grant for grant in writer.held if (grant.slot, grant.reservation) not in ended
        ]
        return reply.results


def accepted_count(statuses: Sequence[str]) -> int:
    return sum(status in (protocol.STORED, protocol.REFRESHED) for status in statuses)
