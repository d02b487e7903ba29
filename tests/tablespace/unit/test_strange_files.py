"""Links, pipes, directories and devices where a region has files: refused by name, never used."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from tablespace.journal import JOURNAL_NAME

from tablespace import Store

Opener = Callable[..., Store]
FILES = ["region.json", "index.log", "index.snapshot.json", "containers/0001.bin"]
VALUES = {b"%d" % number: b"v%d" % number * 50 for number in range(20)}


@pytest.fixture
def region(open_small: Opener, tmp_path: Path) -> Path:
    with open_small() as store:
        store.put_many(VALUES.items())
        store.snapshot()
        store.put(b"last", b"l")
    return tmp_path / "region"


def put_in_place(kind: str, path: Path, elsewhere: Path) -> None:
    """Put something that is no file of a region under a file's name."""
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
        (path / "inner").touch()
    elif kind == "socket":
        here = os.open(path.parent, os.O_RDONLY)
        # The address of a socket is short: bind it by a short path.
        socket.socket(socket.AF_UNIX).bind(f"/proc/self/fd/{here}/{path.name}")
        os.close(here)
    elif kind == "device":
        try:
            os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 3))
        except PermissionError:
            pytest.skip("making device nodes is not allowed here")
    else:
        targets = {"link": elsewhere, "dangling": elsewhere.with_name("none"), "loop": path}
        path.symlink_to(targets[kind])


@pytest.mark.parametrize("recover", ["strict", "salvage", "empty"])
@pytest.mark.parametrize(
    "kind", ["link", "dangling", "loop", "fifo", "socket", "directory", "device"]
)
def test_what_is_no_file_is_refused_by_name_and_what_a_link_leads_to_is_left_alone(
    open_small: Opener, region: Path, tmp_path: Path, kind: str, recover: str
) -> None:
    """A link in place of a container was followed, and somebody else's file became the
    container; a link in place of the journal sent every key of the region elsewhere."""
    elsewhere = tmp_path / "elsewhere"
    for name in FILES:
        path, kept = region / name, tmp_path / "kept"
        shutil.copy(path, elsewhere)
        before = elsewhere.stat()
        path.rename(kept)
        put_in_place(kind, path, elsewhere)
        with pytest.raises(OSError, match="stands where a region has a file") as caught:
            open_small(recover=recover)
        assert str(path) in str(caught.value)
        after = elsewhere.stat()
        assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
        assert not elsewhere.with_name("none").exists()
        shutil.rmtree(path) if kind == "directory" else path.unlink()
        kept.rename(path)
    again = open_small()
    assert again.get_many(VALUES) == list(VALUES.values())
    assert again.get(b"last") == b"l"


def test_a_containers_directory_on_another_disk_may_be_linked_to(
    open_small: Opener, region: Path, tmp_path: Path
) -> None:
    (region / "containers").rename(tmp_path / "other disk")
    (region / "containers").symlink_to(tmp_path / "other disk")
    again = open_small()
    assert again.get_many(VALUES) == list(VALUES.values())


@pytest.mark.parametrize("recover", ["strict", "salvage", "empty"])
def test_a_name_that_cannot_be_looked_up_is_not_taken_for_an_absent_file(
    open_small: Opener, region: Path, monkeypatch: pytest.MonkeyPatch, recover: str
) -> None:
    """A file whose directory could not be read for a moment (EIO, a stale mount) counted as
    absent: a salvage or an empty start then replaced what was only out of reach."""
    real = os.lstat

    def lstat(path: str) -> os.stat_result:
        if path.endswith(JOURNAL_NAME):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
        return real(path)

    monkeypatch.setattr("tablespace.io.directory.os.lstat", lstat)
    with pytest.raises(OSError) as caught:
        open_small(recover=recover)
    assert caught.value.errno == errno.ESTALE
    monkeypatch.undo()
    again = open_small()
    assert again.get_many(VALUES) == list(VALUES.values())
    assert again.get(b"last") == b"l"


@pytest.mark.parametrize("umask", [0, 0o077])
def test_files_are_the_owners_alone_whatever_the_umask(
    open_small: Opener, tmp_path: Path, umask: int
) -> None:
    """Files made with the process's own mask were readable, or writable, by everyone."""
    before = os.umask(umask)
    try:
        store = open_small(tmp_path / "deep" / "region")
        store.put(b"k", b"v")
        store.snapshot()
        store.snapshot()
    finally:
        os.umask(before)
    paths = [tmp_path / "deep", *(tmp_path / "deep").rglob("*")]
    assert len(paths) > 8
    for path in paths:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
