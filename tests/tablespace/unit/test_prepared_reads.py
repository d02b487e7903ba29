"""`Store.prepare_reads`: what reading calls need is there before they come."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest

import tablespace

CALLS = 4
MIB = 1 << 20


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10


def read_at_once(store: tablespace.Store, calls: int, keys: list[bytes]) -> None:
    """Have many calls read through their staging memory at the same time."""
    together = threading.Barrier(calls)
    # At odd addresses: nothing can be read straight into these.
    buffers = [memoryview(bytearray(65536 + 1))[1:] for _ in range(calls * len(keys))]

    def read(number: int) -> None:
        mine = buffers[number::calls]
        for _ in range(20):
            together.wait(10)
            assert None not in store.get_many_into(keys, mine)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def store_of(tmp_path: Path) -> tuple[tablespace.Store, list[bytes]]:
    store = tablespace.open(tmp_path / "r", max_bytes="8M", slot_bytes="64K")
    keys = [b"%d" % number for number in range(32)]
    store.put_many([(key, bytes(65536)) for key in keys])
    return store, keys


@pytest.mark.parametrize("prepared", [True, False])
def test_memory_is_taken_at_once_and_not_when_calls_first_come_together(
    tmp_path: Path, prepared: bool
) -> None:
    """A daemon grew by 2 MiB whenever one reader more than ever before happened to come, hours
    after its start."""
    store, keys = store_of(tmp_path)
    with store:
        store.get_many(keys)  # The first context is always there.
        gc.collect()
        before = anonymous_bytes()
        if prepared:
            store.prepare_reads(CALLS)
            assert anonymous_bytes() - before >= (CALLS - 1) * 2 * MIB - MIB
            before = anonymous_bytes()
        read_at_once(store, CALLS, keys)
        grown = anonymous_bytes() - before
    # What the buffers and the threads of this test leave is some MiB at most.
    assert grown < 3 * MIB if prepared else grown >= 2 * MIB, grown


def test_calls_beyond_what_was_prepared_are_served(tmp_path: Path) -> None:
    store, keys = store_of(tmp_path)
    with store:
        store.prepare_reads(1)
        store.prepare_reads(0)
        read_at_once(store, CALLS, keys)
        store.prepare_reads(1000)  # As many as there may be.
        read_at_once(store, CALLS, keys)
    with pytest.raises(tablespace.ClosedError):
        store.prepare_reads(1)
    with tablespace.open(tmp_path / "r", read_only=True) as follower:
        follower.prepare_reads(2)
        read_at_once(follower, CALLS, keys)
