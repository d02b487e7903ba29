"""The store's surface, over every IO mode and engine."""

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

import tablespace
from tablespace import Store

Opener = Callable[..., Store]


@pytest.fixture(params=["direct-uring", "direct-posix", "buffered-uring", "buffered-posix"])
def store(request: pytest.FixtureRequest, open_small: Opener) -> Store:
    mode, engine = request.param.split("-")
    if mode == "direct":
        request.getfixturevalue("need_direct")
    if engine == "uring":
        request.getfixturevalue("need_uring")
    found = open_small(io_mode=mode, io_engine=engine, max_bytes="1M", slot_bytes="16K")
    assert (found.stats().io_mode, found.stats().io_engine) == (mode, engine)
    return found


def check_accounting(store: Store) -> None:
    stats = store.stats()
    assert (
        stats.free + stats.reserved + stats.live + stats.limbo + stats.quarantined
        == stats.capacity
    )
    assert stats.reserved == 0


def test_values_of_every_length_come_back_equal(store: Store) -> None:
    rng = random.Random(3)
    lengths = [0, 1, 511, 512, 513, 4095, 4096, 4097, 16383, 16384]
    values = {b"key%d" % length: rng.randbytes(length) for length in lengths}
    for key, value in values.items():
        store.put(key, value)
    assert store.get_many(values) == list(values.values())
    for key, value in values.items():
        buffer = bytearray(len(value) + 10)
        assert store.get_into(key, buffer) == len(value)
        assert buffer[: len(value)] == value
        assert buffer[len(value) :] == bytes(10)
    check_accounting(store)


def test_buffers_at_odd_addresses_and_of_odd_lengths_round_trip(store: Store) -> None:
    rng = random.Random(4)
    memory = memoryview(bytearray(rng.randbytes(40_000)))
    for number in range(30):
        start, length = rng.randrange(100), rng.randrange(16_384)
        value = memory[start : start + length]
        store.put(b"k", value)
        target = memoryview(bytearray(20_000))[number : number + length]
        assert store.get_into(b"k", target) == length
        assert target == value


def test_aligned_buffers_round_trip(store: Store) -> None:
    source = tablespace.AlignedBuffer(4 * 16_384)
    target = tablespace.AlignedBuffer(4 * 16_384)
    with memoryview(source) as view, memoryview(target) as into:
        view[:] = random.Random(5).randbytes(len(view))
        pieces = [view[at : at + 16_384] for at in range(0, len(view), 16_384)]
        spaces = [into[at : at + 16_384] for at in range(0, len(into), 16_384)]
        keys = [b"%d" % number for number in range(4)]
        assert store.put_many(zip(keys, pieces, strict=True)) == [True] * 4
        assert store.get_many_into(keys, spaces) == [16_384] * 4
        assert view == into
        for piece in pieces + spaces:
            piece.release()


def test_an_overwrite_replaces_and_frees_the_old_slot(store: Store) -> None:
    for number in range(200):
        store.put(b"same", b"%d" % number)
    assert store.get(b"same") == b"199"
    assert store.stats().live == 1
    check_accounting(store)


def test_many_groups_in_one_call(store: Store) -> None:
    keys = [b"%d" % (number % 40) for number in range(600)]
    assert all(store.put_many((key, b"%d" % at) for at, key in enumerate(keys)))
    assert store.get_many(keys[560:]) == [b"%d" % at for at in range(560, 600)]


def test_deleting(store: Store) -> None:
    store.put_many([(b"a", b"1"), (b"b", b"2"), (b"c", b"3")])
    assert store.delete(b"a")
    assert not store.delete(b"a")
    assert store.delete_many([b"b", b"b", b"x"]) == 1
    assert store.contains_many([b"a", b"b", b"c"]) == [False, False, True]
    assert store.get_many([b"a", b"b", b"c"]) == [None, None, b"3"]
    check_accounting(store)


def test_the_mapping_surface(store: Store) -> None:
    store[b"k"] = b"v"
    assert store[b"k"] == b"v"
    assert b"k" in store
    assert len(store) == 1
    assert list(store) == [b"k"]
    del store[b"k"]
    with pytest.raises(KeyError):
        store[b"k"]
    with pytest.raises(KeyError):
        del store[b"k"]


def test_metadata_is_kept_with_the_entry(store: Store) -> None:
    store.put(b"k", b"value", metadata=b"about")
    entry = store.stat(b"k")
    assert entry is not None
    assert (entry.length, entry.metadata) == (5, b"about")
    assert entry.checksum == tablespace.checksum64(b"value")
    assert store.stat(b"absent") is None


def test_values_are_read_with_what_is_known_of_them(store: Store) -> None:
    store.put(b"k", b"value", metadata=b"about")
    store.put(b"e", b"")
    store.put(b"q", b"queued", durability="interval")
    buffers = [bytearray(8) for _ in range(4)]
    keys = [b"k", b"absent", b"e", b"q"]
    found = store.get_entries_into(keys, buffers)
    assert found == store.stat_many(keys) == [store.stat(key) for key in keys]
    assert found[1] is None
    for number, value in ((0, b"value"), (2, b""), (3, b"queued")):
        entry = found[number]
        assert entry is not None and entry.checksum == tablespace.checksum64(value)
        assert bytes(buffers[number][: entry.length]) == value
    with pytest.raises(ValueError, match="4 keys, but 3 buffers"):
        store.get_entries_into(keys, buffers[:3])
    stats = store.stats()
    assert (stats.gets, stats.hits) == (4, 3)


def test_bad_input_is_refused_by_name_and_stores_nothing(store: Store) -> None:
    with pytest.raises(tablespace.ValueTooLargeError, match=r"17000 bytes.*16384 bytes") as caught:
        store.put(b"k", bytes(17_000))
    assert (caught.value.value_bytes, caught.value.slot_bytes) == (17_000, 16_384)
    with pytest.raises(ValueError, match=r"1\.\.255 bytes, not 256"):
        store.put(b"k" * 256, b"")
    with pytest.raises(TypeError, match="bytes, not str"):
        store.put("k", b"")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="bytes, not str"):
        store.get("k")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at most 255 bytes, not 256"):
        store.put(b"k", b"", metadata=bytes(256))
    with pytest.raises(TypeError):
        store.put(b"k", 5)
    with pytest.raises(tablespace.ValueTooLargeError):
        store.put_many([(b"fine", b""), (b"k", bytes(17_000))])
    assert len(store) == 0
    check_accounting(store)


def test_a_short_buffer_is_refused_with_both_sizes_and_nothing_stays_pinned(store: Store) -> None:
    store.put(b"k", bytes(100))
    with pytest.raises(ValueError, match="99 bytes, its value 100"):
        store.get_into(b"k", bytearray(99))
    with pytest.raises((BufferError, TypeError)):
        store.get_into(b"k", bytes(200))
    with pytest.raises(ValueError, match="2 keys, but 1 buffers"):
        store.get_many_into([b"k", b"k"], [bytearray(100)])
    store.delete(b"k")
    check_accounting(store)
    assert store.stats().limbo == 0


def test_a_full_region_under_reject_says_so_and_loses_nothing(store: Store) -> None:
    capacity = store.stats().capacity
    keys = [b"%d" % number for number in range(capacity + 5)]
    assert store.put_many((key, key) for key in keys) == [True] * capacity + [False] * 5
    with pytest.raises(tablespace.FullError, match=f"{capacity} live of {capacity} slots"):
        store.put(b"one more", b"")
    # An overwrite needs a slot of its own until it is durable.
    with pytest.raises(tablespace.FullError):
        store.put(keys[0], b"new")
    assert store.get_many(keys[:capacity]) == keys[:capacity]
    store.delete(keys[1])
    store.put(b"one more", b"fits")
    assert store.get(b"one more") == b"fits"
    check_accounting(store)


def test_everything_survives_a_clean_reopen_and_no_container_is_written(
    open_small: Opener, tmp_path: Path
) -> None:
    store = open_small()
    values = {b"%d" % number: os.urandom(number * 60) for number in range(60)}
    store.put_many(values.items())
    store.close()
    before = [file.stat().st_mtime_ns for file in sorted((tmp_path / "region").glob("*/*.bin"))]
    again = open_small()
    assert again.get_many(values) == list(values.values())
    assert again.stats().recovery.entries == 60
    assert again.stats().bytes_written == 0
    after = [file.stat().st_mtime_ns for file in sorted((tmp_path / "region").glob("*/*.bin"))]
    assert after == before


def test_a_closed_store_says_so(open_small: Opener) -> None:
    store = open_small()
    store.close()
    store.close()
    for use in (lambda: store.get(b"k"), lambda: store.put(b"k", b""), store.flush):
        with pytest.raises(tablespace.ClosedError, match="closed"):
            use()


def test_another_geometry_is_refused_with_the_sizes(open_small: Opener) -> None:
    open_small().close()
    with pytest.raises(tablespace.GeometryError, match=r"slot_bytes is 4K .* asked for 8K"):
        open_small(slot_bytes="8K")


def test_a_missing_region_is_not_made_when_asked_not_to(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no region here"):
        tablespace.open(tmp_path / "none", create=False)
    assert not (tmp_path / "none").exists()


def test_a_region_whose_making_was_cut_short_is_not_made_when_asked_not_to(tmp_path: Path) -> None:
    """It was made after all, with the default budget of 64 GiB."""
    with pytest.raises(OSError, match="the region needs"):
        tablespace.open(tmp_path / "r", max_bytes="900T", container_bytes="1T", slot_bytes="64K")
    before = {path: path.stat().st_size for path in (tmp_path / "r").rglob("*")}
    for recover in ("strict", "salvage", "empty"):
        with pytest.raises(FileNotFoundError, match="no region here"):
            tablespace.open(tmp_path / "r", create=False, recover=recover)
    assert {path: path.stat().st_size for path in (tmp_path / "r").rglob("*")} == before
    tablespace.open(tmp_path / "r", max_bytes="1M", slot_bytes="64K").close()


@pytest.mark.parametrize("option", ["io_mode", "io_engine", "recover", "on_full", "eviction"])
def test_an_unknown_choice_is_refused_with_the_accepted_ones(
    open_small: Opener, option: str
) -> None:
    with pytest.raises(ValueError, match=f"{option} must be one of .*, not 'other'"):
        open_small(**{option: "other"})


def test_no_file_of_a_region_is_readable_by_others(open_small: Opener, tmp_path: Path) -> None:
    store = open_small()
    store.put(b"k", b"v")
    store.snapshot()
    store.snapshot()
    paths = list((tmp_path / "region").rglob("*"))
    assert len(paths) == 12
    assert {path.stat().st_mode & 0o077 for path in [*paths, tmp_path / "region"]} == {0}


def test_the_number_of_files_does_not_depend_on_the_number_of_values(
    open_small: Opener, tmp_path: Path
) -> None:
    store = open_small(max_bytes="64M", container_bytes="16M")
    store.put_many((b"%d" % number, b"x") for number in range(10_000))
    store.snapshot()
    assert len(list((tmp_path / "region" / "containers").iterdir())) == 4
    assert len(list((tmp_path / "region").iterdir())) <= 8


def test_clearing_a_prefix_leaves_no_file_that_names_its_keys(
    open_small: Opener, tmp_path: Path
) -> None:
    store = open_small()
    store.put_many((b"ns1/%d" % number, b"x") for number in range(10))
    store.snapshot()
    store.put_many((b"ns2/%d" % number, b"y") for number in range(10))
    assert store.clear(b"ns1/") == 10
    assert sorted(store) == sorted(b"ns2/%d" % number for number in range(10))
    names = [path for path in (tmp_path / "region").iterdir() if path.is_file()]
    counts = {"index.log", "index.snapshot.json", "region.json"}
    spares = {f"index.{kind}.spare{more}" for kind in ("log", "snapshot.json") for more in ("", 2)}
    assert {path.name for path in names} == counts | spares
    assert all(b"ns1/".hex().encode() not in path.read_bytes() for path in names)
    check_accounting(store)
    assert store.clear() == 10
    assert len(store) == 0
    with pytest.raises(TypeError, match="bytes, not str"):
        store.clear("ns")  # type: ignore[arg-type]


def test_entries_are_an_array_in_order_of_recency(store: Store) -> None:
    for number in range(5):
        store.put(b"%d" % number, b"v" * number)
    store.get(b"0")
    found = store.entries()
    assert list(found["key"]) == [b"1", b"2", b"3", b"4", b"0"]
    assert list(found["length"]) == [1, 2, 3, 4, 0]
    assert set(found["slot_bytes"]) == {16384}
    assert list(found["checksum"])[:1] == [tablespace.checksum64(b"v")]
    assert len(set(zip(found["container"], found["slot"], strict=True))) == 5


def test_a_region_opened_without_sizes_keeps_its_own(tmp_path: Path) -> None:
    """The default budget of 64 GiB once grew a small region that was opened without one."""
    path = tmp_path / "region"
    with tablespace.open(path, max_bytes="512K", slot_bytes=["4K", "16K"]) as store:
        store.put(b"k", b"v")
        pools = store.stats().pools
    with tablespace.open(path) as store:
        assert store.get(b"k") == b"v"
        assert store.stats().pools == pools
    assert len(list((path / "containers").iterdir())) == 4
    with pytest.raises(tablespace.GeometryError, match="container_bytes"):
        tablespace.open(path, container_bytes="64K")


def test_the_journal_is_laid_ahead_while_open_and_tidy_once_closed(
    open_small: Opener, tmp_path: Path
) -> None:
    store = open_small()
    journal = tmp_path / "region" / "index.log"
    store.put(b"k", b"v")
    size = journal.stat().st_size
    assert size >= 1 << 20
    for number in range(50):
        store.put(b"%d" % number, b"v")
    assert journal.stat().st_size == size
    assert journal.read_bytes().rstrip(b"\n").count(b'"op":"put"') == 51
    store.close()
    assert journal.stat().st_size < 4096
    assert not journal.read_bytes().endswith(b"\n\n")
