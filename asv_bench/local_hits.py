"""What a hit in shared memory costs a Python client, beside the copy that it cannot avoid.

Starts a daemon over a temporary socket, stores 64 KiB blocks, and measures in alternating
rounds: the copies alone (the roofline's, in C, and memmove from Python over the same blocks and
destinations), `get_into`, `lease`, `exists` and `match_prefix` of 1024 keys. Medians over the
rounds, and the medians of the differences within a round.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import roofline

import kvd
from kvd import protocol

BLOCK = 65536
DESTINATION = 64 << 20
KEYS = 1024
MADV_HUGEPAGE = 14
START_S = 30.0


def main() -> int:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30, help="(default 30)")
    parser.add_argument("--blocks", type=int, default=4096, help="in the arena (default 4096)")
    parser.add_argument("--hugepages", action="store_true", help="passed on to the daemon")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="kvd-bench-"))
    socket = str(directory / "kvd.sock")
    size = str((options.blocks + KEYS) * BLOCK)
    pages = ["--hugepages"] if options.hugepages else []
    daemon = subprocess.Popen(
        [sys.executable, "-m", "kvd", "--socket", socket, "--max-bytes", size, *pages],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        with kvd.Client(socket) as client:
            rows = measure(client, options.rounds, options.blocks)
    finally:
        daemon.terminate()
        daemon.wait(START_S)
        shutil.rmtree(directory)
    if options.json:
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
    else:
        for name, value in rows.items():
            sys.stdout.write(f"{name:58} {value:9.2f} us\n")
    return 0


def measure(client: kvd.Client, rounds: int, count: int) -> dict[str, float]:
    """Fill the arena and return microseconds by what was measured."""
    blocks = client.namespace("bench")
    keys = [os.urandom(32) for _ in range(count)]
    deadline = time.monotonic() + START_S
    stored = 0
    while stored < count:
        part = [(key, os.urandom(8) * (BLOCK // 8)) for key in keys[stored : stored + 64]]
        stored += len(part) if all(blocks.put_many(part)) else 0
        if time.monotonic() > deadline:
            raise SystemExit(f"only {stored} of {count} blocks were stored in {START_S} s")
    mapping = mmap.mmap(-1, DESTINATION, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(MADV_HUGEPAGE)
    whole = memoryview(mapping)
    whole[:] = bytes(DESTINATION)
    targets = [whole[at : at + BLOCK] for at in range(0, DESTINATION, BLOCK)]
    source = random.Random(7)
    with blocks.lease(keys[:1]) as first:
        assert first[0] is not None
    assert all(blocks.exists(keys))

    samples: dict[str, list[float]] = {}
    for _ in range(rounds):
        one_round(samples, client, source.sample(keys, len(targets)), targets)
    rows = {name: statistics.median(values) for name, values in samples.items()}
    for base in ("roofline copy", "memmove"):
        rows[f"get_into over {base}, by round"] = statistics.median(
            one - other for one, other in zip(samples["get_into"], samples[base], strict=True)
        )
    return rows


def one_round(
    samples: dict[str, list[float]],
    client: kvd.Client,
    keys: list[bytes],
    targets: list[memoryview],
) -> None:
    """Measure everything once over the same blocks."""
    blocks = client.namespace("bench")
    reader, space = reader_of(client, "bench")
    found = client.ask(protocol.BatchGet(namespace="bench", keys=keys), protocol.Found)
    where = [hit.offset for hit in found.hits if hit is not None]
    half = [key if at % 2 else key[::-1] for at, key in enumerate(keys)]
    samples.setdefault("roofline copy", []).append(1e6 / roofline.copy(256 << 20))
    take(samples, "memmove", len(targets), lambda: moves(client, where, targets))
    take(samples, "get_into", len(targets), lambda: gets(blocks, keys, targets))
    take(samples, "lease + memoryview", len(targets), lambda: leases(blocks, keys))
    take(samples, "exists of 1024 keys", 1, lambda: blocks.exists(keys))
    take(samples, "match_prefix of 1024 keys", 1, lambda: blocks.match_prefix(keys))
    take(samples, "contains_many, half absent", 1, lambda: reader.contains_many(space, half))


def reader_of(client: kvd.Client, name: str):  # type: ignore[no-untyped-def]
    """Return the reader below the client, to look where blocks lie."""
    found = client.namespace(name).local_lookup()
    assert found is not None
    return found[1], found[2]


def take(
    samples: dict[str, list[float]], name: str, count: int, run: Callable[[], object]
) -> None:
    """Time a call, in microseconds for each of `count`."""
    started = time.perf_counter()
    run()
    samples.setdefault(name, []).append((time.perf_counter() - started) / count * 1e6)


def gets(blocks: kvd.NamespaceHandle, keys: list[bytes], targets: list[memoryview]) -> None:
    """Read block after block."""
    for key, target in zip(keys, targets, strict=True):
        if blocks.get_into(key, target) != BLOCK:
            raise SystemExit("a block was not found")


def leases(blocks: kvd.NamespaceHandle, keys: list[bytes]) -> None:
    """Lease block after block."""
    for key in keys:
        with blocks.lease([key]) as views:
            if views[0] is None:
                raise SystemExit("a block was not found")


def moves(client: kvd.Client, where: list[int], targets: list[memoryview]) -> None:
    """Copy the same blocks to the same places, without looking them up."""
    mapping = client.connection().mapping
    assert mapping is not None
    data = mapping.view(0, 0).obj
    address = ctypes.addressof(ctypes.c_char.from_buffer(data))
    move = ctypes.memmove
    first = ctypes.addressof(ctypes.c_char.from_buffer(targets[0].obj))
    for at, offset in enumerate(where):
        move(first + at * BLOCK, address + offset, BLOCK)


if __name__ == "__main__":
    sys.exit(main())
