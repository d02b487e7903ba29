"""Transfers through the C calls of hipFile and cuFile: a library that moves the bytes for real,
loaded as the real one is, and made to fail at each call in each way."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvd import GpuLibraryError, load_gpu_library
from kvd_connectors.gpu_direct.bindings import Bindings, Descriptor, Status
from kvd_connectors.gpu_direct.choosing import choose_driver
from kvd_connectors.gpu_direct.directory import RootDirectory
from kvd_connectors.gpu_direct.errors import GpuIoError
from kvd_connectors.gpu_direct.memory import HostMemory
from kvd_connectors.gpu_direct.native_driver import open_native
from kvd_connectors.gpu_direct.store import ChunkStore

from .chunks import (
    BY_ERRNO,
    ELSEWHERE,
    FILE,
    LIE,
    MINUS_ERRNO,
    NOTHING,
    PAYLOAD,
    SHORT,
    Standin,
    bytes_on_disk,
    chunk_files,
    fill,
    keys_of,
)

Native = tuple[ChunkStore, HostMemory]


def test_the_library_moves_the_bytes(native_store: Native, standin: Standin) -> None:
    store, memory = native_store
    before = standin.calls.standin_written(), standin.calls.standin_read()
    wanted = fill(memory, 1)
    assert store.put(keys_of(1), memory, PAYLOAD)
    assert standin.calls.standin_written() - before[0] == PAYLOAD
    memory.zero(0, PAYLOAD)
    assert store.get(keys_of(1), memory) == PAYLOAD
    assert standin.calls.standin_read() - before[1] == PAYLOAD
    assert memory.view == wanted
    assert store.status()["driver"] == standin.kind
    assert standin.calls.standin_files() == 0, "a file stayed registered"


def test_files_are_the_same_by_every_driver(
    native_store: Native, make_store: Callable[..., ChunkStore], directory: RootDirectory
) -> None:
    store, memory = native_store
    posix = make_store()
    wanted = fill(memory, 1)
    store.put(keys_of(1), memory, 50_000)
    (path,) = chunk_files(directory)
    by_library = path.read_bytes()
    memory.zero(0, PAYLOAD)
    assert posix.get(keys_of(1), memory) == 50_000 and memory.view[:50_000] == wanted[:50_000]
    posix.delete(keys_of(1))
    posix.put(keys_of(1), memory, 50_000)
    assert chunk_files(directory) == [path] and path.read_bytes() == by_library
    assert store.get(keys_of(1), memory) == 50_000


def test_structures_are_as_the_headers_declare_them() -> None:
    assert ctypes.sizeof(Status) == 8
    assert ctypes.sizeof(Descriptor) == 24
    assert [getattr(Descriptor, name).offset for name in ("kind", "handle", "operations")] == [
        *(0, 8, 16)
    ]


WRITE_FAULTS = [
    ("HandleRegister", 5008, 5008),
    ("HandleRegister", 5025, 5025),
    ("HandleRegister", 5031, 5031),
    ("Write", BY_ERRNO, 5),
    ("Write", BY_ERRNO, 22),
    ("Write", MINUS_ERRNO, 5),
    ("Write", NOTHING, 0),
    ("Write", 5001, 5001),
    ("Write", 5011, 5011),
    ("Write", 5015, 5015),
    ("Write", 5030, 5030),
]


@pytest.mark.parametrize(("call", "way", "value"), WRITE_FAULTS)
def test_a_write_that_fails_leaves_nothing(
    native_store: Native,
    standin: Standin,
    directory: RootDirectory,
    call: str,
    way: int,
    value: int,
) -> None:
    store, memory = native_store
    wanted = fill(memory, 1)
    standin.fail(call, way, value)
    assert not store.put(keys_of(1), memory, PAYLOAD)
    assert store.status()["write_errors"] == 1 and store.status()["used_bytes"] == 0
    assert bytes_on_disk(directory) == 0 and standin.calls.standin_files() == 0
    assert not store.has(keys_of(1))
    # The next one works.
    assert store.put(keys_of(1), memory, PAYLOAD)
    memory.zero(0, PAYLOAD)
    assert store.get(keys_of(1), memory) == PAYLOAD and memory.view == wanted


@pytest.mark.parametrize("way", [BY_ERRNO, MINUS_ERRNO])
@pytest.mark.parametrize("value", [28, 122])
def test_a_full_disk_is_told_from_a_broken_one(
    native_store: Native,
    standin: Standin,
    caplog: pytest.LogCaptureFixture,
    way: int,
    value: int,
) -> None:
    store, memory = native_store
    standin.fail("Write", way, value)
    assert not store.put(keys_of(1), memory, PAYLOAD)
    assert store.status()["refused_space"] == 1 and store.status()["write_errors"] == 0
    assert f"{standin.prefix}Write: {os.strerror(value)} ({value})" in caplog.text


READ_FAULTS = [
    ("HandleRegister", 5008, 5008),
    ("HandleRegister", 5031, 5031),
    ("Read", BY_ERRNO, 5),
    ("Read", BY_ERRNO, 22),
    ("Read", MINUS_ERRNO, 5),
    ("Read", NOTHING, 0),
    ("Read", 5006, 5006),
    ("Read", 5011, 5011),
    ("Read", 5030, 5030),
]


@pytest.mark.parametrize(("call", "way", "value"), READ_FAULTS)
def test_a_read_that_fails_is_a_miss_and_keeps_the_file(
    native_store: Native, standin: Standin, call: str, way: int, value: int
) -> None:
    store, memory = native_store
    wanted = fill(memory, 1)
    store.put(keys_of(1), memory, PAYLOAD)
    standin.fail(call, way, value)
    assert store.get(keys_of(1), memory) is None
    assert store.status()["read_errors"] == 1 and store.status()["damaged"] == 0
    assert standin.calls.standin_files() == 0
    memory.zero(0, PAYLOAD)
    assert store.get(keys_of(1), memory) == PAYLOAD and memory.view == wanted


def test_transfers_in_pieces_are_put_together(native_store: Native, standin: Standin) -> None:
    store, memory = native_store
    wanted = fill(memory, 1)
    standin.fail("Write", SHORT, times=3)
    assert store.put(keys_of(1), memory, PAYLOAD)
    memory.zero(0, PAYLOAD)
    standin.fail("Read", SHORT, times=3)
    assert store.get(keys_of(1), memory) == PAYLOAD
    assert memory.view == wanted


@pytest.mark.parametrize("way", [ELSEWHERE, LIE])
def test_bytes_of_another_place_are_not_served(
    native_store: Native, standin: Standin, directory: RootDirectory, way: int
) -> None:
    """A library that says that all is well while it is not: the checksum tells."""
    store, memory = native_store
    fill(memory, 1)
    store.put(keys_of(1), memory, PAYLOAD)
    memory.zero(0, PAYLOAD)
    standin.fail("Read", way)
    assert store.get(keys_of(1), memory) is None
    assert store.status()["damaged"] == 1


@pytest.mark.parametrize("way", [ELSEWHERE, LIE])
def test_bytes_written_to_another_place_are_not_served(
    native_store: Native, standin: Standin, way: int
) -> None:
    store, memory = native_store
    fill(memory, 1)
    standin.fail("Write", way)
    store.put(keys_of(1), memory, PAYLOAD)
    assert store.get(keys_of(1), memory) is None
    assert store.status()["damaged"] == 1


# -- what the library refuses, and we never ask for --------------------------------------------


def test_memory_that_is_not_registered_is_refused(native_store: Native, standin: Standin) -> None:
    store, memory = native_store
    other = HostMemory(PAYLOAD)
    assert not store.put(keys_of(1), other, PAYLOAD)
    assert store.status()["write_errors"] == 1
    store.put(keys_of(2), memory, PAYLOAD)
    assert store.get(keys_of(2), other) is None and store.status()["read_errors"] == 1


def test_the_library_is_as_strict_as_the_real_one(standin: Standin, tmp_path: Path) -> None:
    """Or tests through it would show nothing."""
    bindings = Bindings(load_gpu_library(standin.kind))
    memory = HostMemory(8192)
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    plain = os.open(tmp_path / "file", os.O_RDWR)

    def code(call: Callable[..., object], *arguments: int) -> int:
        with pytest.raises(GpuIoError) as caught:
            call(*arguments)
        return caught.value.code

    assert code(bindings.register_memory, memory.pointer, 8192) == 5001
    assert code(bindings.register_file, fd) == 5001
    bindings.open()
    assert code(bindings.open) == 5026
    assert code(bindings.register_file, plain) == 5020
    assert code(bindings.register_file, 9999) == 5022
    assert code(bindings.register_memory, memory.pointer + 8, 4096) == 5022
    handle = bindings.register_file(fd)
    assert code(bindings.write, handle, memory.pointer, 4096, 0, 0) == 5024
    bindings.register_memory(memory.pointer, 8192)
    assert code(bindings.register_memory, memory.pointer, 8192) == 5023
    assert code(bindings.write, 12345, memory.pointer, 4096, 0, 0) == 5027
    assert code(bindings.write, handle, memory.pointer, 4096, 100, 0) == 5022
    assert code(bindings.write, handle, memory.pointer, 100, 0, 0) == 5022
    assert code(bindings.write, handle, memory.pointer, 8192, 0, 4096) == 5016
    fill(memory, 1)
    assert bindings.write(handle, memory.pointer, 4096, 4096, 4096) == 4096
    assert os.pread(plain, 4096, 4096) == bytes(memory.view[4096:])
    assert bindings.read(handle, memory.pointer, 4096, 4096, 0) == 4096
    assert memory.view[:4096] == memory.view[4096:]
    bindings.deregister_file(handle)
    assert code(bindings.read, handle, memory.pointer, 4096, 4096, 0) == 5027
    bindings.deregister_memory(memory.pointer)
    assert code(bindings.deregister_memory, memory.pointer) == 5024
    bindings.close()
    assert code(bindings.close) == 5001
    os.close(fd)
    os.close(plain)


def test_what_is_not_aligned_is_not_asked_for(
    native_store: Native, directory: RootDirectory
) -> None:
    store, memory = native_store
    with directory.locked():
        fd, path = directory.create("0" * 40, FILE, os.O_DIRECT)
    with store._driver.file(fd) as file:
        for size, at in ((100, 0), (4096, 100), (0, 0), (2 * PAYLOAD, 0)):
            with pytest.raises(ValueError):
                file.write(memory, size, at)
            with pytest.raises(ValueError):
                file.read(memory, size, at)
    os.close(fd)
    path.unlink()


# -- driver ------------------------------------------------------------------------------------


def test_two_roots_share_one_driver(standin: Standin, tmp_path: Path) -> None:
    """The library refuses a second start, and memory that it has already."""
    stores = []
    for name in ("a", "b"):
        directory = RootDirectory(tmp_path / name)
        choice = choose_driver("1", directory)
        stores.append(ChunkStore(directory, choice, "ns", budget_bytes=1 << 20))
    memory = HostMemory(PAYLOAD)
    for store in stores:
        store.register(memory)
    assert standin.calls.standin_users() == 1 and standin.calls.standin_buffers() == 1
    stores[0].unregister(memory)
    stores[0].close()
    assert stores[1].put(keys_of(1), memory, PAYLOAD)
    stores[1].unregister(memory)
    stores[1].close()


def test_a_driver_that_others_opened_stays_open(standin: Standin, tmp_path: Path) -> None:
    standin.calls.standin_open_before(1)
    directory = RootDirectory(tmp_path / "root")
    store = ChunkStore(directory, choose_driver("1", directory), "ns", budget_bytes=1 << 20)
    memory = HostMemory(PAYLOAD)
    store.register(memory)
    assert store.put(keys_of(1), memory, PAYLOAD)
    store.unregister(memory)
    # Closing it would fail here: this process's code did not open it.
    store._driver.close()


def test_closing_lets_go_of_what_is_registered(standin: Standin) -> None:
    driver = open_native(load_gpu_library(standin.kind))
    driver.register(HostMemory(4096))
    assert standin.calls.standin_buffers() == 1
    driver.close()
    assert standin.calls.standin_left() == 0 and standin.calls.standin_users() == 0


def test_registering_that_fails_is_said(native_store: Native, standin: Standin) -> None:
    store, _ = native_store
    standin.fail("BufRegister", 5036)
    with pytest.raises(GpuIoError, match=r"BufRegister: .*pinned \(5036\)"):
        store.register(HostMemory(4096))


@pytest.mark.parametrize("kind", ["cufile", "hipfile"])
def test_an_older_library_closes_by_its_own_name(
    kind: str, compiled: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = {"cufile": "cuFile", "hipfile": "hipFile"}[kind]
    path = compiled("standin.c", f"-DPREFIX={prefix}", "-DOLD_CLOSE")
    found = load_gpu_library(kind, {f"KVD_{kind.upper()}_LIBRARY": str(path)})
    assert found.close_name == f"{prefix}DriverClose" and found.path == str(path)
    driver = open_native(found)
    driver.close()
    assert ctypes.CDLL(str(path)).standin_users() == 0


def test_a_library_without_a_call_is_named(compiled: Callable[..., Path]) -> None:
    path = compiled("standin.c", "-DPREFIX=cuFile", "-DNO_WRITE", "-Wno-unused-function")
    with pytest.raises(GpuLibraryError, match=r"has no cuFileWrite: .*Remedy"):
        load_gpu_library("cufile", {"KVD_CUFILE_LIBRARY": str(path)})


def test_another_kinds_library_is_refused(compiled: Callable[..., Path]) -> None:
    path = compiled("standin.c", "-DPREFIX=cuFile")
    with pytest.raises(GpuLibraryError, match="has no hipFileDriverOpen"):
        load_gpu_library("hipfile", {"KVD_HIPFILE_LIBRARY": str(path)})


def test_a_library_that_is_not_there_is_named() -> None:
    with pytest.raises(GpuLibraryError, match="KVD_CUFILE_LIBRARY: /nowhere"):
        load_gpu_library("cufile", {"KVD_CUFILE_LIBRARY": "/nowhere/lib.so"})


@pytest.mark.parametrize(
    ("kind", "variable", "place"),
    [
        ("hipfile", "ROCM_PATH", "lib/libhipfile.so.0"),
        ("cufile", "CUDA_HOME", "lib64/libcufile.so.0"),
    ],
)
def test_a_library_is_found_where_installers_put_it(
    kind: str, variable: str, place: str, tmp_path: Path, compiled: Callable[..., Path]
) -> None:
    prefix = {"cufile": "cuFile", "hipfile": "hipFile"}[kind]
    target = tmp_path / place
    target.parent.mkdir(parents=True)
    target.write_bytes(compiled("standin.c", f"-DPREFIX={prefix}").read_bytes())
    assert load_gpu_library(kind, {variable: str(tmp_path)}).path == str(target)


def test_a_package_of_python_is_found(
    tmp_path: Path, compiled: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "nvidia" / "cufile" / "lib" / "libcufile.so.0"
    target.parent.mkdir(parents=True)
    target.write_bytes(compiled("standin.c", "-DPREFIX=cuFile").read_bytes())
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_gpu_library("cufile", {}).path == str(target)
