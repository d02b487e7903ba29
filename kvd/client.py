"""The client: how an engine finds, stores and reads blocks."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import TypeVar

from kvd import protocol
from kvd.connection import Connection
from kvd.errors import ProtocolError, UnavailableError
from kvd.namespace_handle import NamespaceHandle
from kvd.protocol import Message
from kvd.putting import UNAVAILABLE
from kvd.results import Flushed, Stats
from kvd.socket_path import client_socket
from kvd.values import checked_seconds

FIRST_BACKOFF_S = 0.02
MAX_BACKOFF_S = 1.0
FLUSH_GRACE_S = 2.0  # The daemon answers at the flush's own timeout; this is for the way back.
MAX_RELEASED = 64

logger = logging.getLogger(__name__)
M = TypeVar("M", bound=Message)


class Client:
    """A client of the daemon on this host. The constructor never raises for an absent one.

    Parameters
    ----------
    socket : path or None
        None means $KVD_SOCKET, then the default path.
    timeout_s : float
        Bound of every wait.
    block_bytes, l1_bytes, engine
        What HELLO tells the daemon, so that it can warn about sizes that do not fit.
    map_arena : bool
        False for a client that only asks for counters: it costs the daemon nothing.

    Notes
    -----
    Safe from any thread. After a fork the child opens a session of its own. While the daemon
    is away lookups miss, puts return False, and `stats`, `flush`, `namespaces`, `clear` and
    `locate` raise UnavailableError; it reconnects by itself.
    """

    def __init__(
        self,
        socket: str | os.PathLike[str] | None = None,
        *,
        timeout_s: float = 5.0,
        block_bytes: int | None = None,
        l1_bytes: int | None = None,
        engine: str | None = None,
        map_arena: bool = True,
    ) -> None:
        self.socket = client_socket(socket)
        self.timeout_s = timeout_s
        self.refusals: Counter[str] = Counter()
        self._block_bytes = block_bytes
        self._l1_bytes = l1_bytes
        self._engine = engine
        self._map_arena = map_arena
        self._released: list[int] = []
        self._durable_before = 0
        self._dropped_before = 0
        self._warned: set[str] = set()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._next_attempt = 0.0
        self._backoff_s = FIRST_BACKOFF_S

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def namespace(self, name: str) -> NamespaceHandle:
        """Return a handle on a namespace. Cheap; nothing is sent."""
        return NamespaceHandle(self, name)

    def flush(self, timeout_s: float | None = None) -> Flushed:
        """Wait until every long block this client stored before is durable or dropped.

        Returns
        -------
        Flushed
            Counted over the client's life. `pending` is what the timeout left open. Blocks
            accepted by a daemon that left before it confirmed them count as dropped.

        Raises
        ------
        UnavailableError
            When no daemon answers.
        ValueError
            For a timeout that cannot be meant.
        """
        wait_s = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + checked_seconds("timeout_s", wait_s, protocol.MAX_TTL_S)
        connection = self.connection()
        while True:
            # The daemon keeps a FLUSH for a bounded time only; for more it is asked again.
            part_s = min(protocol.MAX_FLUSH_S, max(0.0, deadline - time.monotonic()))
            answer = self.ask(
                protocol.Flush(timeout_s=part_s),
                protocol.FlushedReply,
                connection=connection,
                timeout_s=part_s + FLUSH_GRACE_S,
            ).flushed
            if not answer.pending or time.monotonic() >= deadline:
                break
        with self._lock:
            connection.confirmed_durable = answer.durable
            connection.confirmed_dropped = answer.dropped
            return Flushed(
                self._durable_before + answer.durable,
                self._dropped_before + answer.dropped,
                answer.pending,
            )

    def stats(self) -> Stats:
        """Return the daemon's counters; UnavailableError when none answers."""
        return self.ask(protocol.StatsRequest(), protocol.StatsReply).stats

    def namespaces(self) -> list[str]:
        """Return the names the daemon knows; UnavailableError when none answers."""
        return self.ask(protocol.NamespacesRequest(), protocol.NamespacesReply).names

    def close(self) -> None:
        """End the session. A later call opens a new one.

        A put that another thread has under way ends with False.
        """
        self._check_fork()
        with self._lock:
            connection, self._connection = self._connection, None
            if connection is None:
                return
            connection.closing = True
            # BYE promises that nobody uses this session's slots any more: with a copy or a lease
            # under way we only hang up, and the daemon keeps those slots out of use.
            promise = connection.alive and self._is_idle(connection)
        if promise:
            try:
                connection.call(protocol.Bye(), time.monotonic() + min(1.0, self.timeout_s))
            except (UnavailableError, ProtocolError):
                pass
        connection.close()
        with self._lock:
            self._account(connection)

    # -- for the handles -----------------------------------------------------------------------

    def connection(self) -> Connection:
        """Return the open connection, opening one if need be and due.

        Raises
        ------
        UnavailableError
            When there is no daemon, or it was tried too short a time ago.
        """
        self._check_fork()
        connection = self._connection
        if connection is not None and connection.alive:
            return connection
        with self._lock:
            connection = self._connection
            if connection is not None:
                if connection.alive:
                    return connection
                self._connection = None
                self._account(connection)
            now = time.monotonic()
            if now < self._next_attempt:
                raise UnavailableError(f"no kvd daemon on {self.socket}")
            try:
                connection = Connection(self.socket, self._hello(), now + self.timeout_s)
            except UnavailableError:
                self._next_attempt = time.monotonic() + self._backoff_s
                self._backoff_s = min(MAX_BACKOFF_S, self._backoff_s * 2)
                raise
            self._backoff_s = FIRST_BACKOFF_S
            self._released.clear()
            self._connection = connection
            return connection

    def connection_to_look_up(self) -> Connection:
        """Return `connection()`, unless its daemon hangs: then a lookup is a miss at once."""
        connection = self.connection()
        if connection.is_stuck:
            raise UnavailableError("the daemon's heartbeat has stopped")
        return connection

    def ask(
        self,
        request: Message,
        kind: type[M],
        *,
        connection: Connection | None = None,
        timeout_s: float | None = None,
    ) -> M:
        """Send a request and return its reply, which must be of `kind`.

        Raises
        ------
        UnavailableError
            When no daemon answers in time, or it answers that it cannot.
        """
        wait_s = self.timeout_s if timeout_s is None else timeout_s
        if connection is None:
            connection = self.connection()
        try:
            reply = connection.call(request, time.monotonic() + wait_s)
        except ProtocolError as error:
            raise UnavailableError(f"the daemon refused: {error}") from error
        if connection.local is not None:
            connection.local.note(request, reply)
        if not isinstance(reply, kind):
            connection.close(f"{type(reply).__name__} is no answer to this")
            raise UnavailableError(f"the daemon answered with {type(reply).__name__}")
        return reply

    def refuse(self, reasons: Sequence[str]) -> None:
        """Count blocks that were not stored; each reason is logged once."""
        with self._lock:
            self.refusals.update(reasons)
            fresh = set(reasons) - self._warned
            self._warned |= fresh
        for reason in fresh:
            hint = ""
            if reason == protocol.TOO_LARGE:
                hint = "; raise the daemon's --tablespace-slot-bytes"
            elif reason == UNAVAILABLE:
                hint = f": {self._no_daemon()}"
            logger.warning("a block was not stored: %s%s (said once, then counted)", reason, hint)

    def begin_write(self, connection: Connection, writer: object) -> None:
        """Note that `writer` copies into slots that the connection's session reserves.

        Raises
        ------
        UnavailableError
            When the connection is being closed: nothing may begin after its BYE.
        """
        with self._lock:
            if connection.closing:
                raise UnavailableError("the client is being closed")
            connection.writers.add(writer)

    def end_write(self, connection: Connection, writer: object, accepted_long: int) -> None:
        """Note that the copying ended, and how many long blocks the daemon took."""
        with self._lock:
            connection.writers.discard(writer)
            connection.accepted_long += accepted_long
            if connection is not self._connection:
                # Accounted for already, as gone: what came in after that is lost too.
                self._dropped_before += accepted_long
                self._release_if_idle(connection)

    def lease_ended(self, connection: Connection) -> None:
        """Note that a lease by a connection that is gone came to its end."""
        with self._lock:
            if connection is not self._connection:
                self._release_if_idle(connection)

    # -- inside --------------------------------------------------------------------------------

    def _no_daemon(self) -> str:
        return (
            f"no kvd daemon answers on {self.socket}; start one there (python -m kvd --socket "
            f"{self.socket}), or name its socket by KVD_SOCKET"
        )

    def _hello(self) -> protocol.Hello:
        return protocol.Hello(
            versions=list(protocol.VERSIONS),
            client=f"kvd python, process {os.getpid()}",
            engine=self._engine,
            block_bytes=self._block_bytes,
            l1_bytes=self._l1_bytes,
            map=self._map_arena,
            released=list(self._released),
        )

    def _account(self, connection: Connection) -> None:
        """Keep a gone connection's sums: what it did not confirm counts as dropped."""
        confirmed = connection.confirmed_durable + connection.confirmed_dropped
        self._durable_before += connection.confirmed_durable
        self._dropped_before += connection.confirmed_dropped
        self._dropped_before += max(0, connection.accepted_long - confirmed)
        self._release_if_idle(connection)

    def _is_idle(self, connection: Connection) -> bool:
        """Return whether nobody uses that session's slots, from now on."""
        return not connection.writers and (
            connection.local is None or connection.local.end_leasing()
        )

    def _release_if_idle(self, connection: Connection) -> None:
        """Let the next HELLO say that nobody uses that session's slots any more, if so."""
        if connection.released or not self._is_idle(connection):
            return
        connection.released = True
        if len(self._released) < MAX_RELEASED:
            self._released.append(connection.limits.session)

    def _check_fork(self) -> None:
        """Start anew in a forked child: its parent's threads may have left the lock held."""
        if os.getpid() == self._pid:
            return
        inherited, self._connection = self._connection, None
        self._lock = threading.Lock()
        self._next_attempt = 0.0
        self._backoff_s = FIRST_BACKOFF_S
        self._pid = os.getpid()
        if inherited is not None:
            inherited.abandon()
