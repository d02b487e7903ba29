"""A region followed on the real file system: the surface, and that nothing is ever written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tablespace.follower import open_follower
from tablespace.io.directory import PosixDirectory
from tablespace.io.read_only import ReadOnlyDirectory

import tablespace
from tablespace import Follower, ReadOnlyError, Store

Opener = Callable[..., Store]
Preload = Callable[[str], str]
NOBODY = 65534

READS = {
    "contains_many",
    "entries",
    "get",
    "get_entries_into",
    "get_into",
    "get_many",
    "get_many_into",
    "match_prefix",
    "prepare_reads",
    "stat",
    "stat_many",
    "stats",
    "touch_many",
    "uuid",
}
CHANGES: dict[str, Callable[[Store], Any]] = {
    "put": lambda store: store.put(b"k", b"v"),
    "put_many": lambda store: store.put_many([(b"k", b"v")]),
    "delete": lambda store: store.delete(b"k"),
    "delete_many": lambda store: store.delete_many([b"k"]),
    "evict_many": lambda store: store.evict_many([b"k"]),
    "clear": lambda store: store.clear(),
    "scrub": lambda store: store.scrub(),
    "flush": lambda store: store.flush(),
    "snapshot": lambda store: store.snapshot(),
    "announce": lambda store: store.announce(),
    "start_prewriting": lambda store: store.start_prewriting(None),
    "__setitem__": lambda store: store.__setitem__(b"k", b"v"),
    "__delitem__": lambda store: store.__delitem__(b"k"),
}
ENDS = {"close", "after_fork_in_child"}


@pytest.fixture
def region(tmp_path: Path) -> Path:
    return tmp_path / "region"


@pytest.fixture
def follow(region: Path) -> Iterator[Callable[..., Follower]]:
    """Follow the region; it looks at each call unless told otherwise."""
    opened: list[Follower] = []

    def opener(**options: Any) -> Follower:
        store = tablespace.open(region, read_only=True, **{"refresh_interval_ms": 0, **options})
        assert isinstance(store, Follower)
        opened.append(store)
        return store

    yield opener
    for store in opened:
        store.close()


def state_of(region: Path) -> dict[str, tuple[int, int, bytes]]:
    """Return times and content of every file and directory."""
    return {
        str(path.relative_to(region)): (
            path.stat().st_mtime_ns,
            path.stat().st_ctime_ns,
            path.read_bytes() if path.is_file() else b"",
        )
        for path in [region, *region.rglob("*")]
    }


def test_a_follower_answers_as_the_writer_does(open_small: Opener, follow: Any) -> None:
    store = open_small()
    values = {b"%d" % number: bytes([number]) * (number * 300) for number in range(14)}
    store.put_many(values.items())
    store.put(b"tagged", b"x", metadata=b"tag")
    follower = follow()
    assert follower.get_many(values) == list(values.values())
    buffers = [bytearray(4096) for _ in values]
    lengths = follower.get_many_into(values, buffers)
    assert [bytes(b[:n]) for b, n in zip(buffers, lengths, strict=True)] == list(values.values())
    assert follower.get_entries_into(values, buffers) == store.stat_many(values)
    assert follower.get_into(b"3", buffers[0]) == 900 and follower[b"3"] == values[b"3"]
    assert b"3" in follower and b"absent" not in follower and len(follower) == 15
    assert follower.contains_many([b"1", b"absent"]) == [True, False]
    assert follower.match_prefix([b"1", b"2", b"absent", b"3"]) == 2
    assert sorted(follower) == sorted(store) and follower.stat(b"tagged") == store.stat(b"tagged")
    assert sorted(follower.entries()["key"]) == sorted(store)
    with pytest.raises(KeyError):
        follower[b"absent"]
    with pytest.raises(ValueError, match=r"5.*900"):
        follower.get_into(b"3", bytearray(5))


def test_what_the_writer_does_is_seen(open_small: Opener, follow: Any) -> None:
    store, follower = open_small(), None
    store.put(b"a", b"1")
    follower = follow()
    store.put(b"a", b"2")
    store.put(b"b", b"3")
    assert follower.get_many([b"a", b"b"]) == [b"2", b"3"]
    store.delete(b"a")
    store.snapshot()
    store.put(b"c", b"4")
    assert follower.get_many([b"a", b"b", b"c"]) == [None, b"3", b"4"]
    store.close()
    assert open_small().put_many([(b"d", b"5")]) == [True]
    assert follower.get_many([b"c", b"d"]) == [b"4", b"5"]
    # None of these needs the whole index again.
    assert follower.stats().reloads == 0


def test_every_call_of_a_store_is_a_read_or_is_refused(open_small: Opener, follow: Any) -> None:
    public = {name for name in vars(Store) if not name.startswith("_")}
    assert public <= READS | set(CHANGES) | ENDS
    store = open_small()
    store.put(b"k", b"v")
    follower = follow()
    for name, change in CHANGES.items():
        with pytest.raises(ReadOnlyError, match=r"read_only=True.*Remedy"):
            change(follower)
        assert name in vars(Follower) or name.startswith("__")
    assert follower[b"k"] == b"v"
    follower.close()
    with pytest.raises(tablespace.ClosedError):
        follower.put(b"k", b"v")
    with pytest.raises(tablespace.ClosedError):
        follower.get(b"k")
    with pytest.raises(tablespace.ClosedError):
        follower.refresh()
    assert "closed" in repr(follower)


@pytest.mark.parametrize(
    "options", [{"verify": False}, {"recover": "salvage"}, {"break_lock": True}]
)
def test_what_contradicts_following_is_refused(
    open_small: Opener, follow: Any, options: dict[str, Any]
) -> None:
    open_small()
    with pytest.raises(ValueError, match=f"{next(iter(options))}.*Remedy"):
        follow(**options)
    with pytest.raises(ValueError, match="refresh_interval_ms"):
        follow(refresh_interval_ms=-1)


def test_no_region_is_an_error_and_nothing_is_made(region: Path, follow: Any) -> None:
    with pytest.raises(FileNotFoundError):
        follow()
    assert not region.exists()
    region.mkdir()
    with pytest.raises(FileNotFoundError):
        follow()
    (region / "region.json").write_bytes(bytes(8192))
    with pytest.raises(FileNotFoundError, match="or is under way"):
        follow()
    assert [path.name for path in region.iterdir()] == ["region.json"]


def test_two_writers_are_refused_and_a_reader_opens_and_never_writes(
    open_small: Opener, region: Path, follow: Any
) -> None:
    """Two processes wrote and resized one environment at the same time and corrupted it within
    seconds. A second writer is refused; who only looks may open, and changes nothing."""
    store = open_small()
    store.put(b"k", b"v" * 3000)
    for name in ("index.log.new", "index.snapshot.json.tmp", "containers/trial.tmp"):
        (region / name).write_bytes(b"left by an interrupted writer")
    with pytest.raises(tablespace.BusyError):
        open_small()
    before = state_of(region)
    follower = follow()
    assert follower[b"k"] == b"v" * 3000 and follower.get(b"absent") is None
    assert follower.refresh() == 0 and follower.stats().lag_records == 0
    follower.close()
    assert state_of(region) == before
    assert store[b"k"] == b"v" * 3000


def test_a_crashed_writers_region_is_read_and_left_as_it_is(
    open_small: Opener, region: Path, follow: Any, tmp_path: Path
) -> None:
    store = open_small()
    store.put(b"k", b"v")
    shutil.copytree(region, tmp_path / "crashed")
    journal = tmp_path / "crashed/index.log"
    journal.write_bytes(journal.read_bytes().rstrip(b"\n") + b'\n{"seq":3,"grp"')
    before = state_of(tmp_path / "crashed")
    with tablespace.open(tmp_path / "crashed", read_only=True) as follower:
        assert follower[b"k"] == b"v"
        found = follower.stats()
        assert isinstance(found, tablespace.FollowerStats)
        assert (found.problem, found.lag_bytes) == ("a line without its end", 14)
    assert state_of(tmp_path / "crashed") == before


def test_a_directory_opened_for_reading_refuses_every_change(
    open_small: Opener, region: Path
) -> None:
    open_small().put(b"k", b"v")
    before = state_of(region)
    directory = ReadOnlyDirectory(PosixDirectory(region))
    device = directory.open("index.log")
    changes: list[Callable[[], Any]] = [
        lambda: directory.open("index.log", create=True),
        lambda: directory.open("index.log", read_only=False),
        lambda: directory.make("other"),
        lambda: directory.rename("index.log", "other"),
        lambda: directory.link("index.log", "other"),
        lambda: directory.unlink("index.log"),
        directory.sync,
        lambda: directory.lock(device),
        lambda: device.write_at(0, b"x"),
        lambda: device.append(b"x"),
        lambda: device.truncate(0),
        lambda: device.allocate(1 << 20),
        device.sync_data,
    ]
    for change in changes:
        with pytest.raises(OSError, match=r"Read-only|Bad file descriptor|reading alone"):
            change()
    device.close()
    assert state_of(region) == before


READ_AS_NOBODY = """
import os, sys, tablespace
path, nobody = sys.argv[1], int(sys.argv[2])
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(nobody); os.setuid(nobody)
try:
    tablespace.open(path, max_bytes="256K", slot_bytes="4K")
except PermissionError:
    print("no writer")
with tablespace.open(path, read_only=True) as store:
    print(store[b"k"], store.refresh())
"""


def test_a_region_of_another_user_that_may_only_be_read_is_followed() -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        region = Path(folder) / "region"
        with tablespace.open(region, max_bytes="256K", slot_bytes="4K") as store:
            store.put(b"k", b"v")
            for path in [region.parent, region, *region.rglob("*")]:
                path.chmod(0o555 if path.is_dir() else 0o444)
            done = subprocess.run(
                [sys.executable, "-c", READ_AS_NOBODY, str(region), str(NOBODY)],
                capture_output=True,
                text=True,
                check=False,
            )
            for path in [region.parent, region, region / "containers"]:
                path.chmod(0o755)
        assert done.stdout.splitlines() == ["no writer", "b'v' 0"], done.stderr


READ_ON_MOUNT = """
mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" || exit 77
exec "$2" -c "$3" "$1"
"""

READ_ONLY_MOUNT = """
import sys, tablespace
try:
    tablespace.open(sys.argv[1], max_bytes="256K", slot_bytes="4K")
except OSError as error:
    print(error.errno)
with tablespace.open(sys.argv[1], read_only=True) as store:
    print(store[b"k"], store.refresh())
"""


def test_a_region_on_a_read_only_mount_is_followed(open_small: Opener, region: Path) -> None:
    store = open_small()
    store.put(b"k", b"v")
    arguments = ["sh", "-c", READ_ON_MOUNT, "sh", str(region), sys.executable, READ_ONLY_MOUNT]
    if shutil.which("unshare") is None:
        pytest.skip("no unshare command to make a read-only mount with")
    done = subprocess.run(
        ["unshare", "-m", *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode in (1, 77):
        pytest.skip(f"no read-only mount can be made here: {done.stderr.strip()}")
    assert done.stdout.splitlines() == ["30", "b'v' 0"], done.stderr


def test_looks_are_as_far_apart_as_asked_for(open_small: Opener, region: Path) -> None:
    store = open_small()
    now = [100.0]
    follower = open_follower(PosixDirectory(region), refresh_interval_ms=50, clock=lambda: now[0])
    store.put(b"k", b"v")
    now[0] += 0.049
    assert follower.get(b"k") is None and b"k" not in follower and len(follower) == 0
    assert follower.stats().refreshed_s == pytest.approx(0.049)
    assert follower.stats().lag_records == 2 and follower.stats().lag_bytes > 100
    now[0] += 0.001
    assert follower.get(b"k") == b"v"
    found = follower.stats()
    assert (found.lag_records, found.lag_bytes, found.refreshed_s) == (0, 0, 0)
    assert found.seq == store.stat(b"k").seq and found.refreshes == 1  # type: ignore[union-attr]
    follower.close()


def test_without_an_interval_only_refresh_looks(open_small: Opener, follow: Any) -> None:
    store = open_small()
    follower = follow(refresh_interval_ms=None)
    store.put(b"k", b"v")
    assert follower.get(b"k") is None
    # The claim of a container, and the put.
    assert follower.refresh() == 2
    assert follower.get(b"k") == b"v" and follower.refresh() == 0


def test_lag_counts_what_came_since_also_across_a_rotation(
    open_small: Opener, follow: Any
) -> None:
    store = open_small()
    follower = follow(refresh_interval_ms=None)
    for number in range(5):
        store.put(b"%d" % number, b"v")
    assert follower.stats().lag_records == 6
    store.snapshot()
    store.put(b"k", b"v")
    assert follower.stats().lag_records == 7 and follower.stats().lag_bytes > 0
    follower.refresh()
    assert (follower.stats().lag_records, follower.stats().lag_bytes) == (0, 0)


def test_a_value_found_moved_is_found_where_it_is_now(open_small: Opener, follow: Any) -> None:
    store = open_small(max_bytes="32K", container_bytes="8K")
    store.put_many([(b"k", b"old" * 1000), (b"j", b"j" * 1000)])
    follower = follow(refresh_interval_ms=None)
    for number in range(16):
        store.put(b"k", b"%d" % number * 1000)
    assert follower.get_many([b"k", b"j", b"k"]) == [b"15" * 1000, b"j" * 1000, b"15" * 1000]
    found = follower.stats()
    assert (found.moved, found.corrupt, found.lag_records) == (2, 0, 0)
    assert (found.gets, found.hits) == (3, 3)
    store.put_many([(b"j", b"new" * 1000, b"its")] + [(b"%d" % at, b"x") for at in range(7)])
    assert follower.get_entries_into([b"j"], [bytearray(4096)]) == [store.stat(b"j")]


def test_a_damaged_value_is_a_miss_and_is_not_dropped(
    open_small: Opener, region: Path, follow: Any
) -> None:
    store = open_small()
    store.put(b"k", b"v" * 4000)
    entry = store.stat(b"k")
    assert entry is not None
    with open(region / "containers" / f"{entry.container:04d}.bin", "r+b") as file:
        file.seek(entry.slot * 4096 + 17)
        file.write(b"?")
    follower = follow()
    assert follower.get(b"k") is None and b"k" in follower
    assert follower.stats().corrupt == 1 and follower.stats().quarantined == 0


def test_a_follower_grows_shrinks_and_gets_larger_slots_with_the_region(
    open_small: Opener, follow: Any
) -> None:
    store = open_small()
    store.put(b"small", b"s" * 4096)
    follower = follow()
    assert follower[b"small"] == b"s" * 4096
    store.close()
    store = open_small(max_bytes="4M", container_bytes="64K", slot_bytes=["4K", "32K"])
    store.put(b"large", b"l" * 32768)
    assert follower[b"large"] == b"l" * 32768 and follower.stats().slot_bytes == 32768
    assert follower.stats().capacity > 500 and follower.stats().reloads == 1
    store.close()
    store = open_small(max_bytes="256K", slot_bytes=["4K", "32K"])
    assert sorted(follower) == sorted(store) and follower.stats().capacity < 100


def test_another_region_under_the_path_is_taken_up(
    open_small: Opener, region: Path, follow: Any, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_small()
    store.put(b"old", b"1")
    follower, quiet = follow(), follow()
    store.close()
    shutil.rmtree(region)
    with pytest.raises(FileNotFoundError):
        follower.refresh()
    # What is open stays readable; a call on values says once in the log that it could not look.
    assert quiet.get(b"old") == b"1" and quiet.get(b"old") == b"1"
    assert caplog.text.count("not refreshed") == 1
    assert "No such file" in str(quiet.stats().problem) and quiet.stats().lag_records is None
    store = open_small()
    store.put(b"new", b"2")
    assert follower.get_many([b"old", b"new"]) == [None, b"2"]
    assert quiet.get_many([b"old", b"new"]) == [None, b"2"] and quiet.stats().problem is None
    assert "another region than before" in caplog.text


def test_reads_in_many_threads_while_the_writer_rotates(open_small: Opener, follow: Any) -> None:
    store = open_small(on_full="evict")
    keys = [b"%02d" % number for number in range(90)]
    follower = follow()
    wrong: list[object] = []
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            for key, value in zip(keys, follower.get_many(keys), strict=True):
                if value is not None and value[:2] * (len(value) // 2) != value:
                    wrong.append((key, value))
                if value is not None and value[:2] != key:
                    wrong.append((key, value))

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    for number in range(60):
        store.put_many([(key, key * (20 * number + 1)) for key in keys[number % 3 :: 3]])
        if number % 10 == 9:
            store.snapshot()
    stop.set()
    for reader in readers:
        reader.join()
    assert wrong == [] and follower.refresh() >= 0
    assert sorted(follower) == sorted(store)


def test_a_forked_child_leaves_the_follower_to_its_parent(open_small: Opener, follow: Any) -> None:
    open_small().put(b"k", b"v")
    follower = follow()
    child = os.fork()
    if child == 0:
        try:
            follower.get(b"k")
        except tablespace.ClosedError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert follower[b"k"] == b"v"


FOLLOW_REFUSED = """
import logging, sys, tablespace
logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
try:
    tablespace.open(sys.argv[1], read_only=True, io_mode="direct")
except OSError as error:
    print("direct" in str(error))
with tablespace.open(sys.argv[1], read_only=True) as store:
    print(store[b"k"], store.stats().io_mode)
"""


def test_direct_reads_that_are_refused_fall_back_and_say_so_once(
    open_small: Opener, region: Path, preload: Preload, need_direct: None
) -> None:
    open_small().put(b"k", b"v")
    done = subprocess.run(
        [sys.executable, "-c", FOLLOW_REFUSED, str(region)],
        env={**os.environ, "LD_PRELOAD": preload("refuse_direct")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == ["True", "b'v' buffered"]
    assert done.stderr.count("refused by read") == 1


def test_direct_reads_are_tried_by_a_read(
    open_small: Opener, region: Path, follow: Any, need_direct: None
) -> None:
    store = open_small(io_mode="buffered")
    store.put(b"k", b"v" * 4096)
    direct, buffered = follow(io_mode="direct"), follow(io_mode="buffered")
    assert direct.get(b"k") == buffered.get(b"k") == b"v" * 4096
    assert (direct.stats().io_mode, buffered.stats().io_mode) == ("direct", "buffered")
    assert any("trial read worked" in reason for reason in direct.stats().choices)
    assert any("dropped before it is read again" in text for text in buffered.stats().choices)
    assert json.loads((region / "region.json").read_bytes()[4096:])["writer"]["pid"] == os.getpid()
