"""Regions written by every released format version open and read, for ever.

A golden region is made once, by this file, and never changed: a new format version adds
directories. `python tests/tablespace/format/test_golden.py DIRECTORY` makes two: one of plain
records, and one with pools, compressed values, and slots out of use and back in it.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tablespace.io.slot_test import Verdict
from tablespace.region import HOLDER_BYTES, HOLDER_OFFSET
from tablespace.testing.model import audit

import tablespace
from tablespace import quarantine

GOLDEN = Path(__file__).parent / "golden"
SHAPE = {"max_bytes": "64K", "container_bytes": "16K", "slot_bytes": "4K"}
RICH: dict[str, Any] = {
    "max_bytes": "128K",
    "container_bytes": "32K",
    "slot_bytes": ["4K", "8K"],
}
VERSIONS = sorted(path.name for path in GOLDEN.iterdir()) if GOLDEN.is_dir() else []


def value_of(key: bytes, generation: int) -> bytes:
    """Return the value that a golden region holds; lengths from 0 to a whole slot."""
    length = (0, 1, 100, 511, 512, 513, 4095, 4096)[(key[-1] + generation) % 8]
    return (b"%s-%d-" % (key, generation) * 4096)[:length]


def rich_value_of(key: bytes, generation: int) -> bytes:
    """Return a value of the second golden region: noise, or text that LZ4 makes smaller."""
    length = (0, 100, 4096, 4097, 8000, 8192)[(key[-1] + generation) % 6]
    if key[-1] % 2:
        return (b"%s-%d-" % (key, generation) * 8192)[:length]
    return random.Random(f"{key.hex()}-{generation}").randbytes(length)


VALUES = {"v1": value_of, "v1-rich": rich_value_of}


def build(path: Path) -> None:
    """Make a region with every kind of record, in the snapshot and in both journals."""
    work = path.with_name(path.name + ".work")
    keys = [b"key-%02d" % number for number in range(20)] + [b"\x00\xff", b"k" * 255]
    generation = dict.fromkeys(keys, 0)
    store = tablespace.open(work, on_full="evict", io_mode="buffered", io_engine="posix", **SHAPE)

    def put(*some: bytes) -> None:
        for key in some:
            generation[key] += 1
            metadata = key[:1] * 255 if len(key) == 255 else key[::-1] if key[-1] % 2 else None
            store.put(key, value_of(key, generation[key]), metadata=metadata)

    put(*keys[:12])
    store.delete(keys[3])
    put(keys[0])
    store.snapshot()
    put(*keys[12:18])
    store.delete_many([keys[12], keys[5]])
    store.snapshot()
    put(keys[20], keys[21], keys[1], keys[2])
    store.delete(keys[14])
    put(*keys[18:20], keys[4])
    keep(work, path, store, generation, value_of)


def build_rich(path: Path) -> None:
    """Make a region of two pools, with what plain records do not show."""
    work = path.with_name(path.name + ".work")
    keys = [b"key-%02d" % number for number in range(14)]
    generation = dict.fromkeys(keys, 0)
    store = tablespace.open(
        work, on_full="evict", io_mode="buffered", io_engine="posix", compression="lz4", **RICH
    )

    def put(*some: bytes) -> None:
        for key in some:
            generation[key] += 1
            store.put(key, rich_value_of(key, generation[key]))

    def condemn(key: bytes) -> None:
        """Take a key's slot out of use, as if the disk were bad there."""
        entry = store.stat(key)
        assert entry is not None
        size = store._index.allocator.slot_bytes_of_container(entry.container)
        with open(work / "containers" / f"{entry.container:04d}.bin", "r+b") as file:
            file.seek(entry.slot * size)
            file.write(b"damaged!")
        assert store.get(key) is None
        with mock.patch.object(quarantine, "try_slot", lambda *_: (Verdict.BAD, 0)):
            store.flush()

    put(*keys[:8])
    condemn(keys[1])
    condemn(keys[2])
    store.snapshot()
    assert store._committer.retest()
    condemn(keys[3])
    put(*keys[8:], keys[0])
    store.delete(keys[4])
    assert store.stats().quarantined == 1
    keep(work, path, store, generation, rich_value_of)


def keep(
    work: Path,
    path: Path,
    store: tablespace.Store,
    generation: dict[bytes, int],
    value: Callable[[bytes, int], bytes],
) -> None:
    """Copy a region as a process that dies now would leave it, and what it must give."""
    expected = {}
    for key in store:
        entry = store.stat(key)
        assert entry is not None and store.get(key) == value(key, generation[key])
        expected[key.hex()] = [generation[key], entry.metadata.hex() if entry.metadata else None]
    # Not closed: the journal is part of what must be read.
    reserved = shutil.ignore_patterns("*.spare*", "*.old*")
    shutil.copytree(work, path / "region", ignore=reserved)
    store.close()
    shutil.rmtree(work)
    (path / "expected.json").write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")
    with open(path / "region" / "region.json", "r+b") as file:
        # Who wrote it is nobody's business and not part of the format's promise.
        file.seek(HOLDER_OFFSET)
        file.write(b" " * (HOLDER_BYTES - 1) + b"\n")
    for log in (path / "region").glob("index.log*"):
        log.write_bytes(log.read_bytes().rstrip(b"\n") + b"\n")


def test_there_is_a_golden_region_of_this_format() -> None:
    from tablespace.region import FORMAT_VERSION

    assert {f"v{FORMAT_VERSION}", f"v{FORMAT_VERSION}-rich"} <= set(VERSIONS)


@pytest.mark.parametrize("io_engine", ["posix", "auto"])
@pytest.mark.parametrize("version", VERSIONS)
def test_a_golden_region_opens_and_reads(version: str, io_engine: str, tmp_path: Path) -> None:
    path = tmp_path / "region"
    shutil.copytree(GOLDEN / version / "region", path)
    expected = json.loads((GOLDEN / version / "expected.json").read_text())
    for _ in range(2):
        with tablespace.open(path, on_full="evict", io_engine=io_engine) as store:
            audit(store)
            assert sorted(key.hex() for key in store) == sorted(expected)
            for text, (generation, metadata) in expected.items():
                key = bytes.fromhex(text)
                entry = store.stat(key)
                assert store.get(key) == VALUES[version](key, generation)
                assert entry is not None
                assert entry.metadata == (bytes.fromhex(metadata) if metadata else None)
        # Opened a second time, from the snapshot that closing wrote.


@pytest.mark.parametrize("version", VERSIONS)
def test_a_golden_region_is_read_from_its_older_snapshot_too(version: str, tmp_path: Path) -> None:
    path = tmp_path / "region"
    shutil.copytree(GOLDEN / version / "region", path)
    (path / "index.snapshot.json").unlink()
    expected = json.loads((GOLDEN / version / "expected.json").read_text())
    with tablespace.open(path, on_full="evict") as store:
        assert sorted(key.hex() for key in store) == sorted(expected)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_golden_region_is_small(version: str) -> None:
    files = [path for path in (GOLDEN / version).rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 200 << 10


if __name__ == "__main__":
    build(Path(sys.argv[1], "v1"))
    build_rich(Path(sys.argv[1], "v1-rich"))
