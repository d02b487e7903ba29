"""HTTP for those who watch: GET of a few fixed paths, in a thread and a loop of its own.

No path leads to a file. A request is bounded in bytes and in time, and so are the connections;
each is closed after its answer. The daemon's loop is only ever asked for its counters.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

MAX_REQUEST_BYTES = 8192
MAX_CONNECTIONS = 64
TIMEOUT_S = 5.0  # For the whole request, and again for taking the whole answer.
STOP_S = 1.0
REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
}
# The page has its script and style inside and talks to nobody else.
SAFETY = (
    "Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n"
    "Referrer-Policy: no-referrer\r\n"
    "Content-Security-Policy: default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src 'self'; frame-ancestors 'none'\r\n"
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Answer:
    """A status, a body and its type."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


Endpoint = Callable[[], Awaitable[Answer]]


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens there, or raise OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=MAX_CONNECTIONS)


class HttpThread:
    """Listens at once, serves from `start` on.

    Parameters
    ----------
    host, port
        Where; port 0 takes a free one.
    endpoints : mapping of str to Endpoint
        By exact path. They run in this thread's loop.
    every : (seconds, callable) or None
        Something to be called in this thread now and then.

    Raises
    ------
    OSError
        When the address cannot be had.
    """

    def __init__(
        self,
        host: str,
        port: int,
        endpoints: Mapping[str, Endpoint],
        every: tuple[float, Callable[[], None]] | None = None,
    ) -> None:
        self._endpoints = endpoints
        self._every = every
        self._open = 0
        self._socket = listen(host, port)
        self.host, self.port = host, int(self._socket.getsockname()[1])
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._running = threading.Event()
        # A daemon thread: the process may end while somebody is being answered.
        self._thread = threading.Thread(target=self._main, name="http", daemon=True)

    def start(self) -> None:
        """Serve."""
        self._thread.start()
        self._running.wait(TIMEOUT_S)

    def stop(self) -> None:
        """Stop listening and hang up."""
        if self._loop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(STOP_S)
        self._socket.close()

    def _main(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception:
            logger.exception("metrics and status are no longer served")

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        listener = await asyncio.start_server(
            self._connected, sock=self._socket, limit=MAX_REQUEST_BYTES
        )
        self._running.set()
        ticking = asyncio.ensure_future(self._call_every())
        await self._stop.wait()
        ticking.cancel()
        listener.close()

    async def _call_every(self) -> None:
        if self._every is None:
            return
        seconds, call = self._every
        while True:
            call()
            await asyncio.sleep(seconds)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            if self._open > MAX_CONNECTIONS:
                return
            without_body, answer = await self._read_and_answer(reader)
            head = (
                f"HTTP/1.1 {answer.status} {REASONS[answer.status]}\r\n"
                f"Content-Type: {answer.content_type}\r\nContent-Length: {len(answer.body)}\r\n"
                f"Connection: close\r\n{SAFETY}\r\n"
            )
            writer.transport.set_write_buffer_limits(0)  # drain: until all of it is taken.
            writer.write(head.encode() + (b"" if without_body else answer.body))
            await asyncio.wait_for(writer.drain(), TIMEOUT_S)
        except (asyncio.TimeoutError, OSError):
            writer.transport.abort()
        finally:
            self._open -= 1
            writer.close()

    async def _read_and_answer(self, reader: asyncio.StreamReader) -> tuple[bool, Answer]:
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), TIMEOUT_S)
        except asyncio.LimitOverrunError:
            return False, Answer(431, b"the request is too large\n")
        except asyncio.TimeoutError:
            return False, Answer(408, b"the request did not come in time\n")
        except asyncio.IncompleteReadError:
            return False, Answer(400, b"not a request\n")
        words = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return False, Answer(400, b"not a request\n")
        method, target, _ = words
        if method not in ("GET", "HEAD"):
            return False, Answer(405, b"only GET\n")
        endpoint = self._endpoints.get(target.partition("?")[0])
        if endpoint is None:
            known = ", ".join(self._endpoints)
            return method == "HEAD", Answer(404, f"nothing here; there are {known}\n".encode())
        try:
            return method == "HEAD", await asyncio.wait_for(endpoint(), TIMEOUT_S)
        except asyncio.TimeoutError:
            return method == "HEAD", Answer(503, b"the daemon did not answer in time\n")
        except Exception:
            logger.exception("answering %s failed", target[:100])
            return method == "HEAD", Answer(500, b"the daemon's log says more\n")
