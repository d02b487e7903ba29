"""Other stores, each as a function of a directory that returns one timed run.

A run writes (or reads) 64 KiB values in groups and returns operations a second.  Every store is
used as its own documents say for durable writes, or for the fastest ones where nothing is synced.
"""

from __future__ import annotations

import os
import random
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from regions import GROUP, READ_SLOTS, SLOT

Run = Callable[[], float]
VALUES = [os.urandom(SLOT) for _ in range(GROUP)]


def _timed(groups: int, write: Callable[[int], None]) -> float:
    started = time.perf_counter()
    for group in range(groups):
        write(group)
    return groups * GROUP / (time.perf_counter() - started)


class _Rounds:
    """Gives each run new keys, or the same ones again."""

    def __init__(self, again: bool = False) -> None:
        self.again = again
        self.number = 0

    def keys(self, groups: int) -> list[list[bytes]]:
        """Return the keys of each group, made before the clock starts."""
        self.number += 0 if self.again and self.number else 1
        return [
            [b"%08d-%08d-%04d" % (self.number, group, at) for at in range(GROUP)]
            for group in range(groups)
        ]


def lmdb_puts(directory: Path, groups: int, again: bool = False) -> Run:
    """One write transaction a group, with the file growing or (`again`) at its full size."""
    import lmdb

    environment = lmdb.open(os.fspath(directory), map_size=8 << 30)
    rounds = _Rounds(again)

    def run() -> float:
        keys = rounds.keys(groups)

        def write(group: int) -> None:
            with environment.begin(write=True) as transaction:
                for key, value in zip(keys[group], VALUES, strict=True):
                    transaction.put(key, value)

        return _timed(groups, write)

    if again:
        for _ in range(3):
            run()
    return run


def rocksdb_puts(directory: Path, groups: int) -> Run:
    """One synced WriteBatch a group."""
    import rocksdict

    options = rocksdict.Options(raw_mode=True)
    options.set_enable_blob_files(True)
    store = rocksdict.Rdict(os.fspath(directory), options)
    synced = rocksdict.WriteOptions()
    synced.sync = True
    rounds = _Rounds()

    def run() -> float:
        keys = rounds.keys(groups)

        def write(group: int) -> None:
            batch = rocksdict.WriteBatch(raw_mode=True)
            for key, value in zip(keys[group], VALUES, strict=True):
                batch.put(key, value)
            store.write(batch, synced)

        return _timed(groups, write)

    return run


def sqlite_puts(directory: Path, groups: int) -> Run:
    """One transaction a group, WAL, synchronous=FULL."""
    directory.mkdir()
    connection = sqlite3.connect(directory / "db", isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("CREATE TABLE blocks (key BLOB PRIMARY KEY, value BLOB) WITHOUT ROWID")
    rounds = _Rounds()

    def run() -> float:
        keys = rounds.keys(groups)

        def write(group: int) -> None:
            connection.execute("BEGIN")
            connection.executemany(
                "INSERT OR REPLACE INTO blocks VALUES (?, ?)",
                zip(keys[group], VALUES, strict=True),
            )
            connection.execute("COMMIT")

        return _timed(groups, write)

    return run


def file_puts(directory: Path, groups: int) -> Run:
    """A file a value: write, fsync, rename; the directory synced once a group."""
    directory.mkdir()
    rounds = _Rounds()

    def run() -> float:
        keys = rounds.keys(groups)

        def write(group: int) -> None:
            for key, value in zip(keys[group], VALUES, strict=True):
                name = os.fspath(directory / key.decode())
                descriptor = os.open(name + ".tmp", os.O_WRONLY | os.O_CREAT, 0o600)
                os.write(descriptor, value)
                os.fsync(descriptor)
                os.close(descriptor)
                os.rename(name + ".tmp", name)
            descriptor = os.open(directory, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)

        return _timed(groups, write)

    return run


def _raw_device(path: Path) -> Any:
    import lmcache_rust_raw_block_io as raw

    size = READ_SLOTS * SLOT
    if not path.exists():
        with path.open("wb") as file:
            for _ in range(READ_SLOTS // GROUP):
                for value in VALUES:
                    file.write(value)
            os.fsync(file.fileno())
    assert path.stat().st_size == size
    return raw.RawBlockDevice(
        os.fspath(path),
        True,
        use_odirect=True,
        alignment=4096,
        io_engine="io_uring",
        iouring_queue_depth=64,
    )


def _wait(device: Any, batch: int) -> None:
    done, errors = device.wait_iouring(batch)
    if errors:
        raise OSError(f"peer's batch failed: {done} {errors}")


def raw_block_writes(path: Path, groups: int) -> Run:
    """LMCache's raw block writer, groups in one batch each, O_DIRECT, nothing synced."""
    device = _raw_device(path)

    def run() -> float:
        chance = random.Random()
        starts = [chance.randrange(READ_SLOTS // GROUP) * GROUP for _ in range(groups)]
        offsets = [[(start + at) * SLOT for at in range(GROUP)] for start in starts]
        sizes = [SLOT] * GROUP

        def write(group: int) -> None:
            _wait(device, device.batched_write(offsets[group], VALUES, sizes))

        return _timed(groups, write)

    return run


def raw_block_reads(path: Path, buffers: list[memoryview], keys_per_call: int, count: int) -> Run:
    """LMCache's raw block reader, random slots, one batch a call."""
    device = _raw_device(path)
    sizes = [SLOT] * keys_per_call

    def run() -> float:
        chance = random.Random()
        calls = [
            [chance.randrange(READ_SLOTS) * SLOT for _ in range(keys_per_call)]
            for _ in range(count // keys_per_call)
        ]
        started = time.perf_counter()
        for offsets in calls:
            _wait(device, device.batched_read(offsets, buffers[:keys_per_call], sizes))
        return count / (time.perf_counter() - started)

    return run
