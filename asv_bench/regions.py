"""Regions to measure: one that is written to, one that is read."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tablespace

SLOT = 65536
GROUP = 64
COUNT = 6400
READ_SLOTS = 16384


class Puts:
    """Puts into a region four times as large as one run writes, written before (steady state).

    Parameters
    ----------
    full : bool
        Whether every key is new, so that the region is full and each put evicts another; else the
        same keys are put again and again and nothing is ever evicted.
    """

    def __init__(self, directory: Path, *, full: bool = True, **options: Any) -> None:
        size = COUNT * SLOT
        self.full = full
        self.store = tablespace.open(
            directory, max_bytes=4 * size, container_bytes=size, on_full="evict", **options
        )
        self.memory = tablespace.AlignedBuffer(GROUP * SLOT)
        view = memoryview(self.memory)
        view[:] = os.urandom(len(view))
        self.aligned = [view[at : at + SLOT] for at in range(0, len(view), SLOT)]
        self.plain = [bytes(piece) for piece in self.aligned]
        self.round = 0
        for _ in range(5):
            self.run(self.plain)

    def run(self, values: Sequence[Any], durability: str | None = None) -> float:
        """Return puts a second, in groups of 64."""
        self.round += 1
        prefix = self.round if self.full else 0
        options = {} if durability is None else {"durability": durability}
        groups = [
            [(b"%08d-%08d-%04d" % (prefix, group, at), values[at]) for at in range(GROUP)]
            for group in range(COUNT // GROUP)
        ]
        started = time.perf_counter()
        for items in groups:
            self.store.put_many(items, **options)
        return COUNT / (time.perf_counter() - started)

    def run_threads(self, threads: int, count: int = COUNT // 2) -> float:
        """Return single puts a second by several threads."""
        self.round += 1
        start = threading.Barrier(threads + 1)

        def put(number: int) -> None:
            value = self.plain[number % GROUP]
            keys = [b"%08d-%04d-%08d" % (self.round, number, at) for at in range(count // threads)]
            start.wait()
            for key in keys:
                self.store.put(key, value)

        workers = [threading.Thread(target=put, args=(number,)) for number in range(threads)]
        for worker in workers:
            worker.start()
        start.wait()
        started = time.perf_counter()
        for worker in workers:
            worker.join()
        return count / (time.perf_counter() - started)

    def __enter__(self) -> Puts:
        return self

    def __exit__(self, *_: object) -> None:
        self.store.close()


class Gets:
    """Random `get_many_into` of a 1 GiB region, buffers on huge pages."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.store = tablespace.open(directory, max_bytes="4G", container_bytes="1G", **options)
        values = [os.urandom(SLOT) for _ in range(GROUP)]
        for start in range(0, READ_SLOTS, GROUP):
            self.store.put_many((b"%016d" % (start + at), values[at]) for at in range(GROUP))
        self.memory = tablespace.AlignedBuffer(513 * SLOT)
        view = memoryview(self.memory)
        self.aligned = [view[at : at + SLOT] for at in range(0, 512 * SLOT, SLOT)]
        self.unaligned = [view[at + 8 : at + 8 + SLOT] for at in range(0, 512 * SLOT, SLOT)]

    def run(self, keys_per_call: int, buffers: Sequence[Any] | None = None) -> float:
        """Return gets a second."""
        buffers = buffers or self.aligned
        keys = [b"%016d" % random.randrange(READ_SLOTS) for _ in range(COUNT)]
        started = time.perf_counter()
        for start in range(0, COUNT, keys_per_call):
            part = keys[start : start + keys_per_call]
            found = self.store.get_many_into(part, buffers[: len(part)])
            assert None not in found
        return COUNT / (time.perf_counter() - started)

    def __enter__(self) -> Gets:
        return self

    def __exit__(self, *_: object) -> None:
        self.store.close()
