"""What a daemon's memory is made of is there from the start, and what is freed goes back."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

SLOT = 65536
READERS = 6

# Blocks as tables that double leave them: a large one is freed, and the next goes elsewhere.
LARGE_BLOCKS = """
import ctypes, sys
from kvd import allocator

if sys.argv[1] == "steady":
    assert allocator.hold_steady()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]


def resident():
    with open("/proc/self/statm") as counts:
        return int(counts.read().split()[1]) * 4096


def table(size):
    place = libc.malloc(size)
    libc.memset(place, 1, size)
    return place


libc.free(table(8 << 20))  # glibc learns from it.
before = resident()
place = table(1 << 20)
size = 1 << 20
small = []
for step in range(40):
    size += 64 << 10
    larger = table(size)
    libc.free(place)
    # What lives on, and lies in the hole or behind it.
    small.append(table(100 << 10))
    place = larger
libc.free(place)
print(resident() - before - len(small) * (100 << 10))
"""


def test_what_large_tables_held_goes_back_to_the_system():
    """The daemon's resident memory grew by a MiB whenever a table doubled that did not fit the
    hole which the one before had left."""
    left = {}
    for how in ("plain", "steady"):
        done = subprocess.run(
            [sys.executable, "-c", LARGE_BLOCKS, how], capture_output=True, text=True, check=True
        )
        left[how] = int(done.stdout)
    assert left["steady"] < 1 << 20 < left["plain"], left


def rings(pid):
    """Return how many io_uring instances a process has."""
    found = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found += "io_uring" in os.readlink(entry)
        except FileNotFoundError:
            pass
    return found


def test_readers_have_all_they_need_before_they_read(daemons, make_blocks):
    """Each that came to work for the first time brought a ring and 2 MiB, in minute 13, 17 and
    24 of a soak."""
    flags = ("--long-workers-per-shard", str(READERS), "--max-bytes", "4M")
    daemon = daemons(*flags, "--long-bytes", "64M").start()
    before = rings(daemon.pid)
    if not before:
        pytest.skip("no io_uring here")
    assert before >= READERS
    values = make_blocks(400)
    with daemon.client() as client:
        blocks = client.namespace("m")
        for first in range(0, 400, 16):
            part = list(values.items())[first : first + 16]
            while not all(blocks.put_many(part)):
                client.flush(1)
        assert client.flush(20).pending == 0

        def read(number):
            with daemon.client() as other:
                own = other.namespace("m")
                for key in list(values)[number :: 2 * READERS]:
                    own.get(key)

        threads = [threading.Thread(target=read, args=(number,)) for number in range(2 * READERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert client.stats().long.hits > 100
    assert rings(daemon.pid) == before
