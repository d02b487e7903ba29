"""A writer that overwrites, evicts and compacts without pause, and readers who follow it.

``python -m tablespace.testing.followed write PATH SEED SECONDS MODE`` and ``... follow PATH SEED
SECONDS MODE``.  Every 512 bytes of a value name its key, its version and their place, so that a
reader can check each of them.  The last line of either's output tells what it did.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Sequence

from tablespace.follower import Follower
from tablespace.opening import open_store
from tablespace.store import Store

CELL_BYTES = 512
SLOT_BYTES = 16384
KEYS = [b"key-%03d" % number for number in range(200)]
BATCH = 16
READY = b"R"


def value_of(key: bytes, version: int) -> bytes:
    """Return a value whose every cell names its key, version and place."""
    cells = 1 + (version * 7 + key[-1]) % (SLOT_BYTES // CELL_BYTES)
    return b"".join(
        (b"%s version %d cell %d;" % (key, version, cell)).ljust(CELL_BYTES, b".")
        for cell in range(cells)
    )


def version_of(key: bytes, value: bytes) -> int:
    """Check every cell of a value and return its version.

    Raises
    ------
    AssertionError
        Bytes that no writer stored under this key.
    """
    head = value[:CELL_BYTES].split(b" ")
    assert head[0] == key and head[1] == b"version", f"{key!r}: {value[:60]!r}"
    version = int(head[2])
    expected = value_of(key, version)
    for start in range(0, max(len(value), len(expected)), CELL_BYTES):
        cell = value[start : start + CELL_BYTES]
        assert cell == expected[start : start + CELL_BYTES], f"{key!r} at {start}: {cell[:60]!r}"
    return version


def open_writer(path: str, mode: str) -> Store:
    """Open the region that all share: 128 slots of 16 KiB, for more keys than that."""
    return open_store(path, max_bytes="2M", slot_bytes=SLOT_BYTES, on_full="evict", io_mode=mode)


def write(path: str, seed: int, seconds: float, mode: str) -> dict[str, int]:
    """Store version after version of random keys; delete, compact and clear now and then."""
    chance = random.Random(seed)
    store = open_writer(path, mode)
    version = 1000 * seed
    os.write(1, READY)
    end = time.monotonic() + seconds
    puts = snapshots = 0
    while time.monotonic() < end:
        version += 1
        keys = chance.sample(KEYS, BATCH)
        puts += sum(store.put_many([(key, value_of(key, version)) for key in keys]))
        what = chance.random()
        if what < 0.1:
            store.delete_many(chance.sample(KEYS, 5))
        elif what < 0.13:
            store.snapshot()
            snapshots += 1
        elif what < 0.14:
            store.clear(b"key-1")
        elif what < 0.16:
            store.close()
            store = open_writer(path, mode)
    store.close()
    return {"puts": puts, "snapshots": snapshots}


def follow(path: str, seed: int, seconds: float, mode: str) -> dict[str, int]:
    """Read random keys and check every cell; versions of a key never go back."""
    chance = random.Random(seed)
    store = open_store(
        path, read_only=True, refresh_interval_ms=chance.choice((0, 5)), io_mode=mode
    )
    assert isinstance(store, Follower)
    os.write(1, READY)
    end = time.monotonic() + seconds
    buffer = bytearray(SLOT_BYTES)
    newest: dict[bytes, int] = {}
    hits = 0
    while time.monotonic() < end:
        keys = chance.sample(KEYS, BATCH)
        found = list(zip(keys, store.get_many(keys), strict=True))
        length = store.get_into(keys[0], buffer)
        if length is not None:
            found.append((keys[0], bytes(buffer[:length])))
        for key, value in found:
            if value is not None:
                version = version_of(key, value)
                assert version >= newest.get(key, 0), f"{key!r} went back to version {version}"
                newest[key] = version
                hits += 1
    store.refresh()
    stats = store.stats()
    problem = int(stats.problem is not None)
    store.close()
    return {
        "hits": hits,
        "moved": stats.moved,
        "corrupt": stats.corrupt,
        "reloads": stats.reloads,
        "refreshes": stats.refreshes,
        "problem": problem,
    }


def main(arguments: Sequence[str]) -> None:
    """Do what is asked for; say at the end what was done."""
    what, path, seed, seconds, mode = arguments
    work = write if what == "write" else follow
    done = work(path, int(seed), float(seconds), mode)
    os.write(1, json.dumps(done).encode() + b"\n")


if __name__ == "__main__":
    main(sys.argv[1:])
