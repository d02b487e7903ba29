"""Several processes at one root; processes killed at every step of a store; full disks."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvd_connectors.gpu_direct.directory import RootDirectory
from kvd_connectors.gpu_direct.memory import HostMemory
from kvd_connectors.gpu_direct.store import ChunkStore

from .chunks import FILE, PAYLOAD, bytes_on_disk, chunk_files, fill, keys_of

Make = Callable[..., ChunkStore]
WRITER = Path(__file__).with_name("writer.py")


def start(root: Path, budget: int, first: int, count: int, **more: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(WRITER), str(root), str(budget), str(first), str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **more})


def ending(process: subprocess.Popen[str]) -> tuple[list[str], dict[str, object]]:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    *lines, status = output.splitlines()
    return lines, json.loads(status)


def test_two_processes_keep_one_budget(directory: RootDirectory) -> None:
    budget = 10 * FILE
    writers = [start(directory.root, budget, 1000 * number, 60) for number in (1, 2)]
    most = 0
    while any(writer.poll() is None for writer in writers):
        most = max(most, settled(directory))
    found = [ending(writer) for writer in writers]
    assert 8 * FILE < most <= budget
    assert all(line.endswith("True") for lines, _ in found for line in lines[1:])
    evicted = sum(int(str(status["evicted"])) for _, status in found)
    assert evicted == 120 - len(chunk_files(directory)) == 110
    assert bytes_on_disk(directory) == budget


def settled(directory: RootDirectory) -> int:
    """As `bytes_on_disk`, while nobody makes, names or removes a file."""
    with directory.locked():
        return bytes_on_disk(directory)


def test_two_processes_at_one_key_leave_one_file(
    directory: RootDirectory, make_store: Make, memory: HostMemory
) -> None:
    writers = [start(directory.root, 100 * FILE, 0, 40) for _ in range(3)]
    for writer in writers:
        lines, _ = ending(writer)
        assert [line for line in lines[1:] if not line.endswith("True")] == []
    assert len(chunk_files(directory)) == 40
    store = make_store()
    assert store.status()["used_bytes"] == bytes_on_disk(directory) == 40 * FILE
    for number in range(40):
        wanted = fill(memory, number)
        memory.zero(0, PAYLOAD)
        assert store.get(keys_of(number), memory) == PAYLOAD
        assert memory.view == wanted


def test_threads_of_one_store_keep_the_budget(directory: RootDirectory, make_store: Make) -> None:
    store = make_store(budget_bytes=5 * FILE)
    wrong: list[object] = []

    def work(first: int) -> None:
        memory = HostMemory(PAYLOAD)
        for number in range(first, first + 30):
            wanted = fill(memory, number)
            store.put(keys_of(number), memory, PAYLOAD)
            memory.zero(0, PAYLOAD)
            found = store.get(keys_of(number), memory)
            if found is not None and bytes(memory.view) != wanted:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(1000 * each,)) for each in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    counted = store.status()
    assert counted["used_bytes"] == bytes_on_disk(directory) <= 5 * FILE
    assert counted["stored"] == 120 and counted["damaged"] == 0 and counted["hits"] > 20


@pytest.mark.parametrize("step", ["fallocate", "pwritev", "fdatasync", "rename"])
def test_a_kill_at_any_step_leaves_no_half_chunk(
    directory: RootDirectory,
    make_store: Make,
    memory: HostMemory,
    compiled: Callable[..., Path],
    step: str,
) -> None:
    killed = start(
        *(directory.root, 5 * FILE, 0, 1), LD_PRELOAD=str(compiled("preload.c")), STOP_AT=step
    )
    killed.communicate(timeout=60)
    assert killed.returncode == -signal.SIGKILL
    left = list(directory.chunks.glob("*.writing"))
    assert len(left) == 1 and chunk_files(directory) == []
    with directory.locked():
        fd_count = len(os.listdir("/proc/self/fd"))
    store = make_store(budget_bytes=5 * FILE)
    assert not store.has(keys_of(0)) and store.get(keys_of(0), memory) is None
    assert store.status()["leftovers_removed"] == 1
    assert store.status()["used_bytes"] == bytes_on_disk(directory) == 0
    assert store.put(keys_of(0), memory, PAYLOAD) and store.get(keys_of(0), memory) == PAYLOAD
    assert len(os.listdir("/proc/self/fd")) <= fd_count


def test_kills_at_random_moments_keep_budget_and_bytes(
    directory: RootDirectory, make_store: Make, memory: HostMemory
) -> None:
    budget = 6 * FILE
    seed = int(os.environ.get("SEED", time.time_ns()))
    chance = random.Random(seed)
    for cycle in range(6):
        writer = start(directory.root, budget, 100 * cycle, 1000)
        assert writer.stdout is not None
        for _ in range(chance.randrange(2, 30)):
            writer.stdout.readline()
        time.sleep(chance.random() * 0.01)
        writer.kill()
        writer.communicate()
        assert bytes_on_disk(directory) <= budget, f"SEED={seed}"
    store = make_store(budget_bytes=budget)
    assert store.status()["used_bytes"] == bytes_on_disk(directory) <= budget, f"SEED={seed}"
    there = 0
    for number in range(600):
        wanted = fill(memory, number)
        if store.get(keys_of(number), memory) is not None:
            there += 1
            assert memory.view == wanted, f"SEED={seed}"
    assert there == len(chunk_files(directory)) >= 1, f"SEED={seed}"
    assert store.status()["damaged"] == 0, f"SEED={seed}"


@pytest.mark.parametrize(
    "fault", [{"FULL_AFTER": str(3 * FILE)}, {"FULL_WRITES": "1"}], ids=["taking", "writing"]
)
def test_a_full_disk_costs_chunks_and_nothing_else(
    directory: RootDirectory, compiled: Callable[..., Path], fault: dict[str, str]
) -> None:
    shim = str(compiled("preload.c"))
    lines, status = ending(start(directory.root, 50 * FILE, 0, 6, LD_PRELOAD=shim, **fault))
    stored = sum(line.endswith("True") for line in lines[1:])
    assert stored == (3 if "FULL_AFTER" in fault else 0)
    assert status["refused_space"] == 6 - stored and status["write_errors"] == 0
    assert status["used_bytes"] == bytes_on_disk(directory) == stored * FILE
    assert list(directory.chunks.glob("*.writing")) == []


def test_a_forked_child_keeps_no_lock(
    directory: RootDirectory, make_store: Make, memory: HostMemory
) -> None:
    """A lock belongs to the open file, which a child shares; closing alone would not free it."""
    with directory.locked():
        pid = os.fork()
        if not pid:
            time.sleep(30)
            os._exit(0)
    try:
        impatient = RootDirectory(directory.root, lock_wait_s=0.2)
        assert make_store(directory=impatient).put(keys_of(1), memory, PAYLOAD)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
