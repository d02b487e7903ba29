"""Many slots, many keys, many containers: the cost of opening and asking does not follow them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tablespace import Store

Opener = Callable[..., Store]
Preload = Callable[[str], str]

MAKE = """
import sys, tablespace
path, size, keys = sys.argv[1], sys.argv[2], int(sys.argv[3])
with tablespace.open(path, max_bytes=size, slot_bytes="4K") as store:
    for start in range(0, keys, 4096):
        store.put_many((b"key-%d" % n, b"") for n in range(start, min(keys, start + 4096)))
"""

OPEN = """
import os, sys, time
import tablespace
path = sys.argv[1]
for folder, _, names in os.walk(path):
    for name in names:
        with open(os.path.join(folder, name), "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

def bytes_read():
    return int(open("/proc/self/io").read().split("rchar: ")[1].split()[0])

before, started = bytes_read(), time.perf_counter()
store = tablespace.open(path)
taken_s = time.perf_counter() - started
print(taken_s, bytes_read() - before, len(store), store.stats().capacity)
index = sum(os.path.getsize(os.path.join(path, name)) for name in os.listdir(path)
            if name.startswith("index"))
print(index)
"""


def need_room(path: Path, gib: int) -> None:
    """Skip where the file system is smaller than a region's containers, sparse as they are."""
    free = shutil.disk_usage(path).free >> 30
    if free < gib:
        pytest.skip(f"the file system of the tests has {free} GiB free, not {gib}")


def run(script: str, *arguments: str, shim: str = "") -> list[str]:
    refuse = {"LD_PRELOAD": shim, "REFUSE_FALLOCATE": "95"} if shim else {}
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, **refuse},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    "size, keys, most_s",
    [("4G", 20_000, 5), pytest.param("40G", 400_000, 10, marks=pytest.mark.long)],
    ids=["1 million slots", "10 million slots"],
)
def test_a_cold_opening_reads_the_index_alone(
    tmp_path: Path, preload: Preload, size: str, keys: int, most_s: float
) -> None:
    """The header of each of 8 million entries was read at the start: 20 minutes from a cold disk.
    Here containers are sparse, so that the region takes no room."""
    need_room(tmp_path, int(size[:-1]))
    region = str(tmp_path / "region")
    run(MAKE, region, size, str(keys), shim=preload("refuse_calls"))
    taken_s, read, entries, capacity, index = map(float, run(OPEN, region))
    print(f"{capacity:.0f} slots, {entries:.0f} entries: {taken_s:.2f} s, {read:.0f} bytes read")
    assert entries == keys and capacity >= 262_144 * int(size[:-1]) * 0.99
    assert taken_s < most_s
    # The files of the index, region.json, and what the choice of IO looks at.
    assert read < index + (1 << 20)


@pytest.mark.parametrize("keys", [20_000, pytest.param(1_000_000, marks=pytest.mark.long)])
def test_asking_for_128_keys_is_quick_and_files_are_few_however_many_there_are(
    tmp_path: Path, open_small: Opener, preload: Preload, keys: int
) -> None:
    """Millions of files in one directory met the file system's limit with most of the disk free,
    and every question walked them all."""
    need_room(tmp_path, 8)
    region = tmp_path / "region"
    run(MAKE, str(region), "8G", str(keys), shim=preload("refuse_calls"))
    store = open_small(region, max_bytes=None, slot_bytes=None)
    assert len(store) == keys
    took = []
    for start in range(0, keys, max(1, keys // 500)):
        wanted = [b"key-%d" % (start + number) for number in range(128)]
        before = time.perf_counter()
        found = store.contains_many(wanted)
        took.append(time.perf_counter() - before)
        assert found == [start + number < keys for number in range(128)]
    took.sort()
    print(f"{keys} keys: p99 {took[len(took) * 99 // 100] * 1e6:.0f} us")
    assert took[len(took) * 99 // 100] < 1e-3
    containers = len(list((region / "containers").iterdir()))
    files = [path for path in region.rglob("*") if path.is_file()]
    assert len(files) <= containers + 8


def test_a_read_costs_the_same_with_hundreds_of_containers(tmp_path: Path) -> None:
    script = """
import sys, time, tablespace
path = sys.argv[1]
times = []
for number, count in enumerate((4, 500)):
    with tablespace.open(path + str(number), max_bytes=count * 16384, container_bytes="16K",
                         slot_bytes="4K") as store:
        store.put(b"k", b"")
        best = 1.0
        for _ in range(7):
            started = time.perf_counter()
            for _ in range(300):
                store.get(b"k")
            best = min(best, (time.perf_counter() - started) / 300)
        times.append(best)
print(*times)
"""
    few, many = map(float, run(script, str(tmp_path / "region")))
    assert many < 3 * few + 5e-6
