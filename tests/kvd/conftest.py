"""Fixtures: real daemons as child processes, each on its own socket and region."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kvd

START_S = 30.0
STOP_S = 30.0
POLL_S = 0.005


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
