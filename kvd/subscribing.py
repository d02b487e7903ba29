"""Events as a client sees them: which blocks come and go, for routers that follow prefixes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from kvd import protocol
from kvd.connection import Connection
from kvd.errors import ProtocolError, UnavailableError
from kvd.protocol import Event, Message

if TYPE_CHECKING:
    from kvd.client import Client

MAX_QUEUED = 65536  # Beyond it the oldest are lost: nobody asks for them.


class EventQueue:
    """Events that came and that nobody asked for yet."""

    def __init__(self) -> None:
        self.events: deque[Event] = deque()
        self.lost = 0

    def take(self, message: Message) -> None:
        """Queue what an EVENTS message tells; others are none of ours."""
        if not isinstance(message, protocol.Events):
            return
        self.lost += message.lost
        self.events.extend(message.events)
        while len(self.events) > MAX_QUEUED:
            self.lost += max(1, len(self.events.popleft().keys))


class EventConnection(Connection):
    """A connection of its own: what is pushed never waits behind replies, nor they behind it."""

    def __init__(self, path: str, hello: protocol.Hello, deadline: float) -> None:
        self.queue = EventQueue()
        super().__init__(path, hello, deadline)

    def receive_events(self, deadline: float) -> None:
        """Wait until there are events.

        Raises
        ------
        TimeoutError, UnavailableError
            The deadline passed; the daemon left.
        """
        while not self.queue.events:
            self._require_alive()
            self._receive(deadline)

    def _deliver(self, message: Message) -> None:
        self.queue.take(message)
        super()._deliver(message)


class Subscription:
    """Events of the daemon, in order; made by `Client.subscribe`.

    Iterating waits for the next event without end, while the daemon is there; `next(timeout_s)`
    waits so long. It does not reconnect: whoever follows a state has to look anew after a gap.

    Notes
    -----
    For one thread. `stored` on "memory" means readable at once; on "long": durable, also for a
    block that was there before. `removed` on "long" is told for deletions; what the long tier
    evicts or finds expired is not. `cleared` names a namespace whose blocks all left that tier;
    those in memory are told one by one.
    """

    def __init__(self, client: Client, namespaces: Sequence[str] | None) -> None:
        self._namespaces = None if namespaces is None else list(namespaces)
        deadline = time.monotonic() + client.timeout_s
        self._connection = EventConnection(client.socket, client.subscriber_hello(), deadline)
        try:
            request = protocol.Subscribe(namespaces=self._namespaces)
            self._connection.call(request, deadline)
        except ProtocolError as error:
            self.close()
            raise UnavailableError(f"the daemon refused: {error}") from error
        except BaseException:
            self.close()
            raise

    @property
    def lost(self) -> int:
        """Return how many events did not fit the queues: look anew when it grows."""
        return self._connection.queue.lost

    def next(self, timeout_s: float) -> Event | None:
        """Return the next event, or None when none came in time.

        Raises
        ------
        UnavailableError
            When the daemon left; nothing comes any more.
        """
        queue = self._connection.queue
        try:
            self._connection.receive_events(time.monotonic() + timeout_s)
        except TimeoutError:
            return None
        return queue.events.popleft()

    def __iter__(self) -> Iterator[Event]:
        while True:
            try:
                event = self.next(1.0)
            except UnavailableError:
                return
            if event is not None:
                yield event

    def close(self) -> None:
        """Hear of nothing any more."""
        self._connection.close()

    def __enter__(self) -> Subscription:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
