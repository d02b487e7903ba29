"""Regions on tmpfs, overlay, loop, read-only and bind mounts, in a namespace of our own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Preload = Callable[[str], str]

ROOT = Path(__file__).resolve().parents[3]

# What any file system must let a region do.
SMOKE = """
import sys, tablespace
path = sys.argv[1]
options = dict(max_bytes="4M", slot_bytes=["4K", "16K"], on_full="evict")
values = {b"%d" % n: bytes([n % 251]) * (n * 331 % 16385) for n in range(90)}
for turn in range(2):
    with tablespace.open(path, **options) as store:
        store.put_many(values.items())
        store.delete_many(b"%d" % n for n in range(10))
        store.snapshot()
        assert [store.get(key) == value for key, value in values.items()].count(False) == 10
with tablespace.open(path, **options) as store:
    assert sorted(store) == sorted(key for key in values if int(key) >= 10)
    stats = store.stats()
    assert stats.free + stats.live == stats.capacity and stats.corrupt == 0
    print(stats.io_mode, stats.io_engine)
"""

FILL = """
import os, sys, tablespace
path, filler = sys.argv[1], sys.argv[2]
options = dict(max_bytes="1M", slot_bytes="16K")
store = tablespace.open(path, **options)
old = {b"old %d" % n: b"%d" % n * 3000 for n in range(20)}
store.put_many(old.items())
stats = store.stats()
with open(filler, "wb", buffering=0) as file:
    while True:
        try:
            file.write(bytes(4096))
        except OSError:
            break
refused = 0
for n in range(30):
    try:
        store.put(b"new %d" % (n % 7), os.urandom(16384), metadata=b"m" * 255)
    except tablespace.FullError as error:
        refused += 1
        assert "Remedy" in str(error), error
try:
    store.snapshot()
except OSError as error:
    refused += 1
after = store.stats()
assert after.free + after.live == after.capacity and after.reserved == 0
assert store.get_many(old) == list(old.values())
os.unlink(filler)
store.put(b"again", b"there is room")
store.close()
with tablespace.open(path, **options) as store:
    assert store.get_many(old) == list(old.values()) and store[b"again"] == b"there is room"
    print(refused, after.failed)
"""

TOO_LARGE = """
import os, sys, tablespace
try:
    tablespace.open(sys.argv[1], max_bytes="64M")
except OSError as error:
    print(error.errno, error, os.path.exists(sys.argv[1]))
"""

ONE = """
import sys, tablespace
options = dict(max_bytes="256K", slot_bytes="4K", create=len(sys.argv) > 2)
try:
    tablespace.open(sys.argv[1], **options).close()
    print("opened")
except (OSError, tablespace.TablespaceError) as error:
    print(type(error).__name__, error)
"""

HOLD = """
import os, subprocess, sys, tablespace
first, second, script = sys.argv[1:]
store = tablespace.open(first, max_bytes="256K", slot_bytes="4K")
store.put(b"k", b"v")
for before in ([], ["unshare", "-m"]):
    subprocess.run([*before, sys.executable, "-c", script, second], check=True)
print(store.get(b"k"))
"""


@pytest.fixture(autouse=True)
def need_mounts() -> None:
    """Skip, with the reason, where this process may not mount."""
    if shutil.which("unshare") is None:
        pytest.skip("no unshare(1) here")
    done = subprocess.run(
        ["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"mounting is not allowed here: {done.stderr.strip()}")


def in_namespace(tmp_path: Path, commands: str, *arguments: str) -> str:
    """Run shell commands in a mount namespace; $0 is the python, $1 ... the arguments."""
    done = subprocess.run(
        ["unshare", "-m", "bash", "-ec", commands, sys.executable, *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


MOUNTS = {
    "tmpfs": "mkdir m; mount -t tmpfs -o size=16m none m",
    "overlay": "mkdir m l u w; mount -t overlay none -o lowerdir=l,upperdir=u,workdir=w m",
}


@pytest.mark.parametrize("kind", MOUNTS)
def test_a_region_works_where_direct_io_is_refused_or_useless(tmp_path: Path, kind: str) -> None:
    """Opening failed on file systems that refuse O_DIRECT, and so did every test run there."""
    said = in_namespace(tmp_path, f'{MOUNTS[kind]}; "$0" -c "$1" m/region', SMOKE)
    assert said.split()[0] == "buffered"


@pytest.mark.long
@pytest.mark.parametrize("kind", MOUNTS)
def test_the_stores_tests_pass_there_too(tmp_path: Path, kind: str) -> None:
    mount = MOUNTS[kind].replace("16m", "512m")
    tests = ROOT / "tests" / "tablespace" / "unit"
    names = ("store", "io_choice", "eviction", "leftover_files", "resize", "pools")
    files = " ".join(f"{tests}/test_{name}.py" for name in names)
    run = f'cd {ROOT}; "$0" -m pytest -q -m "not long" -p no:cacheprovider --basetemp=$M {files}'
    said = in_namespace(tmp_path, f"{mount}; mkdir m/t; M=$PWD/m/t/b; {run}")
    assert " passed" in said and "failed" not in said


@pytest.mark.parametrize("mode", ["auto", "direct"])
def test_a_disk_with_sectors_of_4096_bytes(tmp_path: Path, mode: str) -> None:
    """Transfers aligned to 512 bytes stall or fail on a disk whose sectors are larger."""
    for tool in ("losetup", "mkfs.ext4"):
        if shutil.which(tool) is None:
            pytest.skip(f"no {tool} here")
    script = SMOKE.replace("options = dict(", f'options = dict(io_mode="{mode}", ')
    said = in_namespace(
        tmp_path,
        "mkdir m; truncate -s 32M image\n"
        "disk=$(losetup --show -f --sector-size 4096 image 2>why) || { echo skip; exit; }\n"
        'trap "umount m; losetup -d $disk" EXIT\n'
        'mkfs.ext4 -q $disk; mount $disk m; "$0" -c "$1" m/region',
        script,
    )
    if said.strip() == "skip":
        pytest.skip("no loop device here")
    assert mode == "auto" or said.split()[0] == "direct"


def test_a_region_seen_through_another_mount_or_namespace_has_one_writer(tmp_path: Path) -> None:
    """A process that was not known to be there still wrote to the same device: checksum errors."""
    said = in_namespace(
        tmp_path,
        'mkdir a b; mount --bind a b; "$0" -c "$1" a/region b/region "$2"',
        HOLD,
        ONE,
    ).splitlines()
    assert [line.split()[0] for line in said] == ["BusyError", "BusyError", "b'v'"]
    assert all("pid" in line for line in said[:2])


def test_a_read_only_mount_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    said = in_namespace(
        tmp_path,
        'mkdir m; "$0" -c "$1" m/region make; mount --bind m m; mount -o remount,ro,bind m\n'
        '"$0" -c "$1" m/region; "$0" -c "$1" m/other make',
        ONE,
    ).splitlines()
    assert said[0] == "opened"
    assert "Read-only file system" in said[1] and "region.json" in said[1]
    assert "Read-only file system" in said[2] and "m/other" in said[2]


@pytest.mark.parametrize("sparse", [False, True], ids=["allocated", "sparse"])
def test_a_disk_filled_by_others_refuses_puts_and_loses_nothing(
    tmp_path: Path, preload: Preload, sparse: bool
) -> None:
    """A full disk at a commit was a raw error that leaked the slot; without fallocate the
    containers themselves run out of space."""
    before = f"LD_PRELOAD='{preload('refuse_calls')}' REFUSE_FALLOCATE=95 " if sparse else ""
    mount = "mkdir m; mount -t tmpfs -o size=6m none m"
    said = in_namespace(tmp_path, f'{mount}; {before}"$0" -c "$1" m/region m/filler', FILL)
    refused, failed = said.split()
    assert failed == "None"
    # Where the containers have their space, so has the index: nothing is refused.
    assert int(refused) > 5 if sparse else int(refused) == 0


def test_a_budget_larger_than_the_disk_is_refused_when_made(tmp_path: Path) -> None:
    """A budget above the volume's size was taken, and the files were sparse: the disk filled up
    long before the budget did."""
    said = in_namespace(
        tmp_path, 'mkdir m; mount -t tmpfs -o size=8m none m; "$0" -c "$1" m/region', TOO_LARGE
    )
    assert said.startswith("28 ") and "Remedy: a smaller max_bytes" in said
    assert "64M" in said and said.rstrip().endswith("False")
