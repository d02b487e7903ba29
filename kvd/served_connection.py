"""One client's connection: frames in, answers out, in order, with the arena passed along."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Coroutine
from typing import Any

from kvd import codec, protocol
from kvd.cache import MAX_INLINE_BYTES
from kvd.dispatch import HANDLERS
from kvd.errors import ProtocolError
from kvd.events import Feed
from kvd.frames import (
    MAX_OPENING_BYTES,
    MAX_PLAIN_BYTES,
    FrameReader,
)
from kvd.peers import Peer
from kvd.process import peer_pidfd
from kvd.protocol import Message
from kvd.self_references import forget_itself
from kvd.server import Server
from kvd.session import RESERVATION_S, Session
from kvd.sessions import MAX_SESSIONS
from kvd.version import __version__

MAX_OUTSTANDING = 1024  # Requests of one connection that wait for the disk or a flush.

logger = logging.getLogger(__name__)


class ServedConnection(asyncio.BufferedProtocol):
    """One client's connection: frames in, replies out, in any order.

    All connections receive into one buffer of the server's, which is read before the loop goes
    on: a fresh one for each frame costs a mapping and its pages.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._frames = FrameReader(MAX_OPENING_BYTES)
        self._transport: asyncio.Transport | None = None
        self._session: Session | None = None
        self._peer = Peer()
        self._client_is_behind = False
        self._outstanding = 0
        self._inline_bytes = 0
        self._backlog: deque[bytes | memoryview] = deque()
        self._feed: Feed | None = None
        self._lane: tuple[Session, int] | None = None
        self._client_closed = False

    # -- asyncio's calls -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection, if its user may and there is room."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        server = self._server
        server.connections.add(self)
        self._peer = Peer.of(transport.get_extra_info("socket"))
        refusal = server.access.refusal(self._peer)
        if refusal is not None:
            logger.warning("refused a connection: %s (process %d)", refusal, self._peer.pid)
            self._refuse(0, "not_allowed", refusal)
            transport.close()
        elif len(server.connections) > server.max_connections:
            self._refuse(
                0,
                "limit",
                f"{server.max_connections} connections are open already, which is what the "
                f"daemon's limit of open files allows, at most {MAX_SESSIONS}",
            )
            transport.close()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where to receive."""
        return self._server.receiving

    def buffer_updated(self, nbytes: int) -> None:
        """Answer every complete frame."""
        try:
            bodies = self._frames.feed(self._server.receiving[:nbytes])
        except ProtocolError as error:
            self._refuse(0, error.code, error.message)
            self.hang_up()
            return
        self._backlog.extend(bodies)
        self._work()
        if self._backlog and isinstance(self._backlog[-1], memoryview):
            self._backlog.append(bytes(self._backlog.pop()))  # What is received next lies there.
        self._note_held()

    def eof_received(self) -> None:
        """Note that the client closed its end; the transport then closes by itself."""
        self._client_closed = True

    def connection_lost(self, exc: Exception | None) -> None:
        """End the session; a closed socket is not a dead process."""
        transport, self._transport = self._transport, None
        if transport is not None:
            forget_itself(transport)
        if self._lane is not None and (
            self._client_closed or isinstance(exc, ConnectionResetError | BrokenPipeError)
        ):
            self._server.lanes.client_closed(*self._lane)
        self._lane = None  # With its session, which may know of this connection.
        self._server.connections.discard(self)
        self._server.held.note(self, 0)
        session, self._session = self._session, None
        if session is not None and session.connection is self:
            self._server.sessions.leave(session)
        self._stop_events()

    def pause_writing(self) -> None:
        """Take no more requests while the client does not read its replies."""
        self._client_is_behind = True

    def resume_writing(self) -> None:
        """Go on taking requests."""
        self._client_is_behind = False
        self._note_held()
        self._work()
        if self._feed is not None:
            self._feed.send()

    def hang_up(self) -> None:
        """Close after what is already written."""
        if self._transport is not None:
            self._transport.close()

    def leave_session(self) -> None:
        """Hang up at once: the session goes on by another connection, or its process ended."""
        self._session = None
        self._frames.clear()
        self._backlog.clear()
        if self._transport is not None:
            self._transport.abort()

    def drop(self, reason: str) -> None:
        """Hang up at once, with nothing more sent or kept."""
        self._server.errors += 1
        logger.warning("the connection of process %d is dropped: %s", self._peer.pid, reason)
        self._frames.clear()
        self._backlog.clear()
        if self._transport is not None:
            self._transport.abort()

    def _note_held(self) -> None:
        transport = self._transport
        if transport is not None and not transport.is_closing():
            held_bytes = self._frames.pending_bytes + transport.get_write_buffer_size()
            self._server.held.note(self, held_bytes)

    # -- requests ------------------------------------------------------------------------------

    def _work(self) -> None:
        """Serve what has come in, as far as the client keeps up with its replies."""
        transport = self._transport
        while self._backlog and not self._is_full():
            if transport is None or transport.is_closing():
                return
            self._serve(self._backlog.popleft())
        if transport is None or transport.is_closing():
            return
        if self._is_full():
            transport.pause_reading()
        else:
            transport.resume_reading()

    def _is_full(self) -> bool:
        return (
            self._client_is_behind
            or self._outstanding >= MAX_OUTSTANDING
            or self._inline_bytes >= MAX_INLINE_BYTES
        )

    def _serve(self, body: bytes | memoryview) -> None:
        try:
            request = codec.decode_request(body)
        except codec.Refused as refused:
            self._refuse(refused.request_id, refused.code, refused.message)
            return
        try:
            self._answer(request)
        except ProtocolError as error:
            self._refuse(request.id, error.code, error.message)
        except Exception:
            logger.exception("answering %s failed", type(request).__name__)
            self._refuse(request.id, "internal", "the daemon's log says more")

    def _answer(self, request: Message) -> None:
        if isinstance(request, protocol.Ping):
            self._send(protocol.Ok(id=request.id))
        elif isinstance(request, protocol.Hello):
            self._hello(request)
        elif self._session is None:
            raise ProtocolError("hello_required", "the first request must be HELLO")
        elif isinstance(request, protocol.Bye):
            session, self._session = self._session, None
            self._server.sessions.end(session)
            self._send(protocol.Ok(id=request.id))
            self.hang_up()
        elif isinstance(request, protocol.Subscribe):
            self._subscribe(request)
        else:
            kind, started = type(request), time.perf_counter()
            answer = HANDLERS[kind](self._server, self._session, request)
            if isinstance(answer, Message):
                self._send(answer)
                self._server.times.from_memory[kind].add(time.perf_counter() - started)
            else:
                inline_bytes = self._inline_bytes_of(request)
                self._outstanding += 1
                self._inline_bytes += inline_bytes
                self._server.run(self._finish(request.id, answer, inline_bytes, kind, started))

    def _inline_bytes_of(self, request: Message) -> int:
        """Return how much a lookup may come to hold until it is answered."""
        if isinstance(request, protocol.Get | protocol.BatchGet) and request.inline:
            keys = len(request.keys) if isinstance(request, protocol.BatchGet) else 1
            largest = self._server.cache.memory.classes.largest_bytes
            return min(keys * largest, MAX_INLINE_BYTES)
        return 0

    async def _finish(
        self,
        request_id: int,
        answer: Coroutine[Any, Any, Message],
        inline_bytes: int,
        kind: type[Message],
        started: float,
    ) -> None:
        try:
            self._send(await answer)
        except ProtocolError as error:
            self._refuse(request_id, error.code, error.message)
        except Exception:
            logger.exception("answering request %d failed", request_id)
            self._refuse(request_id, "internal", "the daemon's log says more")
        finally:
            self._server.times.waited[kind].add(time.perf_counter() - started)
            was_full = self._is_full()
            self._outstanding -= 1
            self._inline_bytes -= inline_bytes
            if self._backlog or was_full:
                self._work()

    def _send(self, reply: Message) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(codec.encode(reply))
            if self._client_is_behind:
                self._note_held()

    def _refuse(self, request_id: int, code: str, message: str) -> None:
        self._server.errors += 1
        self._send(protocol.Error(id=request_id, code=code, message=message))

    # -- events --------------------------------------------------------------------------------

    def _subscribe(self, request: protocol.Subscribe) -> None:
        self._stop_events()
        feed = Feed(request.id, request.namespaces, self._push)
        self._server.cache.events.add(feed)
        self._feed = feed
        self._send(protocol.Ok(id=request.id))

    def _push(self, events: protocol.Events) -> bool:
        """Send events, unless the client does not keep up: then they wait in its queue."""
        if self._client_is_behind:
            return False
        self._send(events)
        return True

    def _stop_events(self) -> None:
        if self._feed is not None:
            self._server.cache.events.remove(self._feed)
            self._feed = None

    # -- opening -------------------------------------------------------------------------------

    def _hello(self, request: protocol.Hello) -> None:
        server = self._server
        if self._session is not None:
            raise ProtocolError("bad_request", "this session is open already")
        version = next((v for v in request.versions if v in protocol.VERSIONS), None)
        if version is None:
            raise ProtocolError(
                "version_unsupported",
                f"this daemon speaks versions {list(protocol.VERSIONS)}, "
                f"the client {request.versions[:8]}",
            )
        resumed = self._resume(request.resume)
        session = resumed
        if session is None:
            peer = self._peer
            connected = self._transport.get_extra_info("socket") if self._transport else None
            pidfd = peer_pidfd(connected, peer.pid) if connected is not None else -1
            session = server.sessions.open(
                self, request.client[:256], request.engine, peer.pid, pidfd
            )
        self._session = session
        if resumed is not None and request.keep_lanes is not None:
            # Also those of connections that were lost before the client had heard of them.
            server.lanes.release(session, set(session.lanes).difference(request.keep_lanes))
        slot_bytes = server.arena.slot_bytes
        if request.block_bytes:
            slot_bytes = server.note_block_size(request.client, request.block_bytes)
        lane = lane_fd = None
        if request.map:
            try:
                lane, lane_fd = server.lanes.open(session, slot_bytes)
                self._lane = (session, lane.id)
            except ProtocolError:
                self._session = None
                server.sessions.leave(session)
                raise
        server.sizing.announced(session.client, request.l1_bytes)
        self._frames.max_frame_bytes = max_frame_bytes = server.max_frame_bytes(slot_bytes)
        self._frames.max_plain_bytes = MAX_PLAIN_BYTES
        self._send(
            protocol.HelloAck(
                id=request.id,
                version=version,
                session=session.id,
                resumed=resumed is not None,
                server=__version__,
                pid=os.getpid(),
                max_frame_bytes=max_frame_bytes,
                max_batch_keys=protocol.MAX_BATCH_KEYS,
                max_batch_blocks=server.max_batch_blocks(slot_bytes),
                max_value_bytes=server.cache.memory.classes.largest_bytes,
                reservation_s=RESERVATION_S,
                arena=server.arena.info(lane) if lane is not None else None,
            )
        )
        if lane is not None and lane_fd is not None:
            try:
                passed = self._pass_arena(request.write, lane_fd)
            finally:
                os.close(lane_fd)
            if not passed:
                # Nobody can lease anything there: it must not count against the session.
                self._lane = None
                server.lanes.release(session, [lane.id])

    def _resume(self, session_id: int | None) -> Session | None:
        """Take an earlier session of the same process over, from its connection if need be."""
        if session_id is None:
            return None
        sessions = self._server.sessions
        before = sessions.connection_of(session_id)
        session = sessions.resume(self, session_id, self._peer.pid)
        if session is not None and before is not None:
            before.leave_session()  # Its end is still to be read, behind this.
        return session

    def _pass_arena(self, write: bool, lane_fd: int) -> bool:
        """Send the descriptors with the ARENA frame; say whether the client may have got them."""
        transport = self._transport
        assert transport is not None
        if transport.get_write_buffer_size():
            # Then the frame would overtake HELLO_ACK. A client that reads nothing gets nothing.
            transport.abort()
            return False
        arena = self._server.arena
        try:
            data_fd = arena.data_fd if write else arena.readonly_data_fd()
        except OSError as error:
            logger.warning("the arena could not be opened for reading: %s", error)
            self._send(protocol.Arena(fds=[]))
            return False
        frame = codec.encode(protocol.Arena(fds=protocol.ARENA_FDS))
        try:
            with transport.get_extra_info("socket").dup() as connected:
                sent = socket.send_fds(connected, [frame], [arena.index_fd, data_fd, lane_fd])
            if sent != len(frame):
                transport.abort()
            return True
        except OSError as error:
            # A client that left already was interrupted, and knows.
            left = isinstance(error, BrokenPipeError | ConnectionResetError)
            level = logging.DEBUG if left else logging.WARNING
            pid = self._peer.pid
            logger.log(level, "the arena could not be passed to process %d: %s", pid, error)
            transport.abort()
            return False
        finally:
            if not write:
                os.close(data_fd)
