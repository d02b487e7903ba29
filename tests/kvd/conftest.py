"""Fixtures: real daemons as child processes, each on its own socket and region; and rigs."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvd
from kvd import protocol
from kvd.__main__ import main
from kvd.arena import Arena
from kvd.cache import Cache
from kvd.long_paths import LongPaths
from kvd.long_tier import LongTier
from kvd.memory_tier import MemoryTier
from kvd.namespaces import Namespaces
from kvd.session import Session
from kvd.storing import Keep
from tablespace import checksum64

START_S = 30.0
STOP_S = 30.0
POLL_S = 0.005
RIG_SLOT_BYTES = 4096
RIG_SLOTS = 64


def poll(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    """Wait, with a bound, until a condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {timeout_s} s: {condition}")
        time.sleep(POLL_S)


class DaemonProcess:
    """A daemon under test."""

    def __init__(self, directory: Path, *flags: str, disk: bool = True) -> None:
        self.socket = str(directory / "kvd.sock")
        self.long_path = directory / "long"
        self.log_path = directory / "daemon.log"
        self.flags = [
            "--socket",
            self.socket,
            "--max-bytes",
            "8M",
            "--tablespace-slot-bytes",
            "64K",
        ]
        if disk:
            self.flags += ["--long-path", str(self.long_path), "--long-bytes", "16M"]
        self.flags += flags
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> DaemonProcess:
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kvd", *self.flags], stdout=log, stderr=log
            )
        process = self.process

        def serving() -> bool:
            if process.poll() is not None:
                pytest.fail(f"the daemon ended with {process.returncode}:\n{self.log}")
            try:
                with self.client() as client:
                    return client.stats().pid == process.pid
            except kvd.UnavailableError:
                return False

        poll(serving, START_S)
        return self

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def client(self, **options: object) -> kvd.Client:
        return kvd.Client(self.socket, **options)  # type: ignore[arg-type]

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        assert self.process.wait(STOP_S) == -signal.SIGKILL

    def stop(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_S)

    def clean_up(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(STOP_S)


class Gate:
    """Stops a call of the long tier before and after its work until it is told to go on."""

    def __init__(self, long_tier, name):
        self.entered = threading.Event()
        self.opened = threading.Event()
        self.calls = 0
        self._call = getattr(long_tier, name)
        setattr(long_tier, name, self)

    def __call__(self, *args, **kwargs):
        self.calls += 1
        result = self._call(*args, **kwargs)
        self.entered.set()
        assert self.opened.wait(20)
        return result

    async def wait_entered(self):
        assert await asyncio.get_running_loop().run_in_executor(None, self.entered.wait, 20)


class Rig:
    """A cache over a real region or several, in this process and loop, with gates at the disk.

    `long` is the first path, `tiers` are all.
    """

    def __init__(self, directory, paths=1, followed=(), timeout_s=2.0, **options):
        places = [directory] if paths == 1 else [directory / f"p{at}" for at in range(paths)]
        self.tiers = [LongTier(place, 1 << 20, RIG_SLOT_BYTES, "auto") for place in places]
        self.long = self.tiers[0]
        for tier in self.tiers:
            tier.open_region()
        self.arena = Arena(RIG_SLOTS * RIG_SLOT_BYTES, RIG_SLOT_BYTES)
        self.memory = MemoryTier(self.arena, writes_back=True)
        self.memory.add_slabs(0, self.arena.geometry.slab_count)
        self.paths = LongPaths(self.tiers, followed, timeout_s=timeout_s)
        self.cache = Cache(self.memory, Namespaces(places), self.paths, **options)
        self.session = Session(1)
        self.region = directory

    def gate(self, name, tier=None):
        return Gate(tier or self.long, name)

    def home(self, key):
        return self.paths.home(self.cache.namespaces.get("m").prefix + key)

    def disk_key(self, key):
        return self.cache.namespaces.get("m").prefix + key

    async def ticking(self, condition, timeout_s=20.0):
        """Let the daemon's clock tick until something holds."""
        for _ in range(int(timeout_s / 0.01)):
            if condition():
                return
            self.cache.tick()
            await asyncio.sleep(0.01)
        pytest.fail(f"not within {timeout_s} s")

    def put(self, key, value, retention="long", session=None, ttl_s=None):
        item = protocol.SetItem(key, value, checksum64(value))
        session = session or self.session
        return self.cache.storing.set_inline(session, "m", [item], Keep.of(retention, ttl_s))[0]

    def evict(self, *keys):
        space = self.cache.namespaces.get("m")
        for key in keys:
            self.memory.remove(self.memory.find(space, key))

    async def get(self, *keys):
        hits, missing = self.cache.get("m", list(keys), True)
        if missing:
            hits = await self.cache.fetch("m", list(keys), True, hits, missing)
        return [hit and hit.data for hit in hits]

    async def exists(self, *keys):
        present = self.cache.in_memory("m", list(keys))
        return await self.cache.complete("m", list(keys), present)

    async def only_on_disk(self, values):
        for key, value in values.items():
            assert self.put(key, value) == "stored"
        assert (await self.cache.flush(self.session, 20)).pending == 0
        self.evict(*values)

    async def close(self):
        for _ in range(1000):
            if self.cache.write_back.idle:
                break
            await asyncio.sleep(0.005)
        await self.paths.close()
        self.paths.shut_down()
        self.arena.close()

    def accounted(self):
        memory = self.memory
        return memory.free_slots + memory.entries + memory.reserved_slots


@pytest.fixture
def on_rig(tmp_path: Path) -> Callable[..., None]:
    """Run a coroutine function over a fresh rig."""

    def run(scenario: Callable[[Rig], Awaitable[None]], **options: object) -> None:
        async def main() -> None:
            rig = Rig(tmp_path, **options)
            try:
                await scenario(rig)
            finally:
                await rig.close()

        asyncio.run(main())

    return run


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[Callable[..., DaemonProcess]]:
    """Make daemons that are not started yet; all end with the test."""
    made: list[DaemonProcess] = []

    def make(*flags: str, disk: bool = True, name: str = "d") -> DaemonProcess:
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        daemon = DaemonProcess(directory, *flags, disk=disk)
        made.append(daemon)
        return daemon

    yield make
    for daemon in made:
        daemon.clean_up()


@pytest.fixture
def running(daemons: Callable[..., DaemonProcess]) -> DaemonProcess:
    """A running daemon with 128 slots in memory and 256 on disk."""
    return daemons().start()


@pytest.fixture
def wait_until() -> Callable[..., None]:
    """The bounded wait."""
    return poll


@pytest.fixture
def make_blocks() -> Callable[..., dict[bytes, bytes]]:
    """Random blocks by key, reproducible by seed."""

    def make(count: int, size: int = 65536, seed: int = 1) -> dict[bytes, bytes]:
        source = random.Random(seed)
        return {b"%d/%d" % (seed, number): source.randbytes(size) for number in range(count)}

    return make


@pytest.fixture
def put_all() -> Callable[..., None]:
    """Store everything, at the disk's pace: a small arena refuses what would outrun it."""

    def put(client: kvd.Client, blocks: object, values: dict[bytes, bytes], **how: str) -> None:
        items = list(values.items())
        for first in range(0, len(items), 16):
            part = items[first : first + 16]

            def stored(part: list[tuple[bytes, bytes]] = part) -> bool:
                return all(blocks.put_many(part, **how))  # type: ignore[attr-defined]

            poll(stored)
        assert client.flush(20).pending == 0

    return put


@pytest.fixture(autouse=True)
def _no_inherited_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVD_SOCKET", raising=False)
    assert os.getpid()


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command line in this process: its exit status, stdout and stderr."""

    def run(*argv: object) -> tuple[int, str, str]:
        capfd.readouterr()
        status = main([str(word) for word in argv])
        captured = capfd.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
def document(command: Callable[..., tuple[int, str, str]]) -> Callable[..., Any]:
    """Run a command that is to succeed with --json: its document, alone on stdout."""

    def run(*argv: object) -> Any:
        status, out, err = command(*argv, "--json")
        assert status == 0, err
        return json.loads(out)

    return run
