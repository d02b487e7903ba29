"""The client in asyncio: the same surface, awaited."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import NoReturn

from kvd.async_calls import Calls
from kvd.async_handle import AsyncNamespaceHandle
from kvd.async_subscribing import AsyncSubscription
from kvd.client import Client
from kvd.errors import UnavailableError
from kvd.results import Flushed, Stats

THREADS = 16  # Calls that wait for the daemon at a time.
FLUSH_THREADS = 4  # A flush may wait for a minute; nothing else stands behind it.


class AsyncClient:
    """A client of the daemon on this host, for asyncio. See `Client`, whose calls it makes.

    Parameters
    ----------
    socket, timeout_s, block_bytes, l1_bytes, engine, map_arena
        As of `Client`.
    threads : int
        How many calls may wait for the daemon at a time.

    Notes
    -----
    Every call runs in a thread of its own, so none blocks the loop. A call that finds no thread
    free within `timeout_s` counts as one without a daemon: lookups miss, puts return False.
    Cancelling a call that has begun takes effect when it ends. For one event loop at a time.
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
        threads: int = THREADS,
    ) -> None:
        self._client = Client(
            socket,
            timeout_s=timeout_s,
            block_bytes=block_bytes,
            l1_bytes=l1_bytes,
            engine=engine,
            map_arena=map_arena,
        )
        self._calls = Calls(threads, timeout_s)
        self._flushes = Calls(FLUSH_THREADS, timeout_s)

    @property
    def socket(self) -> str:
        """Return the path of the daemon's socket."""
        return self._client.socket

    @property
    def refusals(self) -> Counter[str]:
        """Return how many blocks were not stored, by reason."""
        return self._client.refusals

    def namespace(self, name: str) -> AsyncNamespaceHandle:
        """Return a handle on a namespace. Cheap; nothing is sent."""
        return AsyncNamespaceHandle(self._client, self._calls, name)

    async def flush(self, timeout_s: float | None = None) -> Flushed:
        """Wait until every long block this client stored before is durable or dropped."""
        return await self._flushes.run(partial(self._client.flush, timeout_s), _busy)

    async def stats(self) -> Stats:
        """Return the daemon's counters; UnavailableError when none answers."""
        return await self._calls.run(self._client.stats, _busy)

    async def namespaces(self) -> list[str]:
        """Return the names the daemon knows; UnavailableError when none answers."""
        return await self._calls.run(self._client.namespaces, _busy)

    def subscribe(self, namespaces: Sequence[str] | None = None) -> AsyncSubscription:
        """Return events of blocks that come and go, for `async with` and `async for`."""
        return AsyncSubscription(
            self._client.socket,
            self._client.subscriber_hello(),
            self._client.timeout_s,
            namespaces,
        )

    async def close(self) -> None:
        """End the session. A later call opens a new one."""
        close: Callable[[], None] = self._client.close
        await self._calls.run(close, lambda: None)
        self._calls.close()
        self._flushes.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()


def _busy() -> NoReturn:
    raise UnavailableError("every thread of this client waits for the daemon")
