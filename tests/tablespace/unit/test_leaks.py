"""Opening, using and closing a region over and over keeps no memory, descriptor or thread."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import tracemalloc
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
from tablespace._core.aligned_buffer import AlignedBuffer
from tablespace.io import host
from tablespace.io import open as open_module

import tablespace

ROUNDS = 200
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# A leak of one object a round, of one entry even, is far above the noise of 100 rounds.
TRACED_NOISE_BYTES = 100 * 64
RESIDENT_NOISE_BYTES = 1 << 20


@dataclass
class Held:
    """What the process holds now."""

    traced_bytes: int
    resident_bytes: int
    descriptors: list[str]
    threads: int


# Both read small text files of /proc; what CPython keeps of each grows for some hundred rounds and
# then no more.  Descriptors and resident bytes are counted for them as for all.
UNTRACED = [
    tracemalloc.Filter(False, open_module.__file__),
    tracemalloc.Filter(False, host.__file__),
    tracemalloc.Filter(False, tracemalloc.__file__),
]


def held() -> Held:
    gc.collect()
    traces = tracemalloc.take_snapshot().filter_traces(UNTRACED).traces
    names = sorted(os.listdir("/proc/self/fd"), key=int)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Held(
        sum(trace.size for trace in traces),
        pages * PAGE_BYTES,
        names,
        len(os.listdir("/proc/self/task")) + threading.active_count(),
    )


def use(path: Path, engine: str) -> None:
    options = {"max_bytes": "256K", "slot_bytes": "4K", "io_engine": engine}
    with tablespace.open(path, on_full="evict", **options) as store:
        store.put_many([(b"%d" % number, b"v" * (number * 100)) for number in range(40)])
        store.get_many([b"%d" % number for number in range(50)])
        buffer = AlignedBuffer(4096)
        store.get_into(b"39", buffer)
        store.delete_many([b"1", b"2", b"absent"])
        store.snapshot()
        for bad in (b"", b"k" * 300):
            with pytest.raises(ValueError):
                store.put(bad, b"v")
        with pytest.raises(tablespace.ValueTooLargeError):
            store.put(b"k", bytes(5000))
        with pytest.raises(tablespace.BusyError):
            tablespace.open(path, **options)
    with pytest.raises(tablespace.ClosedError):
        store.get(b"39")


def growth(path: Path, engine: str) -> tuple[Held, Held]:
    """Return what is held after half of the rounds, and after all of them."""
    tracemalloc.start()
    for _ in range(ROUNDS // 2):
        use(path, engine)
    middle = held()
    for _ in range(ROUNDS // 2):
        use(path, engine)
    return middle, held()


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine", ["uring", "posix"])
def test_a_region_opened_200_times_leaves_nothing_behind(tmp_path: Path, engine: str) -> None:
    # In a process of its own: what else a worker of the suite's does would be counted.
    done = subprocess.run(
        [sys.executable, __file__, tmp_path / "region", engine],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        # How many of malloc's arenas its threads touch depends on what else the machine does.
        env={**os.environ, "MALLOC_ARENA_MAX": "1"},
    )
    middle, end = (Held(**found) for found in json.loads(done.stdout))
    assert end.descriptors == middle.descriptors
    assert end.threads == middle.threads
    assert end.traced_bytes - middle.traced_bytes < TRACED_NOISE_BYTES
    assert end.resident_bytes - middle.resident_bytes < RESIDENT_NOISE_BYTES


def test_what_is_held_shows_a_leak_of_each_kind(tmp_path: Path) -> None:
    """The canary: a descriptor, a thread, Python memory and native memory are all seen."""
    tracemalloc.start()
    try:
        before = held()
        descriptor = os.open(tmp_path, os.O_RDONLY)
        blocks = [bytearray(100) for _ in range(100)]
        buffer = AlignedBuffer(4 << 20)
        memoryview(buffer)[:] = bytes(4 << 20)
        stop = threading.Event()
        thread = threading.Thread(target=stop.wait)
        thread.start()
        after = held()
        stop.set()
        thread.join()
        os.close(descriptor)
    finally:
        tracemalloc.stop()
    assert len(after.descriptors) == len(before.descriptors) + 1
    assert after.threads == before.threads + 2
    assert after.traced_bytes - before.traced_bytes > TRACED_NOISE_BYTES and len(blocks) == 100
    assert after.resident_bytes - before.resident_bytes > RESIDENT_NOISE_BYTES


if __name__ == "__main__":
    print(json.dumps([asdict(found) for found in growth(Path(sys.argv[1]), sys.argv[2])]))
