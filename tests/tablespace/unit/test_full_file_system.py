"""Regions on small file systems of their own that somebody else fills to the last byte.

A loop mount of ext4 and a tmpfs, where the tests may mount them.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tablespace.errors import FullError
from tablespace.layout import index_bound_bytes, plan_geometry
from tablespace.testing.model import audit

import tablespace
from tablespace import Store

SIZES = {"max_bytes": "8M", "slot_bytes": "4K"}


def mount(kind: str, folder: Path, *options: str) -> None:
    done = subprocess.run(
        ["mount", *options, str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"cannot mount {kind} here: {done.stderr.strip()}")


@pytest.fixture(params=["ext4", "tmpfs"])
def small(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """The root of an empty file system of some 56 MiB."""
    folder = tmp_path / "mounted"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root may mount a file system")
    if request.param == "tmpfs":
        mount("tmpfs", folder, "-t", "tmpfs", "-o", "size=56m", "tmpfs")
    else:
        image = tmp_path / "image"
        with open(image, "wb") as file:
            file.truncate(64 << 20)
        # Where a user's PATH has no folder of the system's commands, root's has.
        mkfs = shutil.which("mkfs.ext4", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
        if mkfs is None:
            pytest.skip("no mkfs.ext4 here")
        subprocess.run([mkfs, "-q", str(image)], check=True, capture_output=True)
        mount("ext4", folder, "-o", "loop", str(image))
    try:
        yield folder
    finally:
        # Lazily: a failed test leaves its store open.
        subprocess.run(["umount", "-l", str(folder)], check=True)


class Hog:
    """Somebody else, who takes every free byte."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "hog"

    def eat(self) -> None:
        with open(self.path, "ab", buffering=0) as file:
            for piece in (1 << 20, 1 << 14, 4096, 1):
                try:
                    while file.write(b"x" * piece) == piece:
                        pass
                except OSError as error:
                    assert error.errno == errno.ENOSPC
            os.fsync(file.fileno())

    def leave(self) -> None:
        self.path.unlink()


def short(store: Store) -> bool:
    return any("reserve: short" in choice for choice in store.stats().choices)


def test_a_full_file_system_blocks_no_delete_no_eviction_and_no_compaction(small: Path) -> None:
    """Even when somebody takes at once whatever the region gives up."""
    region, hog = small / "region", Hog(small)
    store = tablespace.open(region, on_full="evict", **SIZES)
    hog.eat()
    number = 0
    for round_number in range(6):
        # More records than the journal's reserved space holds.
        for _ in range(24):
            values = [(b"%d" % (number + at), b"v" * 100) for at in range(256)]
            assert all(store.put_many(values))
            number += 256
            assert store.delete(b"%d" % (number - 1))
        hog.eat()
        assert store.get(b"%d" % (number - 2)) == b"v" * 100
        store.snapshot()
        hog.eat()
        if round_number % 2:
            store.clear()
            hog.eat()
        audit(store)
        assert not short(store)
        kept = len(store)
        store.close()
        hog.eat()
        store = tablespace.open(region, on_full="evict", **SIZES)
        assert len(store) == kept and not short(store)
        hog.eat()
    store.close()


def test_a_region_full_of_values_on_a_full_file_system_refuses_and_recovers(small: Path) -> None:
    """On a full disk a put ended in a raw error, and files were left."""
    region, hog = small / "region", Hog(small)
    with tablespace.open(region, **SIZES) as store:
        hog.eat()
        done = store.put_many((b"%d" % number, b"v" * 4096) for number in range(2100))
        assert sum(done) == 2048 == len(store)
        with pytest.raises(FullError, match="full"):
            store.put(b"one more", b"v")
        audit(store)
        assert store.delete_many(b"%d" % number for number in range(1000)) == 1000
        store.put(b"one more", b"v")
        hog.leave()
        assert all(store.put_many((b"new %d" % number, b"v") for number in range(900)))
        audit(store)


def test_a_budget_beyond_the_file_system_is_refused_and_leaves_nothing(small: Path) -> None:
    """The budget was compared with the host's disk, not with the volume the region is on."""
    with pytest.raises(OSError, match="smaller max_bytes") as caught:
        tablespace.open(small / "region", max_bytes="1G")
    assert caught.value.errno == errno.ENOSPC
    blocks = sum(path.stat().st_blocks * 512 for path in small.rglob("*") if path.is_file())
    assert blocks < 1 << 20


def test_a_growth_beyond_the_file_system_says_what_it_needs(small: Path) -> None:
    """It met the full disk container by container, and named the last one."""
    with tablespace.open(small / "region", max_bytes="1M", slot_bytes="4K") as store:
        store.put(b"key", b"value")
    before = sorted(path.name for path in (small / "region" / "containers").iterdir())
    with pytest.raises(OSError, match=r"growing to 1G needs .*smaller max_bytes") as caught:
        tablespace.open(small / "region", max_bytes="1G")
    assert caught.value.errno == errno.ENOSPC
    assert sorted(path.name for path in (small / "region" / "containers").iterdir()) == before
    with tablespace.open(small / "region") as store:
        assert store.get(b"key") == b"value" and store.stats().capacity == 256


def test_blocks_on_disk_stay_within_budget_and_bound(small: Path) -> None:
    """Pre-allocation that fails must not become a sparse file that fills up later."""
    region = small / "region"
    with tablespace.open(region, **SIZES) as store:
        for number in range(3):
            store.put_many((b"%d/%d" % (number, at), b"v") for at in range(500))
            store.snapshot()
        shape = plan_geometry("8M", None, "4K")
        for path in (region / "containers").iterdir():
            assert path.stat().st_blocks * 512 >= shape.container_bytes
        index = sum(path.stat().st_blocks * 512 for path in region.glob("index.*"))
        assert index <= index_bound_bytes(shape)
        # A journal of 4 MiB and a snapshot of 1 MiB, each with .bak and spare.
        assert 15 << 20 <= index <= 20 << 20
