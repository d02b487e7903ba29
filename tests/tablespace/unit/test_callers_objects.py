"""What callers pass in: paths, keys, buffers of every kind, generators that misbehave."""

from __future__ import annotations

import array
import ctypes
import io
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest

import tablespace
from tablespace import Store

Opener = Callable[..., Store]
SMALL = {"max_bytes": "256K", "slot_bytes": "4K"}


class Awkward(bytes):
    """Bytes whose comparison and hash are of no use."""

    def __hash__(self) -> int:
        raise RuntimeError("hash")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("eq")


# Paths.


@pytest.mark.parametrize("name", [b"plain", b"two\nlines", b"caf\xc3\xa9", b"\xff\xfe", b" -x "])
def test_a_path_of_any_bytes_is_taken_as_bytes_or_text(tmp_path: Path, name: bytes) -> None:
    path = os.fsencode(tmp_path) + b"/" + name
    with tablespace.open(path, **SMALL) as store:  # type: ignore[arg-type]
        store.put(b"k", b"v")
        store.snapshot()
        with pytest.raises(tablespace.BusyError):
            tablespace.open(os.fsdecode(path), **SMALL)  # type: ignore[arg-type]
    with tablespace.open(os.fsdecode(path)) as store:
        assert store[b"k"] == b"v"
    assert os.listdir(os.fsencode(tmp_path)) == [name]


@pytest.mark.parametrize(
    "path, problem",
    [("", "empty"), ("a\0b", "null"), ("x" * 300, "too long"), ("file/below", "exists|irectory")],
)
def test_a_path_that_cannot_be_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, problem: str
) -> None:
    """An empty path, of a variable that was not set, made a region of the current directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises((ValueError, OSError), match=f"(?i){problem}"):
        tablespace.open(path, **SMALL)  # type: ignore[arg-type]
    assert os.listdir(tmp_path) == ["file"]


def test_a_region_opened_by_a_relative_path_stays_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with tablespace.open("region", **SMALL) as store:  # type: ignore[arg-type]
        os.chdir("/")
        store.put(b"k", b"v")
        store.snapshot()
        assert store[b"k"] == b"v"
    with tablespace.open(tmp_path / "here" / "region") as store:
        assert store[b"k"] == b"v"


def test_a_region_behind_a_link_has_one_writer(open_small: Opener, tmp_path: Path) -> None:
    open_small().put(b"k", b"v")
    (tmp_path / "link").symlink_to("region")
    with pytest.raises(tablespace.BusyError):
        open_small(tmp_path / "link")


# Sizes.


@pytest.mark.parametrize(
    "size", ["-1", "", "nan", "1e9", "9" * 30 + "T", "1,5G", -1, True, 1.5, b"1G", [], 10**30]
)
@pytest.mark.parametrize("option", ["max_bytes", "slot_bytes", "container_bytes"])
def test_what_is_no_size_is_refused_before_anything_is_made(
    tmp_path: Path, option: str, size: Any
) -> None:
    options: dict[str, Any] = {**SMALL, option: size}
    with pytest.raises(ValueError):
        tablespace.open(tmp_path / "region", **options)
    assert not (tmp_path / "region").exists()


# Keys and metadata.


LIMITS = """
import os, signal, sys, tablespace
keys = [b"\\xff" * 255, b"\\0", b'"\\\\\\n', b"\\xff", bytes(range(255)), b"\\0" * 255]
store = tablespace.open(sys.argv[1], max_bytes="256K", slot_bytes="4K")
if len(sys.argv) > 2:
    store.put_many((key, key, b"\\xff" * 255) for key in keys)
    os.kill(os.getpid(), signal.SIGKILL)
assert store.get_many(keys) == keys and sorted(store) == sorted(keys)
assert {store.stat(key).metadata for key in keys} == {b"\\xff" * 255}
store.close()
"""


def test_keys_and_metadata_at_their_limits_come_back_after_kill_and_close(tmp_path: Path) -> None:
    for more, code in ((["put"], -signal.SIGKILL), ([], 0), ([], 0)):
        command = [sys.executable, "-c", LIMITS, str(tmp_path / "region"), *more]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr


def test_a_subclass_of_bytes_is_a_key_by_its_bytes(open_small: Opener) -> None:
    store = open_small()
    assert store.put_many([(Awkward(b"k"), Awkward(b"v")), (b"k2", b"w")]) == [True, True]
    assert store.get_many([b"k", Awkward(b"k"), Awkward(b"k2")]) == [b"v", b"v", b"w"]
    assert store.delete(Awkward(b"k2"))
    assert [type(key) for key in store] == [bytes]


@pytest.mark.parametrize("key", [bytearray(b"k"), memoryview(b"k"), "k", None, 5, (b"k",)])
def test_what_is_no_key_is_refused_by_every_call(open_small: Opener, key: Any) -> None:
    store = open_small()
    store.put(b"k", b"v")
    calls: list[Callable[[Any], object]] = [
        store.get,
        store.delete,
        store.stat,
        lambda key: key in store,
        lambda key: store.get_into(key, bytearray(9)),
        lambda key: store.contains_many([b"k", key]),
        lambda key: store.match_prefix([b"k", key]),
        lambda key: store.touch_many([b"k", key]),
        lambda key: store.get_many([b"k", key]),
        lambda key: store.put(key, b""),
        lambda key: store.put_many([(b"k", b"new"), (key, b"")]),
        lambda key: store.delete_many([b"k", key]),
    ]
    for call in calls:
        with pytest.raises(TypeError, match="a key is bytes"):
            call(key)
    assert store.get(b"k") == b"v" and store.stats().limbo == 0


# Buffers.

GIVEN: dict[str, Any] = {
    "array": array.array("d", [1.5] * 10),
    "numpy": numpy.arange(10, dtype=">f4"),
    "numpy in two dimensions": numpy.arange(12, dtype="i2").reshape(3, 4),
    "numpy scalar": numpy.array(5),
    "numpy read-only": numpy.frombuffer(b"abc", dtype="u1"),
    "numpy dates": numpy.array(["2020-01-01"], dtype="M8[D]"),
    "empty": numpy.empty(0),
    "cast": memoryview(bytes(range(16))).cast("I"),
    "cast in two dimensions": memoryview(bytes(range(16))).cast("B", (4, 4)),
    "mapping": mmap.mmap(-1, 4096),
    "ctypes": (ctypes.c_int * 4)(1, 2, 3, 4),
    "file": io.BytesIO(b"xyz").getbuffer(),
}


@pytest.mark.parametrize("name", GIVEN)
def test_a_contiguous_buffer_of_any_type_is_stored_byte_by_byte(
    open_small: Opener, name: str
) -> None:
    value = GIVEN[name]
    store = open_small()
    store.put(b"k", value)
    expected = value.tobytes() if hasattr(value, "tobytes") else bytes(value)
    assert store.get(b"k") == expected


@pytest.mark.parametrize(
    "value",
    [
        numpy.arange(20)[::2],
        numpy.asfortranarray(numpy.arange(12).reshape(3, 4)),
        memoryview(b"abcdef")[::-1],
        "text",
        5,
        None,
        [1, 2],
    ],
    ids=["strided", "fortran", "reversed", "text", "number", "none", "list"],
)
def test_a_buffer_with_gaps_or_none_at_all_is_refused(open_small: Opener, value: Any) -> None:
    store = open_small()
    with pytest.raises((TypeError, ValueError, BufferError)):
        store.put(b"k", value)
    with pytest.raises((TypeError, ValueError, BufferError)):
        store.put_many([(b"j", b"fine"), (b"k", value)])
    assert len(store) == 0 and store.stats().reserved == 0


@pytest.mark.parametrize(
    "target",
    [
        numpy.zeros(5, "f8"),
        numpy.zeros((5, 2), "i4"),
        array.array("i", [0] * 10),
        mmap.mmap(-1, 4096),
        (ctypes.c_char * 40)(),
        memoryview(bytearray(64)).cast("I"),
    ],
    ids=lambda target: type(target).__name__,
)
def test_a_writable_buffer_of_any_type_is_read_into(open_small: Opener, target: Any) -> None:
    store = open_small()
    store.put(b"k", bytes(range(40)))
    assert store.get_into(b"k", target) == 40
    assert memoryview(target).cast("B").tobytes()[:40] == bytes(range(40))


@pytest.mark.parametrize(
    "target",
    [bytes(64), numpy.zeros(80, "u1")[::2], numpy.frombuffer(bytes(64), "u1"), memoryview(b"x")],
    ids=lambda target: type(target).__name__,
)
def test_a_target_that_cannot_be_written_is_refused_and_pins_nothing(
    open_small: Opener, target: Any
) -> None:
    store = open_small()
    store.put(b"k", bytes(40))
    with pytest.raises((TypeError, ValueError, BufferError)):
        store.get_many_into([b"k", b"k"], [bytearray(64), target])
    assert store.delete(b"k") and store.stats().limbo == 0


def test_one_buffer_may_be_the_target_of_many_keys_and_a_key_be_read_often(
    open_small: Opener,
) -> None:
    store = open_small()
    store.put_many((b"%d" % number, b"%d" % number * 500) for number in range(10))
    buffer = bytearray(4096)
    keys = [b"%d" % number for number in range(10)]
    assert store.get_many_into(keys, [buffer] * 10) == [500] * 10
    assert store.get_many([b"3"] * 70_000) == [b"3" * 500] * 70_000
    assert store.get_many(keys) == [key * 500 for key in keys]
    assert store.stats().corrupt == 0


# Generators.


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit, StopIteration])
def test_a_generator_that_raises_midway_leaves_whole_groups(
    open_small: Opener, error: type[BaseException]
) -> None:
    store = open_small(max_bytes="4M")

    def items() -> Iterator[tuple[bytes, bytes]]:
        for number in range(300):
            yield b"%d" % number, b"v%d" % number
        raise error("midway")

    with pytest.raises(RuntimeError if error is StopIteration else error):
        store.put_many(items())
    assert sorted(store, key=int) == [b"%d" % number for number in range(256)]
    stats = store.stats()
    assert (stats.reserved, stats.free + stats.live) == (0, stats.capacity)
    store.put(b"after", b"works")


def test_a_generator_may_use_the_store_it_is_stored_into(open_small: Opener) -> None:
    store = open_small(max_bytes="4M")

    def items() -> Iterator[tuple[bytes, bytes]]:
        for number in range(600):
            if number % 100 == 0:
                store.put(b"inner %d" % number, b"x")
                store.put_many([(b"nested %d" % number, b"y")])
                store.delete(b"%d" % (number - 300))
                store.snapshot()
            yield b"%d" % number, b"z"

    assert store.put_many(items()) == [True] * 600
    assert store.get(b"inner 500") == b"x" and store.get(b"nested 0") == b"y"
    assert store.contains_many([b"0", b"599"]) == [False, True]


def test_a_region_may_be_emptied_while_its_keys_are_walked(open_small: Opener) -> None:
    store = open_small()
    store.put_many((b"%d" % number, b"x") for number in range(60))
    for key in store:
        assert store.delete(key)
        store.put(key + b" again", b"y")
    assert len(store) == 60 and store.stats().limbo == 0
