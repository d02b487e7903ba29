"""What a root may hold: budget, floor, order of eviction, accounts after restarts and damage."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from kvd_connectors.gpu_direct import ledger
from kvd_connectors.gpu_direct.directory import RootDirectory
from kvd_connectors.gpu_direct.memory import HostMemory
from kvd_connectors.gpu_direct.store import ChunkStore

from .chunks import FILE, PAYLOAD, bytes_on_disk, chunk_files, fill, keys_of, set_age

Make = Callable[..., ChunkStore]


def put(store: ChunkStore, memory: HostMemory, number: int) -> bool:
    fill(memory, number)
    return store.put(keys_of(number), memory, PAYLOAD)


def age_all(directory: RootDirectory) -> None:
    """Make what is there older, so that file times differ whatever the clock's steps are."""
    for path in chunk_files(directory):
        set_age(path, 100.0)


def test_three_budgets_of_chunks_leave_the_newest(
    make_store: Make, memory: HostMemory, directory: RootDirectory
) -> None:
    store = make_store(budget_bytes=5 * FILE + 100)
    for number in range(15):
        assert put(store, memory, number)
        assert bytes_on_disk(directory) <= 5 * FILE + 100
        age_all(directory)
    assert [number for number in range(15) if store.has(keys_of(number))] == [10, 11, 12, 13, 14]
    counted = store.status()
    assert counted["evicted"] == 10 and counted["evicted_bytes"] == 10 * FILE
    assert counted["used_bytes"] == bytes_on_disk(directory) == 5 * FILE


def test_what_was_used_last_stays(
    make_store: Make, memory: HostMemory, directory: RootDirectory
) -> None:
    store = make_store(budget_bytes=3 * FILE)
    for number in range(3):
        put(store, memory, number)
        age_all(directory)
    assert store.get(keys_of(0), memory) == PAYLOAD
    put(store, memory, 3)
    assert [number for number in range(4) if store.has(keys_of(number))] == [0, 2, 3]


def test_a_use_after_the_look_counts_too(
    make_store: Make, memory: HostMemory, directory: RootDirectory
) -> None:
    """The list of victims is from an earlier look; another process has read one of them since."""
    store = make_store(budget_bytes=4 * FILE)
    for number in range(5):
        put(store, memory, number)
        age_all(directory)
    store = make_store(budget_bytes=4 * FILE)  # Looks: 1 2 3 4, the oldest first.
    put(store, memory, 5)  # 1 goes; 2 3 4 are known as they were.
    other = make_store(budget_bytes=4 * FILE)
    assert other.get(keys_of(2), memory) == PAYLOAD
    put(store, memory, 6)
    assert [number for number in range(7) if store.has(keys_of(number))] == [2, 4, 5, 6]


def test_a_chunk_over_the_budget_is_refused_and_evicts_nothing(
    make_store: Make, memory: HostMemory, directory: RootDirectory
) -> None:
    small = make_store(budget_bytes=2 * FILE)
    put(small, memory, 1)
    big = HostMemory(3 * PAYLOAD)
    assert not small.put(keys_of(2), big, 3 * PAYLOAD)
    assert small.status()["refused_budget"] == 1
    assert small.has(keys_of(1)) and bytes_on_disk(directory) == FILE


def test_the_default_budget_is_finite_and_the_same_after_a_restart(
    make_store: Make,
    memory: HostMemory,
    directory: RootDirectory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Taken from free space alone it would shrink by what the cache itself holds."""
    disk = Disk(directory, total_bytes=100 * FILE)
    monkeypatch.setattr(os, "statvfs", disk.statvfs)
    store = make_store(budget_bytes=None)
    first = store.budget_bytes
    assert first == pytest.approx(50 * FILE, rel=0.01)
    for number in range(30):
        put(store, memory, number)
    again = make_store(budget_bytes=None)
    assert again.budget_bytes == first
    put(again, memory, 31)
    assert again.status()["evicted"] == 0


class Disk:
    """A file system of some size on which nothing but chunks and `others_bytes` is."""

    def __init__(self, directory: RootDirectory, total_bytes: int) -> None:
        self._directory = directory
        self._real = os.statvfs
        self.total_bytes = total_bytes
        self.others_bytes = 0

    def statvfs(self, path: object) -> os.statvfs_result:
        free = self.total_bytes - self.others_bytes - bytes_on_disk(self._directory)
        found = list(self._real(self._directory.path))
        found[0:5] = [4096, 4096, 0, 0, max(0, free) // 4096]
        return os.statvfs_result(found)


def test_the_floor_is_kept(
    make_store: Make,
    memory: HostMemory,
    directory: RootDirectory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = Disk(directory, total_bytes=10 * FILE)
    monkeypatch.setattr(os, "statvfs", disk.statvfs)
    store = make_store(floor_bytes=4 * FILE)
    for number in range(9):
        assert put(store, memory, number)
        assert disk.statvfs("").f_bavail * 4096 >= 4 * FILE
        age_all(directory)
    assert [number for number in range(9) if store.has(keys_of(number))] == [3, 4, 5, 6, 7, 8]
    # Others take what they need: the cache gives way while it can.
    disk.others_bytes = 5 * FILE
    assert put(store, memory, 20)
    assert bytes_on_disk(directory) == FILE and store.has(keys_of(20))
    # And nothing is thrown away for a chunk that cannot be had.
    disk.others_bytes = 8 * FILE
    assert not put(store, memory, 21)
    assert store.status()["refused_floor"] == 1 and store.has(keys_of(20))


def test_what_a_restart_finds_counts(
    make_store: Make, memory: HostMemory, directory: RootDirectory
) -> None:
    for cycle in range(3):
        store = make_store(budget_bytes=5 * FILE)
        assert store.status()["used_bytes"] == bytes_on_disk(directory)
        for number in range(4):
            put(store, memory, 10 * cycle + number)
            assert bytes_on_disk(directory) <= 5 * FILE
            age_all(directory)
        # As after kill -9: nothing of the store's is closed.
    assert [number for number in range(30) if store.has(keys_of(number))] == [13, 20, 21, 22, 23]


@pytest.mark.parametrize("content", [b"", b"\0" * 16, b"\xff" * 16, b"x" * 100, None])
def test_a_damaged_account_is_made_again(
    make_store: Make, memory: HostMemory, directory: RootDirectory, content: bytes | None
) -> None:
    store = make_store(budget_bytes=3 * FILE)
    for number in range(3):
        put(store, memory, number)
        age_all(directory)
    directory.account_path.unlink()
    if content is not None:
        directory.account_path.write_bytes(content)
    assert store.status()["used_bytes"] == 3 * FILE
    put(store, memory, 4)
    assert bytes_on_disk(directory) == store.status()["used_bytes"] == 3 * FILE


@pytest.mark.parametrize("told", [0, 2 * FILE, 1 << 60])
def test_an_account_that_is_wrong_is_put_right(
    make_store: Make, memory: HostMemory, directory: RootDirectory, told: int
) -> None:
    """Too high is what a kill between account and file leaves; too low nothing should."""
    store = make_store(budget_bytes=3 * FILE)
    for number in range(3):
        put(store, memory, number)
        age_all(directory)
    directory.account_path.write_bytes(ledger.ACCOUNT.pack(told, told ^ ledger.MASK))
    again = make_store(budget_bytes=3 * FILE)
    assert again.status()["used_bytes"] == 3 * FILE
    # And by a running store, once it believes to be full.
    directory.account_path.write_bytes(ledger.ACCOUNT.pack(1 << 60, (1 << 60) ^ ledger.MASK))
    assert put(again, memory, 5) and again.status()["used_bytes"] == bytes_on_disk(directory)


def test_files_that_an_operator_removed_are_no_longer_counted(
    make_store: Make, memory: HostMemory, directory: RootDirectory
) -> None:
    store = make_store(budget_bytes=3 * FILE)
    for number in range(3):
        put(store, memory, number)
        age_all(directory)
    for path in chunk_files(directory)[:2]:
        path.unlink()
    left = [number for number in range(3) if store.has(keys_of(number))]
    assert put(store, memory, 5)
    assert store.has(keys_of(left[0])), "room was there, and a chunk went for it"
    assert store.status()["used_bytes"] == bytes_on_disk(directory) == 2 * FILE


def test_leftovers_of_dead_writers_go_and_live_ones_stay(
    make_store: Make, memory: HostMemory, directory: RootDirectory
) -> None:
    with directory.locked():
        fd, live = directory.create("00" * 20, FILE, 0)
        dead_fd, dead = directory.create("11" * 20, FILE, 0)
    os.close(dead_fd)
    store = make_store(budget_bytes=2 * FILE)
    assert live.exists() and not dead.exists()
    assert store.status()["leftovers_removed"] == 1
    assert store.status()["used_bytes"] == FILE, "what is being written counts"
    assert put(store, memory, 1) and put(store, memory, 2)
    assert bytes_on_disk(directory) == 2 * FILE and live.exists()
    os.close(fd)


def test_a_lock_held_for_long_costs_a_store_and_no_more(
    make_store: Make, memory: HostMemory, tmp_path: object, directory: RootDirectory
) -> None:
    impatient = RootDirectory(directory.root, lock_wait_s=0.05)
    store = make_store(directory=impatient)
    put(store, memory, 1)
    with directory.locked():
        assert not put(store, memory, 2)
        # Look-ups and loads take no lock.
        assert store.has(keys_of(1)) and store.get(keys_of(1), memory) == PAYLOAD
    assert store.status()["refused_lock"] == 1
    assert put(store, memory, 2)
