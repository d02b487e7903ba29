"""Daemons, processes of clients and memory for the measurements."""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rich.progress import Progress

import kvd

SLOT = 65536
MADV_HUGEPAGE = 14
START_S = 30.0
ANSWER_S = 120.0
SPACE = "bench"


@dataclass(frozen=True)
class Bench:
    """What every part is given."""

    directory: Path
    pairs: int
    progress: Progress

    def rounds(self, what: str, share: float = 1.0) -> Iterator[int]:
        """Count the rounds of one measurement, at least three."""
        yield from self.progress.track(range(max(3, round(self.pairs * share))), description=what)


def shuffled(runs: dict[str, Callable[[], float]]) -> dict[str, float]:
    """Run each once, in random order."""
    order = list(runs)
    random.shuffle(order)
    return {name: runs[name]() for name in order}


@contextlib.contextmanager
def daemon(bench: Bench, *flags: str) -> Iterator[str]:
    """Start a daemon of its own; give its socket."""
    directory = Path(tempfile.mkdtemp(prefix="kvd-", dir=bench.directory))
    socket = str(directory / "kvd.sock")
    flags = tuple(flag.replace("{dir}", str(directory)) for flag in flags)
    with open(directory / "log", "w+b") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvd", "--socket", socket, "--drain-timeout", "0s", *flags],
            stdout=log,
            stderr=log,
        )
        try:
            deadline = time.monotonic() + START_S
            while not os.path.exists(socket):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise SystemExit("the daemon did not start:\n" + log.read().decode()[-2000:])
                time.sleep(0.02)
            _wait_populated(socket, deadline)
            yield socket
        finally:
            process.terminate()
            try:
                process.wait(START_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            shutil.rmtree(directory)


def _wait_populated(socket: str, deadline: float) -> None:
    """Wait until the whole arena can be used: before that blocks are evicted early."""
    with kvd.Client(socket, map_arena=False) as client:
        while time.monotonic() < deadline:
            memory = client.stats().memory
            if memory.slots_populated == memory.slots:
                return
            time.sleep(0.02)
    raise SystemExit(f"the arena was not populated in {START_S} s")


def knows_flag(name: str) -> bool:
    """Return whether this daemon has a flag."""
    command = [sys.executable, "-m", "kvd", "--help"]
    return name in subprocess.run(command, check=True, capture_output=True, text=True).stdout


def key_of(number: int) -> bytes:
    """Return the key of a block, as long as a hash."""
    return b"%032d" % number


def fill(client: kvd.Client, keys: Sequence[bytes], size: int, flush: bool = False) -> None:
    """Store blocks of random content, all of them."""
    blocks = client.namespace(SPACE)
    pool = os.urandom(size + 64)
    deadline = time.monotonic() + ANSWER_S
    for first in range(0, len(keys), 64):
        part = [
            (key, memoryview(pool)[at : at + size])
            for at, key in enumerate(keys[first : first + 64])
        ]
        while not all(blocks.put_many(part)):
            if time.monotonic() > deadline:
                raise SystemExit("the blocks could not be stored")
        if flush and first % 512 == 0:
            _flush(client)
    if flush:
        _flush(client)


def _flush(client: kvd.Client) -> None:
    flushed = client.flush(ANSWER_S)
    if flushed.pending or flushed.dropped:
        raise SystemExit(f"the blocks did not get durable: {flushed}")


def huge_targets(total: int, size: int) -> list[memoryview]:
    """Return private huge pages, touched, cut into buffers."""
    mapping = mmap.mmap(-1, total, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(MADV_HUGEPAGE)
    whole = memoryview(mapping)
    whole[:] = bytes(total)
    return [whole[at : at + size] for at in range(0, total, size)]


class Workers:
    """Processes that do the same at the same time.

    Parameters
    ----------
    count : int
        How many.
    make : callable
        Called in each process with `arguments`; returns an object. `all("name", ...)` calls that
        method of each and returns the results.
    """

    def __init__(self, count: int, make: Callable[..., Any], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, make, arguments), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self.all("ready")

    def start(self, name: str, *arguments: Any) -> None:
        """Have every process begin a call."""
        for pipe in self._pipes:
            pipe.send((name, arguments))

    def results(self) -> list[Any]:
        """Wait for what was begun."""
        found = []
        for pipe in self._pipes:
            if not pipe.poll(ANSWER_S):
                raise SystemExit("a client's process did not answer in time")
            found.append(pipe.recv())
        return found

    def all(self, name: str, *arguments: Any) -> list[Any]:
        """Call a method in every process."""
        self.start(name, *arguments)
        return self.results()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(START_S)
            if process.is_alive():
                process.kill()


def _work(pipe: Connection, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    worker = make(*arguments)
    while True:
        try:
            name, given = pipe.recv()
        except EOFError:
            return
        pipe.send(None if name == "ready" else getattr(worker, name)(*given))
