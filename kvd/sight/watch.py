"""The endpoints: what the daemon says of itself, and how healthy it is."""

from __future__ import annotations

import asyncio
import importlib.resources
import json
import time
from collections import deque
from typing import Any

from kvd.durations import Histogram
from kvd.results import Stats, Status
from kvd.server import Server
from kvd.sight.families import CONTENT_TYPE, render
from kvd.sight.http import Answer, HttpThread

HISTORY_EVERY_S = 5.0
HISTORY_POINTS = 720  # An hour.
STALE_S = 2.0  # As clients: a heartbeat older than this is none.
MAX_NAMESPACES = 200  # On the page.
JSON = "application/json"


class Watch:
    """What is served over HTTP, from before the region opens until the process ends.

    Parameters
    ----------
    host, port
        Where.
    loop
        The daemon's, where its counters are gathered.
    """

    def __init__(self, host: str, port: int, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._server: Server | None = None
        self._state = "starting"
        self._points: deque[tuple[float, int, int, int]] = deque(maxlen=HISTORY_POINTS)
        self._page = importlib.resources.files(__package__).joinpath("status.html").read_bytes()
        self.http = HttpThread(
            host,
            port,
            {
                "/": self._status_page,
                "/metrics": self._metrics,
                "/healthz": self._healthz,
                "/readyz": self._readyz,
                "/status.json": self._status,
            },
            (HISTORY_EVERY_S, self._note_history),
        )
        named = f"[{host}]" if ":" in host else host
        self.url = f"http://{named}:{self.http.port}"
        self.http.start()

    def serving(self, server: Server) -> None:
        """Say that clients are served from now on."""
        self._server = server
        self._state = "serving"

    def stopping(self) -> None:
        """Say that no more clients are served."""
        self._state = "stopping"

    def close(self) -> None:
        """Serve no more."""
        self.http.stop()

    # -- health ----------------------------------------------------------------------------------

    def not_alive(self) -> str:
        """Return why the daemon hangs, or nothing."""
        if self._server is None or self._state != "serving":
            return ""
        age_s = time.monotonic() - self._server.last_tick
        return f"no heartbeat for {age_s:.1f} s" if age_s > STALE_S else ""

    def not_ready(self) -> str:
        """Return why an engine would not be served by both tiers, or nothing."""
        if self._server is None or self._state != "serving":
            return self._state
        long_tier = self._server.cache.long
        if long_tier is not None and long_tier.trouble is not None:
            return f"the long tier failed: {long_tier.trouble}"
        return self.not_alive()

    async def _healthz(self) -> Answer:
        return _verdict(self.not_alive())

    async def _readyz(self) -> Answer:
        return _verdict(self.not_ready())

    # -- numbers ---------------------------------------------------------------------------------

    async def _gather(self, server: Server) -> tuple[Stats, Status]:
        async def both() -> tuple[Stats, Status]:
            return await server.stats(), await server.status()

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(both(), self._loop))

    async def _metrics(self) -> Answer:
        server = self._server
        if server is None:
            return Answer(503, b"starting\n")
        long_tier = server.cache.long
        moves = {
            "promotion": long_tier.promotion_latency.histogram if long_tier else Histogram(),
            "write_back": long_tier.write_latency.histogram if long_tier else Histogram(),
        }
        stats, status = await self._gather(server)
        return Answer(200, render(stats, status, server.times, moves), CONTENT_TYPE)

    async def _status(self) -> Answer:
        document: dict[str, Any] = {
            "state": self._state,
            "alive": not self.not_alive(),
            "ready": not self.not_ready(),
            "why": self.not_alive() or self.not_ready(),
            "time": time.time(),
        }
        server = self._server
        if server is not None:
            stats, status = await self._gather(server)
            on_disk = status.per_namespace_bytes
            names = set(on_disk) | set(server.cache.namespaces.names())
            largest = sorted(names, key=lambda name: (-on_disk.get(name, 0), name))
            document["stats"] = stats.to_dict()
            document["soft_pressure"] = status.soft_pressure
            document["namespaces"] = [
                [name, on_disk.get(name, 0)] for name in largest[:MAX_NAMESPACES]
            ]
            document["history"] = [list(point) for point in self._points]
        return Answer(200, json.dumps(document).encode(), JSON)

    async def _status_page(self) -> Answer:
        return Answer(200, self._page, "text/html; charset=utf-8")

    def _note_history(self) -> None:
        """Note lookups and hits so far; reading three numbers of another thread's is safe."""
        server = self._server
        if server is None:
            return
        cache = server.cache
        in_long = cache.long.counters.hits if cache.long is not None else 0
        self._points.append(
            (time.time(), cache.counters.gets, cache.memory.counters.hits, in_long)
        )


def _verdict(why_not: str) -> Answer:
    return Answer(503, f"{why_not}\n".encode()) if why_not else Answer(200, b"ok\n")
