"""Containers written ahead of their first use: in the background, and never over a value."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tablespace.layout import Geometry
from tablespace.prewrite import Prewriter
from tablespace.testing import Breach, Disk, Fault, FaultPlan, Hunt, Workload
from tablespace.testing.model import audit, read_all

import tablespace
from tablespace import prewrite

GEOMETRY = Geometry((4096, 16384), 32768, 5)
KEYS = [b"key-%02d" % number for number in range(12)]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prewrite, "CHUNK_BYTES", 8192)


def prewriter_of(workload: Workload) -> Prewriter:
    store = workload.recorder.store
    assert store is not None
    return Prewriter(store._directory.path, store._devices, store._committer)


def mixed(seed: int) -> Workload:
    """Run operations with steps of prewriting between them; every read is judged."""
    workload = Workload(GEOMETRY, evict=True, seed=seed)
    ahead = prewriter_of(workload)
    written = 0
    for number in range(30):
        workload.random(1, KEYS, reopen=False)
        if number == 15:
            workload.reopen()
            written += ahead.written_bytes
            ahead = prewriter_of(workload)
        ahead.step()
        workload.recorder.get_many(KEYS)
    store = workload.recorder.store
    assert store is not None
    audit(store)
    assert written + ahead.written_bytes >= 2 * 32768
    return workload


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.usefixtures("small_chunks")
def test_no_value_is_ever_written_over(seed: int) -> None:
    workload = mixed(seed)
    store = workload.recorder.store
    assert store is not None
    workload.recorder.judge(read_all(store, KEYS), workload.recorder.allowed)


@pytest.mark.usefixtures("small_chunks")
def test_a_crash_while_zeros_are_on_their_way_loses_nothing() -> None:
    report = Hunt(mixed(4).recorder, GEOMETRY, limit=6, nested_limit=0, stride=4).run()
    assert report.images > 200


class AllFree:
    """An allocator's answer for somebody who does not look."""

    def pool_of_container(self, container: int) -> int:
        return -1


class Careless:
    """What a prewriter sees of a committer when it does not look who owns a container."""

    failed = None
    allocator = AllFree()


def test_zeros_in_a_container_that_is_in_use_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write = Prewriter._write_chunk

    def write_anywhere(self: Prewriter, container: int) -> bool:
        monkeypatch.setattr(self, "_committer", Careless())
        return write(self, container)

    monkeypatch.setattr(Prewriter, "_ahead", lambda self: [0])
    monkeypatch.setattr(Prewriter, "_write_chunk", write_anywhere)
    monkeypatch.setattr(Disk, "first_hole", lambda self, node, offset: 0)
    workload = Workload(GEOMETRY)
    assert workload.put(*KEYS[:3])
    prewriter_of(workload).step()
    with pytest.raises(Breach):
        workload.recorder.get_many(KEYS[:3])


@pytest.mark.usefixtures("small_chunks")
def test_two_containers_are_kept_ahead_and_no_more() -> None:
    workload = Workload(GEOMETRY)
    ahead = prewriter_of(workload)
    while ahead.step():
        pass
    assert ahead.written_bytes == 2 * 32768
    # A container of those is claimed, and one more is written.
    assert workload.put(KEYS[0])
    claimed = workload.recorder.store
    assert claimed is not None
    taken = sum(pool.containers for pool in claimed.stats().pools)
    while ahead.step():
        pass
    assert (taken, ahead.written_bytes) == (1, 3 * 32768)
    assert "done: 0000.bin, 0001.bin" in ahead.describe()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_an_error_ends_it_and_nothing_else(code: int) -> None:
    workload = Workload(GEOMETRY)
    ahead = prewriter_of(workload)
    workload.disk.faults = FaultPlan(Fault("write", 1, code, label="containers/"))
    assert not ahead.step()
    assert not ahead.step() and ahead.finished()
    assert workload.disk.faults.met == 1
    assert os.strerror(code) in ahead.describe()
    assert workload.put(*KEYS[:3]) and not workload.recorder.failures


def test_after_the_store_is_closed_a_step_ends_it() -> None:
    workload = Workload(GEOMETRY)
    ahead = prewriter_of(workload)
    workload.recorder.call("close")
    with pytest.raises(tablespace.ClosedError):
        ahead.step()


# On the real file system.


@pytest.fixture
def region(tmp_path: Path, need_direct: None) -> Iterator[Path]:
    path = tmp_path / "region"
    if reason := reason_here(tmp_path):
        pytest.skip(f"no prewriting here: {reason}")
    yield path


def reason_here(path: Path) -> str | None:
    choice = prewrite.IoChoice(direct=True)
    return prewrite.reason_against(str(path), Geometry(4096, 16 << 20, 4), choice)


def settled(store: tablespace.Store) -> Prewriter:
    """Return the prewriter of a store, its thread ended: steps are taken by hand from here on."""
    ahead = store._prewriter
    assert ahead is not None
    ahead.stop()
    return ahead


def test_what_was_written_is_known_without_a_record_of_it(region: Path) -> None:
    with tablespace.open(region, max_bytes="64M", container_bytes="16M") as store:
        ahead = settled(store)
        while ahead.step():
            pass
        assert [device.first_hole(0) >> 20 for device in store._devices] == [16, 16, 0, 0]
    with tablespace.open(region) as store:
        ahead = settled(store)
        before = ahead.written_bytes
        assert not ahead.step() and before == ahead.written_bytes == 0


def test_values_put_while_zeros_are_written_are_all_there(region: Path) -> None:
    with tablespace.open(region, max_bytes="128M", container_bytes="16M") as store:
        ahead = settled(store)
        stop = threading.Event()

        def write() -> None:
            while not stop.is_set():
                ahead.step()

        thread = threading.Thread(target=write)
        thread.start()
        for first in range(0, 1536, 64):
            keys = [b"%d" % number for number in range(first, first + 64)]
            assert all(store.put_many((key, key * 8192) for key in keys))
        stop.set()
        thread.join()
        keys = [b"%d" % number for number in range(1536)]
        assert store.get_many(keys) == [key * 8192 for key in keys]
        assert ahead.written_bytes > 0


def test_a_region_of_64_containers_opens_at_once_and_closes_at_once(region: Path) -> None:
    times = []
    for _ in range(3):
        started = time.monotonic()
        store = tablespace.open(region, max_bytes="4G", container_bytes="64M")
        times.append(time.monotonic() - started)
        assert any(choice.startswith("prewriting 2") for choice in store.stats().choices)
        started = time.monotonic()
        store.close()
        assert time.monotonic() - started < 2
    assert min(times) < 0.5, times
    files = list((region / "containers").iterdir())
    assert len(files) == 64
    assert {path.stat().st_size for path in files} == {64 << 20}
    for path in files:
        path.unlink()


def test_a_child_of_a_fork_ends_without_the_thread(region: Path) -> None:
    with tablespace.open(region, max_bytes="64M", container_bytes="16M") as store:
        child = os.fork()
        if child == 0:
            store.close()
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        store.put(b"k", b"v")
        assert store.get(b"k") == b"v"


def test_a_store_that_is_forgotten_is_not_kept_alive(region: Path) -> None:
    store = tablespace.open(region, max_bytes="64M", container_bytes="16M")
    thread = store._prewriter and store._prewriter._thread
    assert thread is not None and thread.is_alive()
    del store
    import gc

    gc.collect()
    thread.join(30)
    assert not thread.is_alive()
    tablespace.open(region).close()


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"max_bytes": "256K", "slot_bytes": "4K"}, "containers of less than 16M"),
        ({"max_bytes": "64M", "io_mode": "buffered"}, "the page cache is in use"),
    ],
)
def test_why_it_is_not_done_is_said(tmp_path: Path, options: dict[str, str], reason: str) -> None:
    with tablespace.open(tmp_path / "region", **options) as store:  # type: ignore[arg-type]
        assert f"no prewriting: {reason}" in store.stats().choices
        assert store._prewriter is None


def test_memory_is_never_taken_ahead() -> None:
    """On tmpfs an allocated block is memory at once."""
    shared = Path("/dev/shm")
    if not shared.is_dir():
        pytest.skip("no /dev/shm here")
    reason = reason_here(shared)
    assert reason is not None and "not known to help on" in reason
