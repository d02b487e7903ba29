"""``bench``: what a region on this storage gives, measured in one that is removed afterwards."""

from __future__ import annotations

import argparse
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from types import FrameType
from typing import Any

from tablespace._core.aligned_buffer import AlignedBuffer
from tablespace.commands.failures import FINE
from tablespace.commands.output import Output
from tablespace.commands.progress import Progress
from tablespace.errors import TablespaceError
from tablespace.io.classify import classify
from tablespace.io.scratch import ScratchDirectory, forget_pages
from tablespace.layout import PAGE_BYTES, ceil_to, format_size
from tablespace.opening import open_store
from tablespace.store import Store

# Values that differ, so that no disk compresses or deduplicates them all away.
PATTERNS = 64
PERCENTILES = (("p50", 0.50), ("p95", 0.95), ("p99", 0.99))


@dataclass
class Phase:
    """One measured kind of call.

    Attributes
    ----------
    name, what : str
    calls, values, value_bytes, threads : int
    seconds, values_per_s, bytes_per_s : float
    latency_us : dict of str to float
        Of whole calls: p50, p95, p99, max.
    """

    name: str
    what: str
    calls: int
    values: int
    value_bytes: int
    threads: int
    seconds: float
    values_per_s: float
    bytes_per_s: float
    latency_us: dict[str, float] = field(default_factory=dict)


@dataclass
class Load:
    """What is put and read, and for how long."""

    seconds: float
    value_bytes: int
    batch: int
    threads: int
    values: list[bytes]
    progress: Progress


def run_bench(options: argparse.Namespace, output: Output) -> int:
    """Measure durable `put_many`, `put` from threads, and cold `get_many_into`."""
    generator = random.Random(1)
    progress = Progress("measuring", 3 * options.seconds)
    load = Load(
        options.seconds,
        options.value_size,
        options.batch,
        options.threads,
        [generator.randbytes(options.value_size) for _ in range(PATTERNS)],
        progress,
    )
    previous = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _leave)
    try:
        with ScratchDirectory(options.path) as scratch, progress:
            document = _measure(options, load, f"{scratch.path}/region")
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, previous)
    output.give(document, _lines(document))
    return FINE


def _leave(number: int, frame: FrameType | None) -> None:
    """End by an exception, so that the scratch directory goes too."""
    raise SystemExit(128 + number)


def _measure(options: argparse.Namespace, load: Load, path: str) -> dict[str, Any]:
    with open_store(
        path,
        max_bytes=options.max_bytes,
        slot_bytes=ceil_to(load.value_bytes, PAGE_BYTES),
        io_mode=options.io_mode,
        io_engine=options.io_engine,
        on_full="evict",
    ) as store:
        phases = [_put_batches(store, load), _put_threads(store, load)]
        load.progress.done = 2 * load.seconds
        phases.append(_get_cold(store, load, path))
        stats = store.stats()
    return {
        "path": options.path,
        "device_class": classify(options.path).device_class,
        "region_bytes": stats.capacity * stats.slot_bytes,
        "io_mode": stats.io_mode,
        "io_engine": stats.io_engine,
        "choices": stats.choices,
        "phases": [asdict(phase) for phase in phases],
    }


def _keys() -> Iterator[bytes]:
    number = 0
    while True:
        yield b"%016d" % number
        number += 1


def _put_batches(store: Store, load: Load) -> Phase:
    keys = _keys()
    groups = range(load.batch)

    def call() -> None:
        stored = store.put_many((next(keys), load.values[at % PATTERNS]) for at in groups)
        if not all(stored):
            raise TablespaceError("no room in the bench's region. Remedy: a larger --max-bytes")

    latencies, seconds = _repeat(call, load, 0)
    what = f"durable put_many, {load.batch} values a call"
    return _phase("put_many", what, latencies, seconds, load, load.batch, 1)


def _put_threads(store: Store, load: Load) -> Phase:
    found: list[list[float]] = [[] for _ in range(load.threads)]
    errors: list[BaseException] = []

    def work(thread: int) -> None:
        keys = (b"t%03d-%s" % (thread, key) for key in _keys())
        value = load.values[thread % PATTERNS]
        alone = Load(load.seconds, 0, 0, 0, [], load.progress)
        try:
            found[thread] = _repeat(lambda: store.put(next(keys), value), alone, load.seconds)[0]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(at,)) for at in range(load.threads)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - started
    if errors:
        raise errors[0]
    what = f"durable put, one value a call, {load.threads} threads"
    latencies = [each for part in found for each in part]
    return _phase("put", what, latencies, seconds, load, 1, load.threads)


def _get_cold(store: Store, load: Load, path: str) -> Phase:
    """Read each key at most once before the page cache is emptied again."""
    keys = sorted(store)
    generator = random.Random(2)
    room = ceil_to(load.value_bytes, PAGE_BYTES)
    batch = min(load.batch, len(keys))
    memory = memoryview(AlignedBuffer(batch * room))
    buffers = [memory[at : at + room] for at in range(0, batch * room, room)]
    left: list[bytes] = []
    paused = 0.0

    def call() -> None:
        lengths = store.get_many_into([left.pop() for _ in range(batch)], buffers)
        if None in lengths:
            raise TablespaceError("a value was not read back. Remedy: check this disk")

    latencies: list[float] = []
    started = time.perf_counter()
    while (elapsed := time.perf_counter() - started - paused) < load.seconds or not latencies:
        load.progress.done = 2 * load.seconds + elapsed
        if len(left) < batch:
            pause = time.perf_counter()
            forget_pages(path)
            left = keys[:]
            generator.shuffle(left)
            paused += time.perf_counter() - pause
        before = time.perf_counter()
        call()
        latencies.append(time.perf_counter() - before)
    seconds = time.perf_counter() - started - paused
    what = f"cold random get_many_into, verified, {batch} keys a call"
    return _phase("get_many_into", what, latencies, seconds, load, batch, 1)


def _repeat(call: Callable[[], Any], load: Load, base_s: float) -> tuple[list[float], float]:
    """Call for as long as the load says, at least once; return each call's time, and all."""
    latencies = []
    started = before = time.perf_counter()
    while True:
        call()
        after = time.perf_counter()
        latencies.append(after - before)
        load.progress.done = base_s + after - started
        if after - started >= load.seconds:
            return latencies, after - started
        before = after


def _phase(
    name: str,
    what: str,
    latencies: list[float],
    seconds: float,
    load: Load,
    values_per_call: int,
    threads: int,
) -> Phase:
    ordered = sorted(latencies)
    values = len(ordered) * values_per_call
    last = len(ordered) - 1
    latency_us = {
        label: round(ordered[min(last, int(share * len(ordered)))] * 1e6, 1)
        for label, share in PERCENTILES
    }
    return Phase(
        name,
        what,
        len(ordered),
        values,
        load.value_bytes,
        threads,
        round(seconds, 6),
        round(values / seconds, 1),
        round(values * load.value_bytes / seconds, 1),
        {**latency_us, "max": round(ordered[-1] * 1e6, 1)},
    )


def _lines(document: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{document['path']}: {document['device_class']}, {document['io_mode']} IO through "
        f"{document['io_engine']}, a region of {format_size(document['region_bytes'])}"
    )
    for reason in document["choices"]:
        yield f"  {reason}"
    yield f"{'values/s':>10} {'MB/s':>9} {'p50 us':>10} {'p95 us':>10} {'p99 us':>10}"
    for phase in document["phases"]:
        latency = phase["latency_us"]
        yield (
            f"{phase['values_per_s']:>10.0f} {phase['bytes_per_s'] / 1e6:>9.1f} "
            f"{latency['p50']:>10.0f} {latency['p95']:>10.0f} {latency['p99']:>10.0f}  "
            f"{phase['what']}"
        )
