"""Chunks through O_DIRECT: round trips, time to live, and whatever a file may have suffered."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from kvd_connectors.gpu_direct.choosing import Choice
from kvd_connectors.gpu_direct.directory import RootDirectory
from kvd_connectors.gpu_direct.errors import GpuDirectError
from kvd_connectors.gpu_direct.header import DIGEST_AT, DIGEST_BYTES, digest_of
from kvd_connectors.gpu_direct.memory import HostMemory
from kvd_connectors.gpu_direct.posix_driver import PosixDriver
from kvd_connectors.gpu_direct.store import ChunkStore

from .chunks import FILE, PAYLOAD, bytes_on_disk, chunk_files, fill, keys_of, path_of

Make = Callable[..., ChunkStore]


@pytest.mark.parametrize("size", [1, 4095, 4096, 5000, PAYLOAD])
@pytest.mark.parametrize("direct", [True, False])
def test_a_chunk_comes_back(make_store: Make, memory: HostMemory, size: int, direct: bool) -> None:
    store = make_store(choice=Choice(PosixDriver(direct=direct), ()))
    wanted = fill(memory, size, size)
    assert store.get(keys_of(1), memory) is None
    assert store.put(keys_of(1), memory, size)
    memory.zero(0, PAYLOAD)
    assert store.get(keys_of(1), memory) == size
    assert memory.view[:size] == wanted
    counted = store.status()
    assert (counted["hits"], counted["misses"], counted["stored"]) == (1, 1, 1)


def test_the_page_cache_is_left_alone(make_store: Make, directory: RootDirectory) -> None:
    """O_DIRECT that fell back without a word would fill it."""
    memory = HostMemory(4 << 20)
    fill(memory, 1)
    make_store().put(keys_of(1), memory, 4 << 20)
    assert cached_bytes(path_of(directory)) <= 64 << 10
    make_store(choice=Choice(PosixDriver(direct=False), ())).get(keys_of(1), memory)
    assert cached_bytes(path_of(directory)) >= 4 << 20, "the measurement sees nothing"


def cached_bytes(path: Path) -> int:
    """How much of a file is in the page cache: mincore(2). Reading it would bring more in."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        pages = (ctypes.c_ubyte * (len(mapped) // mmap.PAGESIZE))()
        address = ctypes.byref(ctypes.c_char.from_buffer(mapped))
        assert libc.mincore(address, ctypes.c_size_t(len(mapped)), pages) == 0
        del address
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


def test_files_are_this_users_alone_and_named_by_digits(
    make_store: Make, memory: HostMemory, directory: RootDirectory
) -> None:
    store = make_store(namespace="../../escape")
    old = os.umask(0)
    try:
        store.put([b"../../../key"], memory, 100)
    finally:
        os.umask(old)
    outside = {path.name for path in directory.root.parent.iterdir()}
    assert outside == {"root"}
    for path in directory.path.rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path
    (path,) = chunk_files(directory)
    assert len(path.stem) == 40 and set(path.stem) <= set("0123456789abcdef")


def test_namespaces_and_keys_are_apart(make_store: Make, memory: HostMemory) -> None:
    one, other = make_store(namespace="a"), make_store(namespace="b")
    fill(memory, 1)
    one.put(keys_of(1), memory, PAYLOAD)
    assert one.has(keys_of(1)) and not other.has(keys_of(1))
    assert other.get(keys_of(1), memory) is None
    assert not one.has(keys_of(1)[:3]) and one.get(keys_of(1)[::-1], memory) is None
    assert not one.has(keys_of(2))


def test_a_file_under_anothers_name_is_not_served(
    make_store: Make, memory: HostMemory, directory: RootDirectory
) -> None:
    store = make_store()
    store.put(keys_of(1), memory, PAYLOAD)
    store.put(keys_of(2), memory, PAYLOAD)
    one, two = chunk_files(directory)
    os.replace(one, two)
    found = [store.get(keys_of(number), memory) for number in (1, 2)]
    assert found == [None, None]
    assert not any(store.has(keys_of(number)) for number in (1, 2))
    assert store.status()["damaged"] == 1 and chunk_files(directory) == []


def test_what_is_there_is_not_written_again(
    make_store: Make, memory: HostMemory, directory: RootDirectory
) -> None:
    store = make_store()
    fill(memory, 1)
    store.put(keys_of(1), memory, PAYLOAD)
    before = path_of(directory).stat().st_ino
    assert store.put(keys_of(1), memory, PAYLOAD)
    assert path_of(directory).stat().st_ino == before
    assert store.status()["present"] == 1


def test_what_is_gone_is_written_again(make_store: Make, memory: HostMemory) -> None:
    """Presence is asked of the disk, not remembered: eviction and rm may have been at it."""
    store = make_store()
    store.put(keys_of(1), memory, PAYLOAD)
    assert store.delete(keys_of(1)) and not store.delete(keys_of(1))
    assert not store.has(keys_of(1))
    assert store.put(keys_of(1), memory, PAYLOAD) and store.status()["stored"] == 2


def test_a_time_to_live_ends(
    make_store: Make, memory: HostMemory, directory: RootDirectory
) -> None:
    now = [1000.0]
    store = make_store(clock=lambda: now[0])
    store.put(keys_of(1), memory, PAYLOAD, ttl_s=10)
    assert store.has(keys_of(1)) and store.get(keys_of(1), memory) == PAYLOAD
    now[0] = 1010.0
    assert not store.has(keys_of(1))
    assert store.get(keys_of(1), memory) is None
    assert store.status()["expired"] == 1 and chunk_files(directory) == []
    assert store.status()["used_bytes"] == 0
    store.put(keys_of(2), memory, PAYLOAD, ttl_s=10)
    now[0] = 1020.0
    assert store.put(keys_of(2), memory, PAYLOAD, ttl_s=10), "an expired one is in the way"
    assert store.get(keys_of(2), memory) == PAYLOAD
    assert store.status()["used_bytes"] == bytes_on_disk(directory) == FILE


def test_what_appears_is_told_without_opening_a_file(
    make_store: Make, memory: HostMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only one with a time to live is opened, for that."""
    now = [1000.0]
    store = make_store(clock=lambda: now[0])
    store.put(keys_of(1), memory, PAYLOAD)
    store.put(keys_of(2), memory, PAYLOAD, ttl_s=10)
    assert [store.appears(keys_of(number)) for number in range(4)] == [False, True, True, False]
    now[0] = 1010.0
    assert [store.appears(keys_of(number)) for number in range(4)] == [False, True, False, False]
    opened: list[str] = []
    real = RootDirectory.open_chunk

    def open_chunk(self: RootDirectory, name: str, flags: int) -> int:
        opened.append(name)
        return real(self, name, flags)

    monkeypatch.setattr(RootDirectory, "open_chunk", open_chunk)
    other = make_store(clock=lambda: 1000.0)
    assert other.appears(keys_of(1)) and opened == []
    assert other.appears(keys_of(2)) and len(opened) == 1


def test_clear_is_of_one_namespace(make_store: Make, memory: HostMemory) -> None:
    one, other = make_store(namespace="a"), make_store(namespace="b")
    for number in range(3):
        one.put(keys_of(number), memory, PAYLOAD)
    other.put(keys_of(1), memory, PAYLOAD)
    assert one.clear() == 3
    assert not one.has(keys_of(1)) and other.has(keys_of(1))
    assert one.status()["used_bytes"] == FILE


# -- damage ------------------------------------------------------------------------------------

FIELDS = {
    "magic": 0,
    "version": 8,
    "header_bytes": 13,
    "payload_bytes": 17,
    "file_bytes": 24,
    "checksum": 32,
    "expires": 40,
    "checksum_kind": 48,
    "namespace_bytes": 50,
    "key_count": 52,
    "key_bytes": 56,
    "reserved_1": 58,
    "digest": 64,
    "reserved_2": 100,
    "namespace": 128,
    "first_key": 140,
    "last_key": 130 + 4 * 32 - 1,
    "header_padding": 4095,
    "payload_first": 4096,
    "payload_middle": 4096 + PAYLOAD // 2,
    "payload_last": 4096 + 60_000 - 1,
    "payload_padding": 4096 + 61_440 - 1,
}


@pytest.mark.parametrize("with_digest", [False, True], ids=["bare", "digest"])
@pytest.mark.parametrize("field", FIELDS)
def test_damage_is_a_miss(
    make_store: Make,
    memory: HostMemory,
    directory: RootDirectory,
    field: str,
    with_digest: bool,
) -> None:
    """Also where the header's digest is right again, as a writer with a bug would leave it."""
    store = make_store()
    fill(memory, 1)
    store.put(keys_of(1), memory, 60_000)
    path = path_of(directory)
    data = bytearray(path.read_bytes())
    data[FIELDS[field]] ^= 0x21
    if with_digest and field != "digest":
        data[DIGEST_AT : DIGEST_AT + DIGEST_BYTES] = digest_of(data[:4096])
    elif with_digest:
        pytest.skip("it is the digest")
    path.write_bytes(data)
    if with_digest and field == "expires":
        # Any time is one that could be meant; the other fields have to agree with each other.
        assert store.get(keys_of(1), memory) is None
        return
    assert store.get(keys_of(1), memory) is None
    counted = store.status()
    other_version = field in ("version", "checksum_kind") and (with_digest or field == "version")
    assert counted["other_version" if other_version else "damaged"] == 1
    assert counted["hits"] == 0
    # What is damaged nobody meets again; what another version wrote is left to it.
    assert path.exists() == other_version
    if not other_version:
        assert store.put(keys_of(1), memory, 60_000) and store.get(keys_of(1), memory) == 60_000


@pytest.mark.parametrize("left", [0, 1, 100, 4095, 4096, 4097, 8192, FILE - 4096, FILE - 1])
def test_a_truncated_file_is_a_miss(
    make_store: Make, memory: HostMemory, directory: RootDirectory, left: int
) -> None:
    store = make_store()
    fill(memory, 1)
    store.put(keys_of(1), memory, PAYLOAD)
    assert store.has(keys_of(1))
    os.truncate(path_of(directory), left)
    assert not store.has(keys_of(1)), "a header that was read before was taken for this one"
    assert store.get(keys_of(1), memory) is None
    assert store.status()["damaged"] == 1 and chunk_files(directory) == []


def test_a_longer_file_is_a_miss(
    make_store: Make, memory: HostMemory, directory: RootDirectory
) -> None:
    store = make_store()
    store.put(keys_of(1), memory, PAYLOAD)
    os.truncate(path_of(directory), FILE + 4096)
    assert store.get(keys_of(1), memory) is None and store.status()["damaged"] == 1


def test_a_huge_length_asks_for_no_memory(
    make_store: Make, memory: HostMemory, directory: RootDirectory
) -> None:
    store = make_store()
    store.put(keys_of(1), memory, PAYLOAD)
    with open(path_of(directory), "r+b") as file:
        file.seek(12)
        file.write(struct.pack("<I", 0xFFFFF000))
    assert store.get(keys_of(1), memory) is None and store.status()["damaged"] == 1


def test_no_link_is_followed(
    make_store: Make, memory: HostMemory, directory: RootDirectory, tmp_path: Path
) -> None:
    store = make_store()
    store.put(keys_of(1), memory, PAYLOAD)
    path = path_of(directory)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert not store.has(keys_of(1)) and store.get(keys_of(1), memory) is None
    path.unlink()
    os.mkfifo(path)
    assert not store.has(keys_of(1)) and store.get(keys_of(1), memory) is None
    path.unlink()
    path.mkdir()
    assert not store.has(keys_of(1)) and store.get(keys_of(1), memory) is None


def test_a_file_of_another_user_is_not_read(
    make_store: Make, memory: HostMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store()
    store.put(keys_of(1), memory, PAYLOAD)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert not store.has(keys_of(1)) and store.get(keys_of(1), memory) is None
    assert store.status()["read_errors"] == 1


def test_memory_that_is_too_small_costs_no_file(
    make_store: Make, memory: HostMemory, directory: RootDirectory
) -> None:
    store = make_store()
    store.put(keys_of(1), memory, PAYLOAD)
    assert store.get(keys_of(1), HostMemory(4096)) is None
    assert len(chunk_files(directory)) == 1 and store.status()["read_errors"] == 1
    assert store.get(keys_of(1), memory) == PAYLOAD


@pytest.mark.parametrize("size", [0, -1, PAYLOAD + 1])
def test_a_payload_that_is_not_in_memory_is_refused(
    make_store: Make, memory: HostMemory, size: int
) -> None:
    with pytest.raises(ValueError):
        make_store().put(keys_of(1), memory, size)


def test_a_sync_that_fails_costs_the_chunk(
    make_store: Make,
    memory: HostMemory,
    directory: RootDirectory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After one that failed the kernel may have dropped the pages: nothing to try again."""
    store = make_store()
    calls = []

    def fail(fd: int) -> None:
        calls.append(fd)
        raise OSError(errno.EIO, "as of a broken disk")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", fail)
        assert not store.put(keys_of(1), memory, PAYLOAD)
    assert len(calls) == 1
    assert store.status()["write_errors"] == 1 and bytes_on_disk(directory) == 0
    assert store.status()["used_bytes"] == 0
    assert store.put(keys_of(1), memory, PAYLOAD)


# -- roots -------------------------------------------------------------------------------------


def test_a_root_of_others_is_refused(tmp_path: Path) -> None:
    (tmp_path / "root" / "kvcache-1").mkdir(parents=True)
    (tmp_path / "root" / "kvcache-1").chmod(0o777)
    with pytest.raises(GpuDirectError, match=r"mode 777.*KVD_HIPFILE_ROOTS"):
        RootDirectory(tmp_path / "root")


def test_a_root_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "root" / "kvcache-1").symlink_to(tmp_path / "mine")
    with pytest.raises(GpuDirectError, match="no directory"):
        RootDirectory(tmp_path / "root")


def test_a_root_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(GpuDirectError, match="Remedy"):
        RootDirectory(tmp_path / "file" / "root")


def test_only_own_files_are_counted_and_touched(
    directory: RootDirectory, make_store: Make, memory: HostMemory
) -> None:
    beside = directory.root / "region.json"
    beside.write_text("x" * 100_000)
    store = make_store(budget_bytes=FILE)
    for number in range(3):
        assert store.put(keys_of(number), memory, PAYLOAD)
    assert beside.exists() and store.status()["used_bytes"] == FILE
