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

from kvd import forks, protocol
from kvd.client_session import ClientSession, Writer, reserved_slots
from kvd.connection import Connection
from kvd.errors import ProtocolError, UnavailableError
from kvd.namespace_handle import NamespaceHandle
from kvd.protocol import Message
from kvd.putting import UNAVAILABLE
from kvd.results import Flushed, Stats
from kvd.socket_path import client_socket
from kvd.subscribing import Subscription
from kvd.values import checked_bytes, checked_seconds

FIRST_BACKOFF_S = 0.02
MAX_BACKOFF_S = 1.0
FLUSH_GRACE_S = 2.0  # The daemon answers at the flush's own timeout; this is for the way back.
GIVE_BACK_S = 0.5  # A daemon this slow to take slots back is told by hanging up.

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
        What HELLO tells the daemon: memory gets slots for blocks of `block_bytes`, and it warns
        about sizes that do not fit. Without it the slots have `--tablespace-slot-bytes`.
    map_arena : bool
        False for a client that only asks for counters: it costs the daemon nothing.

    Raises
    ------
    TypeError, ValueError
        For a `timeout_s`, `block_bytes` or `l1_bytes` that cannot be meant.

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
        self.timeout_s = checked_seconds("timeout_s", timeout_s, protocol.MAX_TTL_S)
        self.refusals: Counter[str] = Counter()
        self._block_bytes = checked_bytes("block_bytes", block_bytes, 1)
        self._l1_bytes = checked_bytes("l1_bytes", l1_bytes, 0)
        self._engine = engine
        self._map_arena = map_arena
        self._durable_before = 0
        self._dropped_before = 0
        self._warned: set[str] = set()
        self._forks = forks.count
        self._lock = threading.Lock()
        self._count_lock = threading.Lock()  # Never held while anything waits.
        self._session: ClientSession | None = None
        self._connection: Connection | None = None
        self._last_failure = ""
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
        session = self.session()
        while True:
            # The daemon keeps a FLUSH for a bounded time only; for more it is asked again.
            part_s = min(protocol.MAX_FLUSH_S, max(0.0, deadline - time.monotonic()))
            answer = self.ask(
                protocol.Flush(timeout_s=part_s),
                protocol.FlushedReply,
                connection=self.connection_of(session),
                timeout_s=part_s + FLUSH_GRACE_S,
            ).flushed
            if not answer.pending or time.monotonic() >= deadline:
                break
        with self._lock:
            session.confirmed_durable = answer.durable
            session.confirmed_dropped = answer.dropped
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

    def subscribe(self, namespaces: Sequence[str] | None = None) -> Subscription:
        """Have the daemon tell which blocks come and go, by a connection of its own.

        Parameters
        ----------
        namespaces : sequence of str or None
            Which to hear of; None: all.

        Raises
        ------
        UnavailableError
            When no daemon answers.
        """
        return Subscription(self, namespaces)

    def close(self) -> None:
        """End the session. A later call opens a new one.

        A put that another thread has under way ends with False.
        """
        self._check_fork()
        with self._lock:
            connection, self._connection = self._connection, None
            session = self._session
            if session is None:
                return
            if connection is None:
                session.detach()
                return
            session.closing = True
            # BYE promises that nobody uses this session's slots any more: with a copy or a lease
            # under way we only hang up. The next call goes on with the session and gives back
            # the rest.
            promise = connection.alive and session.is_idle()
        if promise:
            try:
                connection.call(protocol.Bye(), time.monotonic() + min(1.0, self.timeout_s))
            except (UnavailableError, ProtocolError):
                promise = False
        connection.close()
        with self._lock:
            if promise and self._session is session:
                self._forget_session()
            elif session.connection is connection:
                session.detach()

    # -- for the handles -----------------------------------------------------------------------

    def connection(self) -> Connection:
        """Return the open connection, opening one if need be and due.

        Raises
        ------
        UnavailableError
            When there is no daemon, or it was tried too short a time ago.
        """
        connection = self._connection
        if connection is not None and connection.broken is None and self._forks == forks.count:
            return connection
        self._check_fork()
        with self._lock:
            connection = self._connection
            if connection is not None:
                if connection.alive:
                    return connection
                self._connection = None
                if self._session is not None and self._session.connection is connection:
                    self._session.detach()
            now = time.monotonic()
            if now < self._next_attempt:
                raise UnavailableError(self._last_failure)
            try:
                connection = Connection(self.socket, self._hello(), now + self.timeout_s)
                self._go_on(connection, now + self.timeout_s)
            except UnavailableError as error:
                self._last_failure = str(error)
                self._next_attempt = time.monotonic() + self._backoff_s
                self._backoff_s = min(MAX_BACKOFF_S, self._backoff_s * 2)
                raise
            self._backoff_s = FIRST_BACKOFF_S
            self._connection = connection
            reason = connection.inline_because
        if reason is not None and reason not in self._warned:
            self._warned.add(reason)
            logger.warning("values go through the socket, which is slower: %s", reason)
        return connection

    def session(self) -> ClientSession:
        """Return the open session, opening one if need be; UnavailableError as `connection`."""
        self.connection()
        with self._lock:
            if self._session is None:
                raise UnavailableError("the client was closed meanwhile")
            return self._session

    def connection_of(self, session: ClientSession) -> Connection:
        """Return a connection that carries a session, resuming it if need be.

        Raises
        ------
        UnavailableError
            When there is no daemon, or it does not know the session any more.
        """
        if session.closing:
            raise UnavailableError("the client is being closed")
        connection = self.connection()
        if connection.limits.session != session.id:
            raise UnavailableError("the daemon that knew this session has left")
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
        """Count blocks that were not stored; each reason is logged once. Waits for nothing."""
        with self._count_lock:
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

    def begin_write(self, session: ClientSession, writer: Writer) -> None:
        """Note that `writer` will copy into slots of the session.

        Raises
        ------
        UnavailableError
            When the session is being closed: nothing may begin after its BYE.
        """
        with self._lock:
            if session.closing:
                raise UnavailableError("the client is being closed")
            session.begin_writer(writer)
            session.let_go()
        if session.has_strays:
            self._give_back(session)

    def hold(
        self,
        session: ClientSession,
        connection: Connection,
        writer: Writer,
        grants: Sequence[protocol.Grant],
    ) -> None:
        """Note which slots a writer was granted by a connection; only then may it write.

        Raises
        ------
        UnavailableError
            When that connection is not the session's any more: the next one gave them back.
        """
        with self._lock:
            if session.connection is not connection:
                raise UnavailableError("the connection broke, and with it what it granted")
            writer.held += [grant for grant in grants if grant.status == protocol.RESERVED]

    def end_write(
        self,
        session: ClientSession,
        writer: Writer,
        accepted_long: int,
    ) -> None:
        """Note that the copying ended, and how many long blocks the daemon took.

        What the writer still holds is given back: at once, or by whoever reconnects. Slots of
        which somebody still has a view are once that is gone.
        """
        with self._lock:
            session.end_writer(writer)
            session.accepted_long += accepted_long
            if session is not self._session:
                # Accounted for already, as gone: what came in after that is lost too.
                self._dropped_before += accepted_long
        if session.has_strays:
            self._give_back(session)

    def lease_ended(self, connection: Connection) -> None:
        """Note that a lease by a connection that is gone came to its end."""
        with self._lock:
            session = self._session
            if session is None or connection is session.connection:
                return
            session.end_idle_lanes()
        if session.has_strays:
            self._give_back(session)

    def _give_back(self, session: ClientSession) -> None:
        """Tell the daemon which slots and lanes nobody here uses any more."""
        connection = session.connection
        if connection is None or not connection.alive:
            return  # Whoever reconnects gives back whatever nobody uses.
        reason = "giving slots back was interrupted"
        told = False
        try:
            with self._lock:
                strays, session.strays = session.strays, []
                lanes, session.idle_lanes = session.idle_lanes, []
            if strays:
                self._tell(connection, protocol.Cancel(slots=reserved_slots(strays)))
            if lanes:
                self._tell(connection, protocol.Release(lanes=lanes))
            told = True
        except (UnavailableError, ProtocolError) as error:
            reason = f"slots could not be given back: {error}"
        finally:
            if not told:
                # The next connection names what is still used; all else goes back by that.
                connection.close(reason)

    def _tell(self, connection: Connection, request: Message) -> None:
        connection.call(request, time.monotonic() + GIVE_BACK_S)

    # -- inside --------------------------------------------------------------------------------

    def _no_daemon(self) -> str:
        return self._last_failure or f"the kvd daemon on {self.socket} left"

    def subscriber_hello(self) -> protocol.Hello:
        """Return how a subscription's connection opens its session."""
        return protocol.Hello(
            versions=list(protocol.VERSIONS),
            client=f"kvd python, process {os.getpid()}, events",
            map=False,
        )

    def _hello(self) -> protocol.Hello:
        session = self._session
        return protocol.Hello(
            versions=list(protocol.VERSIONS),
            client=f"kvd python, process {os.getpid()}",
            engine=self._engine,
            block_bytes=self._block_bytes,
            l1_bytes=self._l1_bytes,
            map=self._map_arena,
            resume=session.id if session is not None else None,
            keep_lanes=session.kept_lanes() if session is not None else None,
        )

    def _go_on(self, connection: Connection, deadline: float) -> None:
        """Go on with the session by a new connection, or with a new one. The lock is held."""
        session = self._session
        if session is None or session.id != connection.limits.session:
            self._forget_session()
            self._session = ClientSession(connection)
            return
        session.go_on(connection)
        # What the broken connection granted without our hearing of it goes back here.
        try:
            connection.call(
                protocol.Release(keep=session.kept_slots(), lanes=session.idle_lanes), deadline
            )
        except ProtocolError as error:
            connection.close(str(error))
            raise UnavailableError(f"the daemon refused: {error}") from error
        except BaseException:
            connection.close("the session could not be resumed")
            raise
        session.idle_lanes = []

    def _forget_session(self) -> None:
        """Keep an ended session's sums: what it did not confirm counts as dropped."""
        session, self._session = self._session, None
        if session is not None:
            self._durable_before += session.confirmed_durable
            self._dropped_before += session.confirmed_dropped + session.unconfirmed

    def _check_fork(self) -> None:
        """Start anew in a forked child: its parent's threads may have left the lock held."""
        if self._forks == forks.count:
            return
        inherited, self._connection = self._connection, None
        self._session = None
        self._lock = threading.Lock()
        self._count_lock = threading.Lock()
        self._next_attempt = 0.0
        self._backoff_s = FIRST_BACKOFF_S
        self._forks = forks.count
        if inherited is not None:
            inherited.abandon()
