"""What users of other systems met, tried on the real engine and file system."""

import ast
import ctypes
import errno
import json
import mmap
import os
import pickle
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tablespace.io.mounts import file_system_of

import tablespace
from tablespace import Store

Opener = Callable[..., Store]
Preload = Callable[[str], str]
ROOT = Path(__file__).resolve().parents[3]

ODD_LENGTHS = """
import logging, random, sys
logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
import tablespace
values = {b"%d" % n: random.Random(n).randbytes(n * 997 % 16385) for n in range(100)}
for _ in range(2):
    with tablespace.open(sys.argv[1], max_bytes="4M", slot_bytes="16K") as store:
        assert store.put_many(values.items()) == [True] * 100
        assert store.get_many(values) == list(values.values())
        print("\\n".join(store.stats().choices))
"""

PIECES = """
import os, random, sys, tablespace
options = dict(max_bytes="4M", slot_bytes="16K", io_engine="posix")
older = {b"%d" % n: b"older" * 3000 for n in range(100)}
values = {b"%d" % n: random.Random(n).randbytes(n * 997 % 16385) for n in range(100)}
with tablespace.open(sys.argv[1], io_mode=os.environ["MODE"], **options) as store:
    os.environ["ODD_IN"] = "/region/"
    store.put_many(older.items())
    store.put_many(values.items())
    for _ in range(3):
        assert store.get_many(values) == list(values.values())
with tablespace.open(sys.argv[1], **options) as store:
    assert store.get_many(values) == list(values.values())
    stats = store.stats()
    assert (stats.corrupt, stats.read_errors, stats.recovery.damaged_lines) == (0, 0, 0)
"""

LOCK = """
import sys, tablespace
options = dict(max_bytes="256K", slot_bytes="4K")
try:
    tablespace.open(sys.argv[1], **options)
except OSError as error:
    print(error)
with tablespace.open(sys.argv[1], break_lock=True, **options) as store:
    store.put(b"k", b"v")
    print(store.get(b"k"), *store.stats().choices)
"""

NO_LOCKED_MEMORY = """
import resource, sys, tablespace
resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
with tablespace.open(sys.argv[1], max_bytes="4M", slot_bytes="64K") as store:
    store.put_many((b"%d" % n, b"%d" % n * 9000) for n in range(40))
    assert store.get_many([b"7", b"39"]) == [b"7" * 9000, b"39" * 9000]
    print(store.stats().io_engine)
"""

FLAGS = """
import fcntl, os, sys, tablespace
with tablespace.open(sys.argv[1], max_bytes="4M", slot_bytes="64K") as store:
    store.put_many((b"%d" % n, b"%d" % n * 9000) for n in range(40))
    assert store.get(b"39") == b"39" * 9000
    for name in os.listdir("/proc/self/fd"):
        if os.path.realpath("/proc/self/fd/" + name).endswith(".bin"):
            print(bool(fcntl.fcntl(int(name), fcntl.F_GETFL) & os.O_DIRECT))
"""

DIE = """
import os, signal, sys, tablespace
store = tablespace.open(sys.argv[1], max_bytes="256K", slot_bytes="4K")
for number in range(30):
    store.put(b"old %d" % number, b"%d;" % number * 500)
store.put_many((b"old %d" % number, b"new") for number in range(10))
store.delete_many(b"old %d" % number for number in range(20, 25))
os.kill(os.getpid(), signal.SIGKILL)
"""


THREADS = """
import os, signal, sys, threading, tablespace
store = tablespace.open(sys.argv[1], max_bytes="4M", slot_bytes="4K")

def put(worker):
    for number in range(60):
        store.put(b"%d-%d" % (worker, number), b"%d" % (worker * 1000 + number))

threads = [threading.Thread(target=put, args=(worker,)) for worker in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
os.kill(os.getpid(), signal.SIGKILL)
"""


def run(
    script: str, path: Path, **environment: str
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return done, done.stdout.splitlines()


def resident_pages(path: Path) -> int:
    """Return how many pages of a file are in the page cache: see mincore(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        pages = (ctypes.c_ubyte * (len(mapped) // mmap.PAGESIZE))()
        start = ctypes.c_char.from_buffer(mapped)
        address = ctypes.c_void_p(ctypes.addressof(start))
        assert libc.mincore(address, ctypes.c_size_t(len(mapped)), pages) == 0
        del start
        mapped.close()
    return sum(page & 1 for page in pages)


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM])
def test_where_fallocate_is_refused_the_region_is_made_and_said_so_once_each_time(
    tmp_path: Path, preload: Preload, code: int
) -> None:
    """On Lustre and others pre-allocation failed; the fallback then wrote zeros from a buffer
    that O_DIRECT refused."""
    done, lines = run(
        ODD_LENGTHS,
        tmp_path / "region",
        LD_PRELOAD=preload("refuse_calls"),
        REFUSE_FALLOCATE=str(code),
    )
    assert done.returncode == 0, done.stderr
    assert [line for line in lines if "not pre-allocated" in line] != []
    assert done.stderr.count(f"no fallocate ({errno.errorcode[code]})") == 1


def test_an_interrupted_fallocate_is_tried_again(tmp_path: Path, preload: Preload) -> None:
    """Where a timer's signals come often, tmpfs of older kernels interrupts allocations."""
    done, lines = run(
        ODD_LENGTHS,
        tmp_path / "region",
        LD_PRELOAD=preload("refuse_calls"),
        REFUSE_FALLOCATE=str(errno.EINTR),
        REFUSE_TIMES="6",
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "" and not [line for line in lines if "not pre-allocated" in line]


@pytest.mark.parametrize("code", [errno.EDQUOT, errno.ENOSPC])
def test_a_quota_that_the_file_system_does_not_tell_of_is_named_and_nothing_left(
    tmp_path: Path, preload: Preload, code: int
) -> None:
    """The free space of the disk was looked at, not the quota of the volume."""
    done, _ = run(
        ODD_LENGTHS,
        tmp_path / "region",
        LD_PRELOAD=preload("refuse_calls"),
        REFUSE_FALLOCATE=str(code),
    )
    assert done.returncode == 1
    said = done.stderr.splitlines()[-1]
    assert os.strerror(code) in said and "4 containers of 1M" in said
    assert "Remedy: a smaller max_bytes, or a larger quota" in said
    assert list((tmp_path / "region" / "containers").iterdir()) == []


@pytest.mark.parametrize("mode", ["buffered", "direct"])
def test_transfers_of_the_kernel_in_pieces_give_whole_values(
    tmp_path: Path, preload: Preload, request: pytest.FixtureRequest, mode: str
) -> None:
    """A short read was accepted, and the tail of what lay there before was served."""
    if mode == "direct":
        request.getfixturevalue("need_direct")
    done, _ = run(PIECES, tmp_path / "region", LD_PRELOAD=preload("odd_transfers"), MODE=mode)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EBADF])
def test_where_flock_is_refused_the_way_on_is_named(
    tmp_path: Path, preload: Preload, code: int
) -> None:
    """On NFS the lock call failed with a bare "bad file descriptor", with no way to go on."""
    done, lines = run(
        LOCK,
        tmp_path / "region",
        LD_PRELOAD=preload("refuse_calls"),
        REFUSE_FLOCK=str(code),
    )
    assert done.returncode == 0, done.stderr
    assert errno.errorcode[code] in lines[0] and "break_lock=True" in lines[0]
    assert lines[1].startswith("b'v'") and "writer lock not taken" in lines[1]


def test_direct_io_leaves_the_page_cache_alone_whatever_the_callers_buffer(
    open_small: Opener, tmp_path: Path
) -> None:
    """Only lengths were tested for alignment, so each call at an odd address fell back to the
    page cache without a word, and filled it."""
    if file_system_of(str(tmp_path)) in ("tmpfs", "ramfs", "overlay"):
        pytest.skip("files on this file system are in the page cache anyway")
    memory = memoryview(bytearray(random.Random(1).randbytes(50_000)))
    pages = {}
    for mode in ("direct", "buffered"):
        store = open_small(tmp_path / mode, max_bytes="4M", slot_bytes="16K", io_mode=mode)
        for number in range(100):
            value = memory[number : number + 1 + number * 163]
            store.put(b"%d" % number, value)
            assert store.get(b"%d" % number) == value
        assert store.stats().io_mode == mode
        pages[mode] = sum(map(resident_pages, (tmp_path / mode / "containers").iterdir()))
    assert pages["direct"] == 0
    assert pages["buffered"] > 100


def test_a_refusal_of_direct_io_is_not_met_again_at_every_call(
    tmp_path: Path, preload: Preload
) -> None:
    """Each direct read of a peer first paid for a failing call before the buffered one."""
    shim = preload("refuse_direct")
    done, lines = run(FLAGS, tmp_path / "region", LD_PRELOAD=shim)
    assert done.returncode == 0, done.stderr
    assert lines == ["False"] * 4


def test_no_locked_memory_is_needed(tmp_path: Path) -> None:
    """A second ring of the same user failed with ENOMEM: locked memory is counted by user."""
    done, lines = run(NO_LOCKED_MEMORY, tmp_path / "region")
    assert done.returncode == 0, done.stderr
    assert lines[0] in ("uring", "posix")


@pytest.mark.usefixtures("need_uring")
def test_nothing_is_registered_with_a_ring(tmp_path: Path, support: Path) -> None:
    """Registering more than a few buffers failed under the limit on locked memory, and reads into
    registered ones failed besides."""
    script = f"import sys\nsys.path.insert(0, {str(support)!r})\n"
    script += "import deny_call\ndeny_call.deny('io_uring_register', 1)\n"
    done, lines = run(script + NO_LOCKED_MEMORY, tmp_path / "region")
    assert done.returncode == 0, done.stderr
    assert lines[0] == "uring"


def test_after_a_kill_filling_the_region_changes_nothing_that_was_there(
    open_small: Opener, tmp_path: Path
) -> None:
    """An allocator started empty after a restart and handed out slots that were in use."""
    done, _ = run(DIE, tmp_path / "region")
    assert done.returncode == -signal.SIGKILL, done.stderr
    expected = {
        b"old %d" % number: b"new" if number < 10 else b"%d;" % number * 500
        for number in range(30)
        if not 20 <= number < 25
    }
    for _ in range(2):
        store = open_small()
        stats = store.stats()
        assert (stats.live, stats.free + stats.live) == (len(store), stats.capacity)
        more = [(b"more %d" % number, b"x" * 4096) for number in range(64)]
        store.put_many(more)
        assert store.stats().free == 0
        assert store.get_many(expected) == list(expected.values())
        assert store.delete_many(key for key, _ in more) == 64 - len(expected)
        store.close()


def test_a_region_driven_to_full_again_and_again_keeps_what_it_held(open_small: Opener) -> None:
    """The error path of a full map wrote bad metadata and left the database unusable."""
    rng = random.Random(9)
    held: dict[bytes, bytes] = {}
    for turn in range(12):
        store = open_small()
        assert store.get_many(held) == list(held.values())
        items = [
            (b"%d-%d" % (turn, number), rng.randbytes(rng.randrange(4097)))
            for number in range(100)
        ]
        stored = store.put_many(items)
        assert False in stored
        with pytest.raises(tablespace.FullError):
            store.put(b"one more", b"")
        held |= {key: value for (key, value), kept in zip(items, stored, strict=True) if kept}
        assert store.get_many(held) == list(held.values())
        stats = store.stats()
        assert (stats.free, stats.live) == (0, len(held))
        for key in rng.sample(sorted(held), 30):
            assert store.delete(key)
            del held[key]
        store.close()


def test_reads_write_nothing(open_small: Opener, tmp_path: Path) -> None:
    """Reads appended records of their own, so that a journal grew without any change."""

    def files() -> dict[Path, tuple[int, int]]:
        paths = [path for path in (tmp_path / "region").rglob("*") if path.is_file()]
        return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in paths}

    store = open_small()
    keys = [b"%d" % number for number in range(40)]
    store.put_many((key, key * 100) for key in keys)
    before = files()
    buffer = bytearray(4096)
    for _ in range(20):
        assert store.get_many(keys)[0] is not None
        assert store.get_into(keys[1], buffer) == 100
        store.touch_many(keys)
        assert store.match_prefix(keys) == 40
        assert store.get(b"absent") is None
    assert files() == before
    journal = (tmp_path / "region" / "index.log").read_bytes()
    assert store.stats().journal_bytes == len(journal.rstrip(b"\n")) + 1


def test_values_are_bytes_and_nothing_here_can_run_them(open_small: Opener) -> None:
    """Caches that unpickle what they read back run whatever was written there."""

    class Bomb:
        def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
            return os.system, ("exit 1",)

    crafted = pickle.dumps(Bomb())
    store = open_small()
    store.put(b"k", crafted, metadata=crafted[:200])
    store.close()
    again = open_small()
    entry = again.stat(b"k")
    assert again.get(b"k") == crafted
    assert entry is not None and entry.metadata == crafted[:200]
    for tree in ("kvd", "connectors", "tablespace/src/tablespace"):
        for path in (ROOT / tree).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = set()
                if isinstance(node, ast.Import):
                    names = {alias.name for alias in node.names}
                elif isinstance(node, ast.ImportFrom):
                    names = {node.module or ""}
                assert not {"pickle", "marshal", "shelve"} & names, path
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                    assert node.func.id not in ("eval", "exec"), path


def test_records_of_many_threads_are_all_whole_in_the_journal(
    open_small: Opener, tmp_path: Path
) -> None:
    """Two writers that relied on the file's position overwrote each other's records."""
    done, _ = run(THREADS, tmp_path / "region")
    assert done.returncode == -signal.SIGKILL, done.stderr
    lines = (tmp_path / "region" / "index.log").read_bytes().strip().splitlines()
    records = [json.loads(line) for line in lines if line]
    numbers = [record["seq"] for record in records if "seq" in record]
    assert numbers == list(range(1, len(numbers) + 1))
    assert sum(record.get("op") == "put" for record in records) == 480
    store = open_small(max_bytes="4M")
    for worker in range(8):
        keys = [b"%d-%d" % (worker, number) for number in range(60)]
        assert store.get_many(keys) == [b"%d" % (worker * 1000 + number) for number in range(60)]


def test_a_program_started_from_here_inherits_nothing_of_a_region(open_small: Opener) -> None:
    """A handle shared with a child was invalid, or its locks were gone, once the child ended."""
    store = open_small()
    store.put(b"k", b"v" * 4096)
    assert store.get(b"k") == b"v" * 4096
    script = "import os\nfor n in os.listdir('/proc/self/fd'):\n    try:\n"
    script += (
        "        print(os.readlink('/proc/self/fd/' + n))\n    except OSError:\n        pass\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], close_fds=False, capture_output=True, text=True, check=True
    )
    inherited = done.stdout.splitlines()
    assert inherited != []
    for link in inherited:
        assert "io_uring" not in link
        assert not link.endswith((".bin", "index.log", "region.json", "region"))
