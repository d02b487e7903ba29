"""Regions that were refused or cut short as they were made: what stays, and what commands say."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tablespace.errors import CorruptionError
from tablespace.io.directory import PosixDirectory
from tablespace.layout import Geometry
from tablespace.region import encode_region, new_region

import tablespace

SMALL = {"max_bytes": "256K", "slot_bytes": "4K"}


def test_a_refusal_for_room_leaves_nothing(tmp_path: Path, calls: Any) -> None:
    """It left containers/ and an empty region.json, which every command took for another thing."""
    for path in (tmp_path / "a" / "new", tmp_path):
        calls.text("put", "--create", "100T", path, "key", os.devnull, code=2)
        assert "100T" in calls.errors and "Remedy: a smaller max_bytes" in calls.errors
        with pytest.raises(OSError, match="a smaller max_bytes") as caught:
            tablespace.open(path, max_bytes="100T")
        assert caught.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


def test_a_region_that_lost_its_identity_needs_no_room_to_be_salvaged(
    region: Path, values: dict[bytes, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    (region / "region.json").unlink()
    monkeypatch.setattr(PosixDirectory, "free_bytes", lambda directory: 0)
    with tablespace.open(region, recover="salvage") as store:
        assert set(store) == set(values)


def torn(path: Path) -> None:
    """Leave what a power loss leaves of region.json."""
    page = encode_region(new_region(Geometry(4096, 65536, 4)))
    (path / "region.json").write_bytes(page[:512] + bytes(8192 - 512))


def empty(path: Path) -> None:
    (path / "region.json").touch()


@pytest.mark.parametrize("leave", [empty, torn])
def test_every_command_knows_a_region_whose_making_was_cut_short(
    leave: Callable[[Path], None], tmp_path: Path, calls: Any
) -> None:
    """info and check called it damaged, ls in the making, and put a path that does not exist."""
    path = tmp_path / "new"
    (path / "containers").mkdir(parents=True)
    leave(path)
    for command, *rest in (
        ("info",),
        ("ls",),
        ("get", "key"),
        ("put", "key", os.devnull),
        ("rm", "key"),
        ("check",),
        ("check", "--repair"),
        ("compact",),
    ):
        calls.text(command, path, *rest, code=2)
        assert calls.errors.startswith(f"tablespace: {path}: no region here yet: "), command
        assert "cut short" in calls.errors and "put --create SIZE" in calls.errors
        assert "or, where nobody is making it, remove the directory" in calls.errors
    with pytest.raises(FileNotFoundError, match=r"cut short.*Remedy"):
        tablespace.open(path, create=False)
    with pytest.raises(FileNotFoundError, match=r"cut short.*Remedy: make it again"):
        tablespace.open(path, read_only=True)
    with pytest.raises(FileNotFoundError, match=r"cut short.*Remedy"):
        tablespace.check(path)
    # The remedies.
    calls.text("put", "--create", "256K", "--slot-bytes", "4K", path, "key", os.devnull)
    assert calls.json("info", path)["capacity"] == 64
    assert calls.json("check", path)["ok"] is True


def test_damage_is_not_taken_for_a_creation_cut_short(region: Path, calls: Any) -> None:
    """There are records, or region.json was whole once: neither is made anew without a word."""
    page = (region / "region.json").read_bytes()
    (region / "region.json").write_bytes(b"")
    assert calls.json("check", region, code=1)["damaged_files"]
    with pytest.raises(CorruptionError):
        tablespace.open(region, create=False)
    # Half of it, beside records: whoever only reads is not told that there never was a region.
    (region / "region.json").write_bytes(page[:512] + bytes(8192 - 512))
    with pytest.raises(CorruptionError):
        tablespace.open(region, read_only=True)
    for path in region.iterdir():
        if path.name.startswith("index"):
            path.unlink()
    (region / "region.json").write_bytes(b"x" * 8192)
    assert calls.json("check", region, code=1)["error"]["kind"] == "CorruptionError"
    assert calls.json("info", region, code=1)["error"]["kind"] == "CorruptionError"


def test_a_region_among_other_files_is_made_with_a_word(tmp_path: Path, calls: Any) -> None:
    put = ("put", "--create", "256K", "--slot-bytes", "4K")
    calls.text(*put, tmp_path / "absent", "key", os.devnull)
    assert calls.errors == ""
    (tmp_path / "mounted" / "lost+found").mkdir(parents=True)
    calls.text(*put, tmp_path / "mounted", "key", os.devnull)
    assert calls.errors == ""
    calls.text(*put, tmp_path, "key", os.devnull)
    assert f"warning: {tmp_path} was not empty (absent, mounted)" in calls.errors
    # There is one now.
    calls.text(*put, tmp_path, "key", os.devnull)
    assert calls.errors == ""


def test_a_wrong_size_is_not_answered_with_a_check(tmp_path: Path, calls: Any) -> None:
    calls.text("put", "--create", "16M", "--slot-bytes", "5", tmp_path / "r", "key", code=2)
    assert "multiple of 4096" in calls.errors and "Remedy: see --help" in calls.errors
    assert not (tmp_path / "r").exists()


def test_a_value_that_is_too_large_is_named_as_that(region: Path, run: Any) -> None:
    """70,000 bytes were called 65537, and the key was written in another form than elsewhere."""
    done = run("put", region, "big", given=bytes(70_000))
    assert b"value of more than 4096 bytes of key hex:626967 is larger" in done.stderr
    with (
        tablespace.open(region, **SMALL) as store,
        pytest.raises(tablespace.ValueTooLargeError, match="of 70000 bytes of key hex:62"),
    ):
        store.put(b"b", bytes(70_000))
