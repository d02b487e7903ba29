"""Hits in shared memory: `get_into`, leases, `exists`."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable
from functools import partial

import roofline
from daemon_rows import Row, difference, make
from daemon_setup import SLOT, SPACE, Bench, Workers, daemon, fill, huge_targets, key_of, shuffled

import kvd

BLOCKS = 4096
SPAN = BLOCKS * SLOT
TARGETS = 64 << 20
KEYS = 1024
LEASED_SIZES = (4096, SLOT, 1 << 20)
LEASED_BLOCKS = 128


class Reader:
    """A client process that reads random blocks of an arena into 64 MiB of huge pages."""

    def __init__(self, socket: str) -> None:
        self.client = kvd.Client(socket)
        self.blocks = self.client.namespace(SPACE)
        self.keys = [key_of(number) for number in range(BLOCKS)]
        self.targets = huge_targets(TARGETS, SLOT)
        self.random = random.Random(7)
        self.blocks.exists(self.keys[:1])
        for at, key in enumerate(self.keys):
            self.blocks.get_into(key, self.targets[at % len(self.targets)])

    def get_into(self, clock: Callable[[], float] = time.perf_counter) -> float:
        """Return us a hit; nan where one was a miss, as while the daemon's heartbeat is late."""
        get_into, keys = self.blocks.get_into, self.random.sample(self.keys, len(self.targets))
        started = clock()
        missed = 0
        for key, target in zip(keys, self.targets, strict=True):
            if get_into(key, target) is None:
                missed += 1
        return math.nan if missed else (clock() - started) / len(keys) * 1e6

    def copy(self, clock: Callable[[], float] = time.perf_counter) -> float:
        """Return us a copy, of as many blocks, by the roofline."""
        roofline.copy(SLOT, SPAN)
        started = clock()
        roofline.copy(TARGETS, SPAN)
        return (clock() - started) / (TARGETS // SLOT) * 1e6

    def first_touch(self) -> float:
        """Return us a hit of a client whose mapping is new."""
        with kvd.Client(self.client.socket) as client:
            blocks = client.namespace(SPACE)
            blocks.exists(self.keys[:1])
            keys = self.random.sample(self.keys, len(self.targets))
            started = time.perf_counter()
            for key, target in zip(keys, self.targets, strict=True):
                blocks.get_into(key, target)
            return (time.perf_counter() - started) / len(keys) * 1e6


def hits(bench: Bench) -> list[Row]:
    """`get_into` of 64 KiB by 1, 4 and 8 processes, beside the copy it cannot avoid."""
    rows = []
    with daemon(bench, "--max-bytes", str(SPAN + (64 << 20))) as socket:
        with kvd.Client(socket) as client:
            fill(client, [key_of(number) for number in range(BLOCKS)], SLOT)
        # More processes than cores wait for each other: then only their own time says anything.
        for count, clock in (
            (1, time.perf_counter),
            (1, time.thread_time),
            (4, time.thread_time),
            (8, time.thread_time),
        ):
            wall = clock is time.perf_counter
            ours, copies, first = [], [], []
            left_out = 0
            with Workers(count, Reader, socket) as workers:
                workers.all("copy")
                for _ in bench.rounds(f"get_into, {count} clients", 2):
                    runs = {
                        name: partial(_median, workers, name, clock)
                        for name in ("get_into", "copy")
                    }
                    found = shuffled(runs)
                    if math.isnan(found["get_into"]):
                        left_out += 1
                        continue
                    ours.append(found["get_into"])
                    copies.append(found["copy"])
                    if wall:
                        first += workers.all("first_touch")
            if not ours:
                raise SystemExit("no round went without a miss: the daemon gets no processor")
            plural = f"{count} client{'s' * (count > 1)}" + ("" if wall else ", CPU time")
            rows.append(
                make(
                    "hits",
                    f"get_into 64 KiB, {plural}",
                    ours,
                    "us",
                    "us over copy",
                    1.5,
                    beside=copies,
                    beside_what="roofline copy",
                    combine=difference,
                    note=f"{left_out} rounds with misses left out" if left_out else "",
                )
            )
            if first:
                rows.append(make("hits", "the same, mapping new", first, "us", "us"))
    return rows


def _median(workers: Workers, name: str, clock: Callable[[], float]) -> float:
    times = workers.all(name, clock)
    return math.nan if any(map(math.isnan, times)) else statistics.median(times)


def leases(bench: Bench) -> list[Row]:
    """A lease with its memoryview, of blocks of several sizes."""
    samples: dict[int, list[float]] = {size: [] for size in LEASED_SIZES}
    slots = (len(LEASED_SIZES) + 1) * LEASED_BLOCKS
    flags = ("--tablespace-slot-bytes", "1M", "--max-bytes", str(slots << 20))
    with daemon(bench, *flags) as socket, kvd.Client(socket) as client:
        blocks = client.namespace(SPACE)
        keys = {}
        for at, size in enumerate(LEASED_SIZES):
            first = at * LEASED_BLOCKS
            keys[size] = [key_of(number) for number in range(first, first + LEASED_BLOCKS)]
            fill(client, keys[size], size)
        for _ in bench.rounds("leases", 2):
            found = shuffled(
                {str(size): lambda size=size: _lease(blocks, keys[size] * 8) for size in keys}
            )
            for size in keys:
                samples[size].append(found[str(size)])
    return [
        make("leases", f"lease + memoryview, {size >> 10} KiB", samples[size], "us", "us", 2.0)
        for size in LEASED_SIZES
    ]


def _lease(blocks: kvd.NamespaceHandle, keys: list[bytes]) -> float:
    started = time.perf_counter()
    for key in keys:
        with blocks.lease([key]) as views:
            if views[0] is None:
                raise SystemExit("a block was not found")
    return (time.perf_counter() - started) / len(keys) * 1e6


def exists(bench: Bench) -> list[Row]:
    """`exists` of 1024 keys that are all there, by the index and by the socket."""
    samples: dict[str, list[float]] = {"index": [], "socket": []}
    with (
        daemon(bench, "--max-bytes", str(2 * KEYS * SLOT)) as socket,
        kvd.Client(socket) as mapped,
        kvd.Client(socket, map_arena=False) as asking,
    ):
        keys = [key_of(number) for number in range(KEYS)]
        fill(mapped, keys, SLOT)
        calls = {"index": mapped.namespace(SPACE).exists, "socket": asking.namespace(SPACE).exists}
        for _ in bench.rounds("exists", 4):
            found = shuffled(
                {name: lambda name=name: _exists(calls[name], keys) for name in calls}
            )
            for name, value in found.items():
                samples[name].append(value)
    return [
        make("exists", "exists of 1024 keys, by index", samples["index"], "us", "us", 60.0),
        make("exists", "exists of 1024 keys, by socket", samples["socket"], "us", "us", 200.0),
    ]


def _exists(call: Callable[[list[bytes]], list[bool]], keys: list[bytes]) -> float:
    times = []
    for _ in range(20):
        started = time.perf_counter()
        present = call(keys)
        times.append(time.perf_counter() - started)
        assert all(present)
    return statistics.median(times) * 1e6
