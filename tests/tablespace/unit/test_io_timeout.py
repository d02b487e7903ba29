"""Transfers that never end: calls end by their time limit, and what hangs is not used again."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tablespace.commit import Committer
from tablespace.context_pool import MAX_BURIED
from tablespace.io.commit_group import Stage
from tablespace.io.device import os_error
from tablespace.layout import Geometry
from tablespace.store import Store
from tablespace.testing import Disk, Fault, FaultPlan
from tablespace.testing.crash import Hunt, open_simulated
from tablespace.testing.model import audit
from tablespace.testing.workload import Workload

import tablespace

Opener = Callable[..., Store]
Preload = Callable[[str], str]
GEOMETRY = Geometry(4096, 32768, 2)
KEYS = [b"key-%d" % number for number in range(6)]
VALUE = b"v" * 4096


def filled(seed: int, timeout_s: float | None = 5.0) -> tuple[Disk, Store]:
    disk = Disk(seed=seed)
    store = open_simulated(disk, GEOMETRY, io_timeout_s=timeout_s)
    store.put_many([(key, VALUE) for key in KEYS])
    return disk, store


def lost(kind: str, nth: int = 1) -> FaultPlan:
    return FaultPlan(Fault(kind, nth, lose=True, label="containers"))


# On the simulated disk, where a limit is over at once.


@pytest.mark.parametrize("nth", [1, 3, 6])
def test_a_read_whose_completion_is_lost_ends_by_its_limit(nth: int) -> None:
    """One completion was lost under load, and the caller waited for it for ever."""
    disk, store = filled(nth)
    buffers = [bytearray(4096) for _ in KEYS]
    disk.faults = lost("read", nth)
    with pytest.raises(TimeoutError, match="read of 6 keys ended within io_timeout_s=5") as caught:
        store.get_many_into(KEYS, buffers)
    disk.faults = None
    assert caught.value.errno == errno.ETIMEDOUT and "Remedy:" in str(caught.value)
    # What may still be written to is nobody's: neither the buffers nor the slots.
    for buffer in buffers:
        with pytest.raises(BufferError):
            buffer.extend(b"more")
    assert store.delete_many(KEYS) == 6
    found = store.stats()
    assert (found.limbo, found.live) == (6, 0)
    free = found.free
    taken = store.put_many((b"new-%d" % number, VALUE) for number in range(found.capacity))
    assert taken.count(True) == free == found.capacity - 6
    audit(store)
    assert store.get(b"new-0") == VALUE
    store.close()
    assert disk.violations == []
    audit(open_simulated(disk.survivor(), GEOMETRY), recovered=True)


def test_a_slot_that_hangs_is_not_evicted_either() -> None:
    disk = Disk(seed=9)
    store = open_simulated(disk, GEOMETRY, evict=True, io_timeout_s=1.0)
    store.put_many([(key, VALUE) for key in KEYS])
    disk.faults = lost("read", 2)
    with pytest.raises(TimeoutError):
        store.get_many(KEYS[:2])
    disk.faults = None
    places = {key: (entry.container, entry.slot) for key in KEYS[:2] if (entry := store.stat(key))}
    for number in range(60):
        store.put(b"new-%d" % number, VALUE)
    others = [entry for key in store if key not in places and (entry := store.stat(key))]
    assert {(each.container, each.slot) for each in others}.isdisjoint(places.values())
    audit(store)


def test_reads_that_hang_again_and_again_are_given_up_with_a_bound() -> None:
    disk, store = filled(4)
    for _ in range(MAX_BURIED):
        disk.faults = lost("read")
        with pytest.raises(TimeoutError):
            store.get(KEYS[0])
    disk.faults = None
    with pytest.raises(OSError, match=f"{MAX_BURIED} reads met a queue"):
        store.get(KEYS[1])
    store.put(b"another", b"x")
    store.close()


@pytest.mark.parametrize("nth", [1, 2, 5])
def test_a_put_whose_completion_is_lost_turns_the_store_read_only(nth: int) -> None:
    disk, store = filled(nth + 10)
    values = [bytearray(b"n" * 4096) for _ in range(5)]
    before = store.stats()
    disk.faults = lost("write", nth)
    with pytest.raises(tablespace.FailedError) as caught:
        store.put_many([(b"new-%d" % at, value) for at, value in enumerate(values)])
    disk.faults = None
    assert isinstance(caught.value.__cause__, TimeoutError)
    assert "commit's blocks ended within io_timeout_s=5" in str(caught.value.__cause__)
    with pytest.raises(BufferError):
        values[0].extend(b"more")
    found = store.stats()
    assert found.failed is not None and found.reserved == 5 and found.live == before.live
    assert store.get_many(KEYS) == [VALUE] * 6
    with pytest.raises(tablespace.FailedError):
        store.put(b"later", b"x")
    store.close()
    assert disk.violations == []
    again = open_simulated(disk.survivor(), GEOMETRY)
    audit(again, recovered=True)
    assert again.get_many(KEYS) == [VALUE] * 6 and len(again) == 6


def test_no_crash_around_a_hanging_write_breaks_a_promise() -> None:
    workload = Workload(GEOMETRY, seed=3)
    workload.put(*KEYS[:3])
    workload.recorder.call("close")
    disk, recorder = workload.disk, workload.recorder
    recorder.store = open_simulated(disk, GEOMETRY, io_timeout_s=1.0)
    start = disk.clock
    disk.faults = lost("write", 2)
    assert not recorder.put_many([(key, bytes([at]) * 4096) for at, key in enumerate(KEYS)])
    disk.faults = None
    recorder.call("close")
    assert Hunt(recorder, GEOMETRY, limit=16, start=start).run().images > 10


def forgive(self: Committer, stage: Stage, code: int, path: str) -> None:
    """The broken rule: a commit that hangs is given up like one that wrote nothing."""
    if stage is Stage.QUEUE_BROKE:
        self._in_doubt = False
        raise os_error(code, path)
    real_judge(self, stage, code, path)


real_judge = Committer._judge


def test_slots_of_a_hanging_write_that_are_freed_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Committer, "_judge", forgive)
    disk, store = filled(20)
    disk.faults = lost("write")
    with pytest.raises(TimeoutError):
        store.put(b"hangs", b"n" * 4096)
    found = store.stats()
    assert (found.reserved, found.failed) == (0, None)


def test_without_a_limit_a_lost_completion_is_waited_for() -> None:
    disk, store = filled(5, timeout_s=None)
    disk.faults = lost("read")
    with pytest.raises(OSError, match="Input/output"):
        store.get(KEYS[0])
    assert disk.violations == ["a wait without end"]


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), float("inf"), "5", True, 1e12])
def test_another_limit_is_refused(open_small: Opener, tmp_path: Path, wrong: object) -> None:
    with pytest.raises(ValueError, match="io_timeout_s must be None, or seconds above 0"):
        open_small(io_timeout_s=wrong)
    assert not (tmp_path / "region").exists()


# With io_uring: a pipe in place of a container is a transfer that ends when the test says so.


def replace_by_pipe(store: Store, *, full: bool) -> tuple[int, int]:
    """Let the containers' descriptors name a pipe: reads wait for bytes, writes for room."""
    read_end, write_end = os.pipe()
    if full:
        os.set_blocking(write_end, False)
        try:
            while True:
                os.write(write_end, bytes(4096))
        except BlockingIOError:
            os.set_blocking(write_end, True)
    for device in store._devices:
        os.dup2(write_end if full else read_end, device.fileno())
    return read_end, write_end


@pytest.mark.usefixtures("need_uring")
def test_a_read_of_the_kernels_ends_by_its_limit_and_its_memory_is_left_to_it(
    open_small: Opener,
) -> None:
    store = open_small(io_mode="buffered", io_engine="uring", io_timeout_s=0.2)
    store.put_many((key, VALUE) for key in KEYS)
    buffer = bytearray(4096)
    read_end, write_end = replace_by_pipe(store, full=False)
    started = time.monotonic()
    with pytest.raises(TimeoutError, match=r"io_timeout_s=0\.2"):
        store.get_into(KEYS[0], buffer)
    assert 0.15 < time.monotonic() - started < 20
    with pytest.raises(BufferError):
        buffer.extend(b"more")
    # The transfer ends after all, into the memory that is still its own.
    os.write(write_end, b"late" * 1024)
    for _ in range(2000):
        if buffer[:4] == b"late":
            break
        time.sleep(0.005)
    assert buffer == b"late" * 1024
    started = time.monotonic()
    store.close()
    assert time.monotonic() - started < 20
    os.close(read_end)
    os.close(write_end)
    again = open_small(io_mode="buffered")
    assert again.get_many(KEYS) == [VALUE] * 6


@pytest.mark.usefixtures("need_uring")
def test_many_reads_under_way_are_not_cut_short_by_a_limit_they_keep(open_small: Opener) -> None:
    store = open_small(io_engine="uring", io_timeout_s=10, max_bytes="4M")
    keys = [b"%04d" % number for number in range(600)]
    store.put_many((key, key * 1000) for key in keys)
    for _ in range(5):
        assert store.get_many(keys) == [key * 1000 for key in keys]
    assert "io timeout 10 s: asked for" in store.stats().choices


@pytest.mark.usefixtures("need_uring")
def test_a_write_of_the_kernels_ends_by_its_limit_and_the_region_opens_again(
    open_small: Opener,
) -> None:
    store = open_small(io_mode="buffered", io_engine="uring", io_timeout_s=0.2)
    store.put_many((key, VALUE) for key in KEYS)
    read_end, write_end = replace_by_pipe(store, full=True)
    started = time.monotonic()
    with pytest.raises(tablespace.FailedError, match=r"io_timeout_s=0\.2"):
        store.put(b"hangs", VALUE)
    store.close()
    assert time.monotonic() - started < 20
    again = open_small(io_mode="buffered")
    assert again.get_many(KEYS) == [VALUE] * 6 and b"hangs" not in again
    audit(again, recovered=True)
    os.close(read_end)
    os.close(write_end)


# With the posix engine: its threads hang in pread or pwrite.

STUCK = """
import pathlib, sys, time, tablespace
path, when = sys.argv[1:]
store = tablespace.open(path, max_bytes="256K", slot_bytes="4K", io_mode="buffered",
                        io_engine="posix", io_timeout_s=0.3)
store.put_many((b"%d" % n, b"v" * 4096) for n in range(6))
pathlib.Path(when).touch()
buffers = [bytearray(4096) for _ in range(6)]
started = time.monotonic()
try:
    store.get_many_into([b"%d" % n for n in range(6)], buffers)
except TimeoutError as error:
    print("read:", error.errno)
try:
    buffers[0].extend(b"more")
except BufferError:
    print("held")
assert store.get(b"0") == b"v" * 4096
store.delete(b"1")
assert store.stats().limbo == 1
pathlib.Path(when).unlink()
store.put_many((b"new-%d" % n, b"w" * 4096) for n in range(20))
places = {(e.container, e.slot) for e in map(store.stat, store)}
print("reused" if (0, 1) in places else "kept from use")
store.close()
store = tablespace.open(path, io_engine="posix", io_mode="buffered", io_timeout_s=0.3)
store.clear()
pathlib.Path(when).touch()
try:
    store.put_many((b"%d" % n, b"x" * 4096) for n in range(40))
except tablespace.FailedError as error:
    print("put:", type(error.__cause__).__name__)
store.close()
pathlib.Path(when).unlink()
with tablespace.open(path, io_engine="posix", io_mode="buffered") as store:
    print(len(store), "after reopening")
assert time.monotonic() - started < 60
"""


def test_threads_that_hang_are_left_behind(tmp_path: Path, preload: Preload) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STUCK, tmp_path / "region", tmp_path / "when"],
        env={
            **os.environ,
            "LD_PRELOAD": preload("stuck_pread"),
            "STUCK_WHEN": str(tmp_path / "when"),
        },
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[:3] == [f"read: {errno.ETIMEDOUT}", "held", "kept from use"]
    assert said[3:] == ["put: TimeoutError", "0 after reopening"]
