"""Events in asyncio: a connection of the loop's own, on which waiting can be cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import TracebackType

from kvd import codec, protocol
from kvd.errors import ProtocolError, UnavailableError
from kvd.frames import FrameReader
from kvd.protocol import Event, Message
from kvd.socket_path import no_session
from kvd.subscribing import EventQueue

RECEIVE_BYTES = 1 << 18


class AsyncSubscription:
    """Events of the daemon, in order; see `kvd.subscribing.Subscription`.

    `async with client.subscribe() as events` opens it, raising UnavailableError where no daemon
    answers; `async for` ends when the daemon leaves.
    """

    def __init__(
        self,
        path: str,
        hello: protocol.Hello,
        timeout_s: float,
        namespaces: Sequence[str] | None,
    ) -> None:
        self._path = path
        self._hello = hello
        self._timeout_s = timeout_s
        self._namespaces = None if namespaces is None else list(namespaces)
        self._frames = FrameReader()
        self._queue = EventQueue()
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    @property
    def lost(self) -> int:
        """Return how many events did not fit the queues: look anew when it grows."""
        return self._queue.lost

    async def next(self, timeout_s: float) -> Event | None:
        """Return the next event, or None when none came in time; UnavailableError at the end."""
        if not self._queue.events:
            try:
                await asyncio.wait_for(self._receive(), timeout_s)
            except asyncio.TimeoutError:
                return None
        return self._queue.events.popleft() if self._queue.events else None

    async def close(self) -> None:
        """Hear of nothing any more."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.transport.abort()

    async def __aenter__(self) -> AsyncSubscription:
        try:
            await asyncio.wait_for(self._open(), self._timeout_s)
        except (OSError, asyncio.TimeoutError, ProtocolError) as error:
            await self.close()
            # Python 3.10 has two kinds of TimeoutError.
            cause = TimeoutError() if isinstance(error, asyncio.TimeoutError) else error
            raise UnavailableError(no_session(self._path, cause)) from error
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def __aiter__(self) -> AsyncIterator[Event]:
        while True:
            while self._queue.events:
                yield self._queue.events.popleft()
            try:
                await self._receive()
            except UnavailableError:
                return

    async def _open(self) -> None:
        reader, writer = await asyncio.open_unix_connection(self._path)
        self._reader, self._writer = reader, writer
        self._hello.id = 1
        for request in (self._hello, protocol.Subscribe(id=2, namespaces=self._namespaces)):
            writer.write(codec.encode(request))
            answered = False
            while not answered:
                for message in await self._messages():
                    if isinstance(message, protocol.Error):
                        raise ProtocolError(message.code, message.message)
                    answered |= message.id == request.id
                    self._queue.take(message)

    async def _receive(self) -> None:
        """Wait for events. Cancelled, nothing of what came is lost."""
        while not self._queue.events:
            for message in await self._messages():
                self._queue.take(message)

    async def _messages(self) -> list[Message]:
        if self._reader is None or self._writer is None:
            raise UnavailableError("the subscription is not open")
        try:
            data = await self._reader.read(RECEIVE_BYTES)
            if not data:
                raise ConnectionResetError("end of stream")
            return [codec.decode_reply(body) for body in self._frames.feed(data)]
        except (OSError, ProtocolError) as error:
            raise UnavailableError(f"the daemon left: {error}") from error
