"""Forks, interpreters that end or are not the first, and a package with a part missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import tablespace
from tablespace import Store

Opener = Callable[..., Store]

START = """
import os, signal, sys, threading, time, tablespace
path = sys.argv[1]
small = dict(max_bytes="256K", slot_bytes="4K")
"""

FORKS_UNDER_LOAD = """
store = tablespace.open(path, on_full="evict", **small)
stop, held = threading.Event(), [{} for _ in range(4)]

def work(worker):
    number = 0
    while not stop.is_set():
        key, value = b"%d-%d" % (worker, number % 8), b"%d;" % number * 700
        store.put(key, value)
        held[worker][key] = value
        assert store.get(key) == value
        number += 1

threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
for thread in threads:
    thread.start()
endings = []
for turn in range(20):
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        os.close(2)
        try:
            store.get(b"k")
        except tablespace.ClosedError:
            pass
        store.close()
        len(store), repr(store)
        if turn % 5 == 0:
            os._exit(0)
        if turn % 5 == 1:
            sys.exit(0)
        if turn % 5 == 2:
            raise ValueError("in the child")
        if turn % 5 == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        del store, threads
        import gc
        gc.collect()
        sys.exit(0)
    endings.append(os.waitpid(pid, 0)[1])
stop.set()
for thread in threads:
    thread.join()
expected = {key: value for each in held for key, value in each.items()}
assert store.get_many(expected) == list(expected.values())
assert store.stats().failed is None and store.stats().corrupt == 0
os.kill(os.getpid(), signal.SIGKILL) if len(sys.argv) > 2 else store.close()
"""

FORKED_WHILE_CLOSING = """
store = tablespace.open(path, **small)
store.put(b"k", b"v")
store._closing.acquire()
pid = os.fork()
if pid == 0:
    signal.alarm(20)
    store.close()
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
store._closing.release()
store.put(b"k2", b"v2")
store.close()
"""

USED_AT_THE_END = """
import atexit
store = tablespace.open(path, **small)
store.put(b"k", b"v")

class Last:
    def __init__(self, store):
        self.store = store
    def __del__(self):
        self.store.put(b"finaliser", b"v")
        print(self.store.get(b"finaliser"), flush=True)

last = Last(store)
last.itself = last
atexit.register(lambda: store.put(b"atexit", b"v"))
"""

ENDED_AT_WORK = """
import atexit
store = tablespace.open(path, **small)
store.put(b"k", b"v")
atexit.register(lambda: store.put(b"atexit", b"v"))
for number in range(4):
    def work(number=number):
        while True:
            store.get_many([b"k", b"atexit"])
            store.put(b"daemon %d" % number, b"v" * 4000)
    threading.Thread(target=work, daemon=True).start()
time.sleep(0.2)
"""

SECOND_INTERPRETER = """
import _xxsubinterpreters as interpreters
store = tablespace.open(path, **small)
store.put(b"k", b"v")
other = interpreters.create()
try:
    interpreters.run_string(other, "import tablespace")
except interpreters.RunFailedError as error:
    print(error)
interpreters.destroy(other)
store.put(b"k2", b"v2")
print(store.get_many([b"k", b"k2"]))
store.close()
"""


def run(script: str, path: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", START + script, str(path), *more],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.parametrize("kill", [False, True])
def test_twenty_children_that_end_in_every_way_change_nothing(
    open_small: Opener, tmp_path: Path, kill: bool
) -> None:
    """Forked children that did nothing corrupted the database when they ended: destructors closed
    or flushed what was the parent's."""
    done = run(FORKS_UNDER_LOAD, tmp_path / "region", *(["kill"] if kill else []))
    assert done.returncode == (-9 if kill else 0), done.stderr
    again = open_small(on_full="evict")
    assert len(again) == 32 and again.stats().recovery.damaged_lines == 0
    for key in again:
        value = again.get(key)
        assert value is not None and len(set(value.split(b";")[:-1])) == 1
    for worker in range(4):
        assert again.contains_many([b"%d-%d" % (worker, n) for n in range(8)]) == [True] * 8


def test_a_child_forked_while_another_thread_closes_does_not_hang(tmp_path: Path) -> None:
    """The lock that another thread held at the fork is held for ever in the child."""
    done = run(FORKED_WHILE_CLOSING, tmp_path / "region")
    assert (done.returncode, done.stdout.strip()) == (0, "7"), done.stderr


def test_a_store_may_be_used_until_the_interpreters_end(
    open_small: Opener, tmp_path: Path
) -> None:
    done = run(USED_AT_THE_END, tmp_path / "region")
    assert (done.returncode, done.stdout.strip()) == (0, "b'v'"), done.stderr
    assert "Traceback" not in done.stderr
    again = open_small()
    assert again.get_many([b"k", b"atexit", b"finaliser"]) == [b"v"] * 3


def test_a_process_that_ends_with_threads_at_work_ends(open_small: Opener, tmp_path: Path) -> None:
    done = run(ENDED_AT_WORK, tmp_path / "region")
    assert done.returncode == 0, done.stderr
    again = open_small()
    assert again.get_many([b"k", b"atexit"]) == [b"v"] * 2
    assert all(again.get(key) == b"v" * 4000 for key in again if key.startswith(b"daemon"))


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="the module has another name there")
def test_a_second_interpreter_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    done = run(SECOND_INTERPRETER, tmp_path / "region")
    assert done.returncode == 0, done.stderr
    refused, found = done.stdout.splitlines()
    assert "ImportError" in refused and "interpreter" in refused.lower()
    assert found == "[b'v', b'v2']"


def test_a_missing_compiled_part_is_said_with_the_way_out(tmp_path: Path) -> None:
    """A build that did not fit fell back to a slow path without a word."""
    package = tmp_path / "tablespace"
    source = Path(tablespace.__file__).parent
    shutil.copytree(source, package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    done = subprocess.run(
        [sys.executable, "-c", "import tablespace"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: ") and "compiled" in last and "Remedy" in last
    assert "pip install" in last


def test_recency_after_a_kill_is_the_order_of_storing(open_small: Opener, tmp_path: Path) -> None:
    """After a restart files' times stood in for recency, so that the wrong entries went first."""
    script = """
store = tablespace.open(path, on_full="evict", **small)
store.put_many((b"%d" % number, b"v") for number in range(50))
store.touch_many([b"%d" % number for number in range(10)])
store.put(b"5", b"again")
if len(sys.argv) > 2:
    os.kill(os.getpid(), signal.SIGKILL)
store.close()
"""
    for more in ([], ["kill"]):
        path = tmp_path / f"region{len(more)}"
        run(script, path, *more)
        order = [int(key) for key in open_small(path, on_full="evict")]
        stored = [number for number in range(50) if number != 5]
        if more:
            assert order == [*stored, 5]
        else:
            assert order == [*range(10, 50), 0, 1, 2, 3, 4, 6, 7, 8, 9, 5]
