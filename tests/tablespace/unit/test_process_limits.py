"""Descriptors, file size, memory, sandboxes: what a process may not have, said by name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

START = """
import gc, os, resource, sys, threading, tablespace
path = sys.argv[1]
small = dict(max_bytes="256K", slot_bytes="4K")
def descriptors():
    return len(os.listdir("/proc/self/fd"))
"""

MANY_CONTAINERS = """
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
before = descriptors()
many = dict(container_bytes="16K", slot_bytes="4K")
try:
    tablespace.open(path, max_bytes="8M", **many)
except OSError as error:
    print(error)
gc.collect()
print(descriptors() - before, os.listdir(path + "/containers"))
for containers in (100, 200):
    with tablespace.open(path, max_bytes=containers << 14, **many) as store:
        store.put_many((b"%d" % n, b"v") for n in range(400))
        assert all(store.get_many([b"%d" % n for n in range(400)]))
        print(descriptors() - before - containers)
resource.setrlimit(resource.RLIMIT_NOFILE, (150, 256))
try:
    tablespace.open(path)
except OSError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
print(len(tablespace.open(path)))
"""

NO_DESCRIPTOR_LEFT = """
store = tablespace.open(path, **small)
store.put(b"k", b"v")
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = []
try:
    while True:
        held.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
print(store.get(b"k"))
store.put(b"k2", b"v2")
try:
    store.snapshot()
except OSError as error:
    print(error)
threads = [threading.Thread(target=store.get_many, args=([b"k", b"k2"],)) for _ in range(20)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(store.stats().failed, [text for text in store.stats().choices if "threads" in text])
store.close()
for each in held:
    os.close(each)
print(tablespace.open(path).get_many([b"k", b"k2"]))
"""

SANDBOXED_LATER = """
sys.path.insert(0, sys.argv[2])
from deny_call import deny
store = tablespace.open(path, **small)
print(store.stats().io_engine)
store.put(b"k", b"v")
deny("io_uring_setup", 1)
print(store.get(b"k"), store.get_many([b"k"]))
store.put(b"k2", b"v2")
print([text for text in store.stats().choices if "threads" in text])
store.close()
"""

FILE_SIZE = """
resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, resource.RLIM_INFINITY))
try:
    tablespace.open(path, **small)
except OSError as error:
    print(error, os.listdir(path + "/containers"))
resource.setrlimit(resource.RLIMIT_FSIZE, (70_000, resource.RLIM_INFINITY))
store = tablespace.open(path, **small)
errors = set()
for number in range(600):
    try:
        store.put(b"%d" % (number % 50), b"%d" % number * 300)
    except (OSError, tablespace.FullError) as error:
        errors.add(type(error).__name__)
print(errors, store.stats().failed)
held = {key: store.get(key) for key in store}
store.close()
store = tablespace.open(path, **small)
assert {key: store.get(key) for key in store} == held and len(held) > 30
stats = store.stats()
assert stats.free + stats.live == stats.capacity
"""

LITTLE_MEMORY = """
store = tablespace.open(path, max_bytes="16M", slot_bytes="4K")
old = {b"old%d" % n: b"v" * 300 for n in range(200)}
store.put_many(old.items())
met = dict.fromkeys(["MemoryError", "OSError", "FailedError", "other"], 0)
def attempt(call, *arguments):
    try:
        call(*arguments)
        return True
    except MemoryError:
        met["MemoryError"] += 1
    except OSError:
        met["OSError"] += 1
    except tablespace.FailedError:
        met["FailedError"] += 1
    except Exception:
        met["other"] += 1
    return False
value, stored, at = b"w" * 3000, [], 0
names, group = [b"n%d" % n for n in range(1000)], [(b"g%d" % n, value) for n in range(100)]
for extra in (0, 1 << 16, 1 << 18, 1 << 20, 4 << 20, 12 << 20):
    used = int(open("/proc/self/statm").read().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (used + extra, resource.RLIM_INFINITY))
    for _ in range(60):
        if attempt(store.put, names[at], value):
            stored.append(names[at])
        at += 1
        attempt(store.get, b"old1")
        attempt(store.get_many, names[:100])
        attempt(store.put_many, group)
    attempt(store.snapshot)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert met["MemoryError"] and not met["other"], met
for turn in range(2):
    stats = store.stats()
    assert (stats.failed, stats.reserved, stats.limbo, stats.corrupt) == (None, 0, 0, 0)
    assert stats.free + stats.live == stats.capacity
    assert store.get_many(old) == list(old.values())
    assert store.get_many(stored) == [value] * len(stored)
    store.close()
    store = tablespace.open(path)
print(len(stored) > 50)
"""


def run(script: str, path: Path, *more: str, before: tuple[str, ...] = ()) -> list[str]:
    done = subprocess.run(
        [*before, sys.executable, "-c", START + script, str(path), *more],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_more_containers_than_descriptors_are_refused_by_the_limits_name(tmp_path: Path) -> None:
    """One descriptor a cached file met the system's limit with a bare "too many open files"; the
    files made until then stayed."""
    made, left, first, second, opened, entries = run(MANY_CONTAINERS, tmp_path / "region")
    for line in (made, opened):
        assert "RLIMIT_NOFILE" in line and "Remedy" in line and "container_bytes" in line
    assert "256" in made and "150" in opened
    assert left == "0 []"
    # Descriptors are the containers' and a constant.
    assert first == second and int(first) <= 20
    assert entries == "400"


def test_a_store_without_a_descriptor_left_goes_on(tmp_path: Path) -> None:
    """The first read of a thread makes a ring of its own: without a descriptor for it, a value
    that was there could not be read."""
    said = run(NO_DESCRIPTOR_LEFT, tmp_path / "region")
    assert said[0] == "b'v'"
    assert "RLIMIT_NOFILE" in said[1]
    assert said[2].startswith("None")
    assert said[3] == "[b'v', b'v2']"


@pytest.mark.usefixtures("need_uring")
def test_a_sandbox_that_forbids_rings_after_the_opening_costs_no_read(
    tmp_path: Path, support: Path
) -> None:
    """io_uring was there when the region was opened, and refused to the first reader later."""
    said = run(SANDBOXED_LATER, tmp_path / "region", str(support))
    assert said[0] == "uring"
    assert said[1] == "b'v' [b'v']"
    assert "further io_uring was refused" in said[2] and "Operation not permitted" in said[2]


@pytest.mark.usefixtures("need_uring")
@pytest.mark.parametrize("nth", [1, 2, 3, 4])
def test_rings_refused_from_the_nth_on_leave_a_store_that_works(tmp_path: Path, nth: int) -> None:
    """Locked memory is counted by user: a first ring was made, the second one refused."""
    if shutil.which("strace") is None:
        pytest.skip("no strace(1) to refuse a system call with")
    inject = ("strace", "-f", "-o", str(tmp_path / "trace"), "-e", "trace=io_uring_setup")
    inject += ("-e", f"inject=io_uring_setup:error=ENOMEM:when={nth}+")
    if subprocess.run([*inject, "true"], capture_output=True, check=False).returncode:
        pytest.skip("tracing is not allowed here")
    script = """
store = tablespace.open(path, **small)
store.put(b"k", b"v")
print(store.get(b"k"), store.stats().io_engine, *store.stats().choices)
"""
    (said,) = run(script, tmp_path / "region", before=inject)
    # The first two are the trial at the opening, which wants them both; the third is the writer's.
    assert said.startswith("b'v' posix" if nth <= 3 else "b'v' uring")
    assert "Cannot allocate memory" in said


def test_a_limit_on_file_sizes_is_an_error_and_no_signal(tmp_path: Path) -> None:
    """Past RLIMIT_FSIZE the kernel sends SIGXFSZ, whose default ends the process."""
    said = run(FILE_SIZE, tmp_path / "region")
    assert "File too large" in said[0] and said[0].endswith("[]")
    assert said[1].endswith("None")


def test_a_process_short_of_memory_loses_and_leaks_nothing(tmp_path: Path) -> None:
    assert run(LITTLE_MEMORY, tmp_path / "region") == ["True"]


def test_nothing_is_written_outside_the_region(tmp_path: Path) -> None:
    """A cache directory that was asked for was ignored, and /tmp used instead."""
    script = """
import tempfile
store = tablespace.open(path, **small)
for number in range(200):
    store.put(b"%d" % (number % 40), b"v" * 4000)
store.snapshot()
store.get(b"3")
names = {os.readlink("/proc/self/fd/" + name) for name in os.listdir("/proc/self/fd")
         if os.path.exists("/proc/self/fd/" + name)}
print(*sorted(name for name in names if name.startswith("/") and not name.startswith("/dev")))
store.close()
print(os.listdir("."), tempfile.gettempdir())
"""
    home = tmp_path / "home"
    home.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", START + script, str(tmp_path / "region")],
        env={**os.environ, "TMPDIR": str(home), "HOME": str(home), "PYTHONPYCACHEPREFIX": "/dev"},
        cwd=home,
        capture_output=True,
        text=True,
        check=True,
    )
    opened, left = done.stdout.splitlines()
    assert opened and all(name.startswith(str(tmp_path / "region")) for name in opened.split())
    assert left == f"[] {home}"


def test_opening_closing_and_failing_over_and_over_leaves_nothing(tmp_path: Path) -> None:
    """Failed and short-lived uses each kept a buffer, a pin or a descriptor."""
    script = """
def use(turns):
    for turn in range(turns):
        with tablespace.open(path, **small) as store:
            store.put_many((b"%d" % n, b"v" * 2000) for n in range(20))
            for call in (
                lambda: store.get_into(b"5", bytearray(10)),
                lambda: store.get_many_into([b"5", b"6"], [bytearray(4096), b"read-only"]),
                lambda: store.put(b"x", bytes(5000)),
                lambda: store.put_many([(b"a", b"b"), (b"c", 5)]),
                lambda: store.delete_many([b"a", 5]),
                lambda: store.match_prefix([b"5", "text"]),
            ):
                for _ in range(20):
                    try:
                        call()
                    except (TypeError, ValueError, BufferError):
                        pass
            stats = store.stats()
            assert (stats.limbo, stats.reserved) == (0, 0)
            assert stats.free + stats.live == stats.capacity
    del store, call
    gc.collect()
    return descriptors(), threading.active_count(), len(gc.get_objects())

use(5)
first = use(5)
print(first[:2] == use(25)[:2], use(5)[2] - first[2] < 50)
"""
    assert run(script, tmp_path / "region") == ["True True"]
