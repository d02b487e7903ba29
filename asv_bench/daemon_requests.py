"""One small request by the socket, beside a bare echo of the same frames."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket as sockets
import subprocess
import sys
import time
from collections.abc import Iterator

from daemon_rows import Row, make, percentile, ratio
from daemon_setup import SLOT, SPACE, START_S, Bench, Workers, daemon, fill, key_of

import kvd
from kvd import codec, protocol
from kvd.frames import HEADER

RUN_S = 0.25
CLIENTS = (1, 8)


class Echo(asyncio.Protocol):
    """Sends back whatever comes."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep where to write."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Answer."""
        self.transport.write(data)


class Caller:
    """A client process: one frame out, one frame back, blocking."""

    def __init__(self, **paths: str) -> None:
        request = protocol.Exists(namespace=SPACE, keys=[key_of(0)], id=7)
        self.frame = codec.encode(request)
        self.open = {name: sockets.socket(sockets.AF_UNIX) for name in paths}
        for name, path in paths.items():
            self.open[name].connect(path)
            self._call(
                self.open[name],
                codec.encode(
                    protocol.Hello(versions=list(protocol.VERSIONS), client="bench", map=False)
                ),
            )

    def run(self, name: str) -> list[float]:
        """Return the round trips' times in us."""
        connection, frame, times = self.open[name], self.frame, []
        end = time.perf_counter() + RUN_S
        before = time.perf_counter()
        while before < end:
            self._call(connection, frame)
            now = time.perf_counter()
            times.append((now - before) * 1e6)
            before = now
        return times

    def _call(self, connection: sockets.socket, frame: bytes) -> None:
        connection.sendall(frame)
        reply = connection.recv(65536)
        while len(reply) < HEADER.size + HEADER.unpack_from(reply)[0]:
            reply += connection.recv(65536)


def _caller(ours: str, echo: str) -> Caller:
    return Caller(ours=ours, echo=echo)


def requests(bench: Bench) -> list[Row]:
    """EXISTS of one key, p50 and p99 with 1 and with 8 clients."""
    rows = []
    with daemon(bench, "--max-bytes", "64M") as ours, _echo(bench) as echo:
        with kvd.Client(ours) as client:
            fill(client, [key_of(0)], SLOT)
        for count in CLIENTS:
            found: dict[str, list[list[float]]] = {"ours": [], "echo": []}
            with Workers(count, _caller, ours, echo) as workers:
                for number in bench.rounds(f"small requests, {count} clients"):
                    for name in ("ours", "echo") if number % 2 else ("echo", "ours"):
                        times = workers.all("run", name)
                        found[name].append([one for part in times for one in part])
            for share, must in ((0.5, 1.6), (0.99, 3.0)):
                sides = {
                    name: [percentile(times, share) for times in runs]
                    for name, runs in found.items()
                }
                rows.append(
                    make(
                        "requests",
                        f"EXISTS of 1 key, {count} client{'s' * (count > 1)}, p{share * 100:.0f}",
                        sides["ours"],
                        "us",
                        "ratio",
                        must,
                        beside=sides["echo"],
                        beside_what="asyncio echo",
                        combine=ratio,
                    )
                )
    return rows


@contextlib.contextmanager
def _echo(bench: Bench) -> Iterator[str]:
    path = str(bench.directory / "echo.sock")
    process = subprocess.Popen([sys.executable, __file__, path])
    try:
        deadline = time.monotonic() + START_S
        while not os.path.exists(path):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the echo server did not start")
            time.sleep(0.02)
        yield path
    finally:
        process.terminate()
        process.wait(START_S)


async def _serve(path: str) -> None:
    server = await asyncio.get_running_loop().create_unix_server(Echo, path)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1]))
