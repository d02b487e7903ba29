"""A client's connection: many threads ask, one of them reads for all.

Whichever waiting thread finds nobody reading reads until its own reply is there, handing the
others theirs. So one socket serves any number of threads without a thread of its own.

A signal handler may raise anywhere in here. So there are only locks written in C, every wait
has a bound, and whatever leaves a call unexpectedly breaks the connection: nobody then relies
on what it left half done.
"""

from __future__ import annotations

import itertools
import os
import select
import socket
import threading
import time

from kvd import codec, protocol
from kvd.errors import ProtocolError, UnavailableError
from kvd.frames import HEADER, MAX_FRAME_BYTES, FrameReader
from kvd.local_index import LocalIndex
from kvd.mapping import HEARTBEAT_S, ArenaMapping
from kvd.protocol import Message
from kvd.socket_path import no_session

RECEIVE_BYTES = 1 << 18
LOOK_UP_S = 0.1  # Who waits looks so often whether an interrupted thread broke the connection.


class _Waiter:
    """One request that waits for its reply."""

    __slots__ = ("_woken", "reply")

    def __init__(self) -> None:
        self.reply: Message | None = None
        self._woken = threading.Lock()
        self._woken.acquire()

    def wake(self) -> None:
        if self._woken.locked():  # Else woken already, and has not looked yet.
            try:
                self._woken.release()
            except RuntimeError:
                pass  # Another thread did it meanwhile.

    def wait(self, timeout_s: float) -> None:
        """Wait until woken, for whatever reason, or for so long."""
        self._woken.acquire(timeout=timeout_s)


class Connection:
    """One open session.

    Parameters
    ----------
    path : str
        The daemon's socket.
    hello : protocol.Hello
        How to open the session.
    deadline : float
        time.monotonic() by which it must be open.

    Raises
    ------
    UnavailableError
        When no session could be opened.

    Attributes
    ----------
    mapping, local : ArenaMapping and LocalIndex, or None
        The arena, and lookups in it; None where it was not asked for, or could not be had.
    inline_because : str or None
        Why it could not be had.
    broken : str or None
        Why it is of no use any more.

    Notes
    -----
    Safe from any thread of the process that made it.
    """

    def __init__(self, path: str, hello: protocol.Hello, deadline: float) -> None:
        self.mapping: ArenaMapping | None = None
        self.inline_because: str | None = None
        self.local: LocalIndex | None = None
        self.broken: str | None = None
        self._ids = itertools.count(1)
        self._send_lock = threading.Lock()
        self._read_lock = threading.Lock()
        self._waiting: dict[int, _Waiter] = {}
        self._received_at = 0.0
        self._frames = FrameReader()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(_left(deadline))
            self._socket.connect(path)
            self.limits = self._open(hello, deadline)
            # A second object for the same socket: each side sets its own timeout.
            self._sender = self._socket.dup()
        except (OSError, ProtocolError) as error:
            self._socket.close()
            raise UnavailableError(no_session(path, error)) from error
        except BaseException:
            # Also where an interrupted dup() left a descriptor: the session ends all the same.
            self._shut_down()
            self._socket.close()
            raise

    @property
    def alive(self) -> bool:
        """Return whether nothing broke yet."""
        return self.broken is None

    @property
    def is_stuck(self) -> bool:
        """Return whether the daemon's heartbeat is too old; notices too if it has left."""
        if self.mapping is None or self.mapping.heartbeat_age_s() <= HEARTBEAT_S:
            return False
        self._notice_end()
        return True

    def is_there(self) -> bool:
        """Return whether the daemon still holds its end: a system call, for lookups."""
        return not self.is_stuck and self._notice_end() and self.broken is None

    def _notice_end(self) -> bool:
        """Break the connection if the other end is closed; return whether it is not."""
        poll = select.poll()
        try:
            poll.register(self._socket.fileno(), select.POLLRDHUP)
            if poll.poll(0):
                self.close("the daemon left")
                return False
        except (OSError, ValueError):
            return False  # Closed by another thread.
        return True

    def call(self, request: Message, deadline: float) -> Message:
        """Send a request and return its reply.

        Raises
        ------
        UnavailableError
            When the daemon left or the deadline passed.
        ProtocolError
            When the daemon answered ERROR.
        """
        request_id = next(self._ids)
        request.id = request_id
        frame = codec.encode(request)
        waiter = _Waiter()
        started = time.monotonic()
        try:
            self._waiting[request_id] = waiter
            self._require_alive()
            self._send(frame, deadline)
            reply = self._await(waiter, deadline)
        except TimeoutError as error:
            if self._received_at < started:
                # Not one byte for anybody: take the daemon for stuck, and miss from now on.
                self.close("the daemon does not answer")
            raise UnavailableError("the daemon did not answer in time") from error
        except UnavailableError:
            raise
        except BaseException:
            self.close("a call was interrupted")
            raise
        finally:
            self._waiting.pop(request_id, None)
        if isinstance(reply, protocol.Error):
            raise ProtocolError(reply.code, reply.message)
        return reply

    def close(self, reason: str = "closed") -> None:
        """Break the connection: whoever waits is told."""
        if self.broken is None:
            self.broken = reason
        if self.local is not None:
            self.local.stop()
        self._wake_all()
        self._shut_down()
        self._let_go()

    def abandon(self) -> None:
        """Close this process's copy after a fork; the parent's session goes on."""
        self.broken = "forked"
        if self.local is not None:
            self.local.stop()
        self._close_descriptors()

    # -- sending and receiving -----------------------------------------------------------------

    def _send(self, frame: bytes, deadline: float) -> None:
        while not self._send_lock.acquire(timeout=min(LOOK_UP_S, _left(deadline))):
            self._require_alive()
        try:
            self._require_alive()
            self._sender.settimeout(_left(deadline))
            self._sender.sendall(frame)
        except OSError as error:
            # Also a timeout: half a frame may be out, so nothing can follow it.
            self.close(f"sending failed: {error}")
            raise UnavailableError(f"the daemon left: {error}") from error
        except UnavailableError:
            raise
        except BaseException:
            # Before the lock is free: whoever sends next must find the connection broken.
            self.close("sending was interrupted")
            raise
        finally:
            self._send_lock.release()
            if self.broken is not None:
                self._let_go()

    def _await(self, waiter: _Waiter, deadline: float) -> Message:
        while waiter.reply is None:
            self._require_alive()
            if self._read_lock.acquire(blocking=False):
                try:
                    while waiter.reply is None:
                        self._require_alive()
                        self._receive(deadline)
                finally:
                    self._read_lock.release()
                    # One of the others reads on; each looks by itself whether that is it.
                    self._wake_all()
                    if self.broken is not None:
                        self._let_go()
            else:
                waiter.wait(min(LOOK_UP_S, _left(deadline)))
        return waiter.reply

    def _receive(self, deadline: float) -> None:
        """Receive what there is and hand out the replies in it."""
        try:
            self._socket.settimeout(_left(deadline))
            data = self._socket.recv(RECEIVE_BYTES)
            if not data:
                raise ConnectionResetError("end of stream")
            self._received_at = time.monotonic()
            for body in self._frames.feed(data):
                self._deliver(codec.decode_reply(body))
        except TimeoutError:
            raise
        except (OSError, ProtocolError) as error:
            self.close(f"receiving failed: {error}")
            raise UnavailableError(f"the daemon left: {error}") from error
        except BaseException:
            # Bytes may be lost that were taken: before the lock is free, break the connection.
            self.close("receiving was interrupted")
            raise

    def _deliver(self, message: Message) -> None:
        waiter = self._waiting.get(message.id)
        if waiter is not None:
            waiter.reply = message
            waiter.wake()

    def _wake_all(self) -> None:
        for waiter in list(self._waiting.values()):
            waiter.wake()

    def _require_alive(self) -> None:
        if self.broken is not None:
            raise UnavailableError(f"the connection is gone: {self.broken}")

    def _shut_down(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def _let_go(self) -> None:
        """Close the descriptors, unless a thread is in a call on them: then it does so later.

        A closed number goes to the next socket at once, and a thread that is about to poll it
        would wait there for what never comes.
        """
        if self._read_lock.acquire(blocking=False):
            try:
                if self._send_lock.acquire(blocking=False):
                    try:
                        self._close_descriptors()
                    finally:
                        self._send_lock.release()
            finally:
                self._read_lock.release()

    def _close_descriptors(self) -> None:
        self._socket.close()
        sender = getattr(self, "_sender", None)
        if sender is not None:
            sender.close()

    # -- opening -------------------------------------------------------------------------------

    def _open(self, hello: protocol.Hello, deadline: float) -> protocol.HelloAck:
        self._socket.settimeout(_left(deadline))
        try:
            self._socket.sendall(codec.encode(hello))
        except (BrokenPipeError, ConnectionResetError):
            pass  # Refused already: why is there to be read.
        reply = codec.decode_reply(self._read_frame(deadline))
        if isinstance(reply, protocol.Error):
            raise ProtocolError(reply.code, reply.message)
        if not isinstance(reply, protocol.HelloAck):
            raise ProtocolError("malformed", f"HELLO was answered by {type(reply).__name__}")
        if reply.arena is not None:
            self._receive_arena(reply.arena, deadline)
        return reply

    def _receive_arena(self, info: protocol.ArenaInfo, deadline: float) -> None:
        """Take the descriptors that ride on the first byte of the ARENA frame."""
        self._socket.settimeout(_left(deadline))
        start, fds, _, _ = socket.recv_fds(
            self._socket, HEADER.size, len(protocol.ARENA_FDS), socket.MSG_CMSG_CLOEXEC
        )
        try:
            body = self._read_frame(deadline, start)
            message = codec.decode_reply(body)
            if not isinstance(message, protocol.Arena):
                raise ProtocolError("malformed", "HELLO_ACK was not followed by the arena")
            if message.fds != protocol.ARENA_FDS or len(fds) != len(message.fds):
                # A sandbox, or another container: values then go through the socket.
                self.inline_because = f"{len(fds)} descriptors came, not the arena's"
                return
            try:
                self.mapping = ArenaMapping(info, *fds)
            except OSError as error:
                self.inline_because = f"the arena cannot be mapped: {error}"
                return
            lane_id = info.lane.id if info.lane is not None else 0
            self.local = LocalIndex(self.mapping, lane_id)
        finally:
            for fd in fds:
                os.close(fd)

    def _read_frame(self, deadline: float, start: bytes = b"") -> bytes:
        """Read one frame and not a byte more: descriptors may ride on the next."""
        header = start + self._read_exactly(HEADER.size - len(start), deadline)
        (length,) = HEADER.unpack(header)
        if length > MAX_FRAME_BYTES:
            raise ProtocolError("frame_too_large", f"the daemon announces {length} bytes")
        return self._read_exactly(length, deadline)

    def _read_exactly(self, size: int, deadline: float) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            self._socket.settimeout(_left(deadline))
            data = self._socket.recv(size - len(parts))
            if not data:
                raise ConnectionResetError("the daemon hung up")
            parts += data
        return bytes(parts)


def _left(deadline: float) -> float:
    """Return the time left; 0 would mean non-blocking to a socket, so never that."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the deadline has passed")
    return left
