"""Values compressed with LZ4: every length, what is not worth it, forged blocks, no codec."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tablespace._core.line_codec import LineWriter, parse
from tablespace.testing.model import audit

import tablespace
from tablespace import Store, checksum64

Opener = Callable[..., Store]
SIZES = {"max_bytes": "16M", "container_bytes": "1M", "slot_bytes": ["4K", "16K", "72K"]}
LENGTHS = [*range(0, 70001, 991), 1, 4095, 4096, 4097, 8192, 8193, 65535, 65536, 70000]


def text_of(length: int) -> bytes:
    """Return bytes that compress well and differ by length."""
    return (b"%d, " % length * (length // 3 + 1))[:length]


def noise_of(length: int) -> bytes:
    return random.Random(length).randbytes(length)


def journal_of(path: Path) -> list[dict[str, Any]]:
    lines = (path / "index.log").read_text().splitlines()[1:]
    return [json.loads(line) for line in lines if line]


def test_values_of_every_length_come_back(open_small: Opener) -> None:
    store = open_small(**SIZES, compression="lz4")
    store.put_many((b"t%d" % length, text_of(length), b"meta") for length in LENGTHS)
    store.put_many((b"n%d" % length, noise_of(length)) for length in LENGTHS)
    for turn in ("as stored", "reopened"):
        for length in LENGTHS:
            assert store.get(b"t%d" % length) == text_of(length), turn
            assert store.get(b"n%d" % length) == noise_of(length), turn
            buffer = bytearray(length + 3)
            assert store.get_into(b"t%d" % length, buffer) == length
            assert buffer[:length] == text_of(length) and buffer[length:] == bytes(3)
            entry = store.stat(b"t%d" % length)
            assert entry is not None and (entry.length, entry.metadata) == (length, b"meta")
            assert (entry.stored_length < length) == (length > 4096)
            buffer = bytearray(length)
            assert store.get_entries_into([b"t%d" % length], [buffer]) == [entry]
            assert buffer == text_of(length)
        audit(store)
        store.close()
        store = open_small(**SIZES)


def test_a_value_is_stored_as_it_is_unless_that_saves_a_block(open_small: Opener) -> None:
    store = open_small(**SIZES, compression="lz4")
    # Compresses, but not by a whole block.
    nearly = noise_of(7000) + bytes(1100)
    store.put_many([(b"small", text_of(4096)), (b"noise", noise_of(65536)), (b"near", nearly)])
    store.put(b"text", text_of(65536))
    stored = {key: store.stat(key) for key in store}
    assert all(entry is not None for entry in stored.values())
    lengths = {key: (each.length, each.stored_length) for key, each in stored.items() if each}
    assert lengths[b"small"] == (4096, 4096)
    assert lengths[b"noise"] == (65536, 65536)
    assert lengths[b"near"] == (8100, 8100)
    assert lengths[b"text"][0] == 65536 and lengths[b"text"][1] < 4096
    rows = {row["key"]: (row["length"], row["stored_length"]) for row in store.entries()}
    assert rows == lengths
    # The pool goes by what is stored.
    sizes = {row["key"]: row["slot_bytes"] for row in store.entries()}
    assert sizes == {b"small": 4096, b"noise": 73728, b"near": 16384, b"text": 4096}
    assert "compression lz4: asked for" in store.stats().choices


def test_the_largest_value_is_that_of_the_largest_slot_compressed_or_not(
    open_small: Opener,
) -> None:
    store = open_small(slot_bytes="16K", compression="lz4")
    store.put(b"fits", bytes(16384))
    with pytest.raises(tablespace.ValueTooLargeError) as caught:
        store.put(b"does not", bytes(16385))
    assert (caught.value.value_bytes, caught.value.slot_bytes) == (16385, 16384)
    assert store.put_many([(b"k", bytes(9000), b"m"), [b"l", bytearray(9000)]]) == [True, True]
    with pytest.raises(TypeError):
        store.put(b"k", "text")


def test_a_short_buffer_is_told_the_length_of_the_value(open_small: Opener) -> None:
    store = open_small(slot_bytes="16K", compression="lz4")
    store.put(b"k", text_of(10000))
    buffer = bytearray(9999)
    with pytest.raises(ValueError, match="has 9999 bytes, its value 10000"):
        store.get_into(b"k", buffer)
    assert buffer == bytes(9999)
    store.put(b"l", b"plain")
    aligned = tablespace.AlignedBuffer(16384)
    assert store.get_many_into([b"l", b"k"], [bytearray(5), aligned]) == [5, 10000]
    assert bytes(memoryview(aligned)[:10000]) == text_of(10000)


def test_without_compression_no_byte_on_disk_is_another(
    open_small: Opener, tmp_path: Path
) -> None:
    for name, options in (("plain", {}), ("lz4", {"compression": "lz4"})):
        store = open_small(tmp_path / name, **SIZES, **options)
        store.put_many((b"%d" % length, noise_of(length)) for length in LENGTHS)
        store.snapshot()
        store.put(b"more", noise_of(5000))
    plain, packed = (
        (tmp_path / name / file).read_text().partition("\n")[2]
        for name, file in (("plain", "index.log"), ("lz4", "index.log"))
    )
    assert plain == packed and "lz4" not in plain
    chunks = [
        (tmp_path / name / "index.snapshot.json").read_text().splitlines()[1:]
        for name in ("plain", "lz4")
    ]
    assert chunks[0] == chunks[1] and len(chunks[0]) == 2


def test_records_say_what_is_compressed(open_small: Opener, tmp_path: Path) -> None:
    store = open_small(**SIZES, compression="lz4")
    store.put(b"k", text_of(20000), metadata=b"m")
    (put,) = [line for line in journal_of(tmp_path / "region") if line["op"] == "put"]
    entry = store.stat(b"k")
    assert entry is not None
    assert (put["lz4"], put["len"], put["meta"]) == (20000, entry.stored_length, "6d")
    store.snapshot()
    chunk = json.loads((tmp_path / "region/index.snapshot.json").read_text().splitlines()[1])
    assert int(chunk["lz4"], 16) == 20000


@pytest.mark.parametrize("raw", ["0", "100", "99", "4294967296", "0200", "-1", '"9"'])
def test_a_record_that_no_compressor_writes_is_no_record(raw: str) -> None:
    from tablespace._core.line_codec import seal

    writer = LineWriter()
    writer.put(1, 1, b"k", 0, 0, 100, 7, None, 101)
    line = writer.getvalue()[:-1]
    found = parse(line)
    assert found is not None and found["lz4"] == 101
    body = line[:-27].replace(b'"lz4":101', b'"lz4":' + raw.encode())
    assert parse(seal(body)[:-1]) is None


def forge(path: Path, block: bytes, raw: int) -> None:
    """Give the region's last put another stored block and length, checksums and all."""
    lines = [line for line in (path / "index.log").read_bytes().split(b"\n") if line]
    put = json.loads(lines[-1])
    container, slot = put["at"]
    (size,) = {each["slot_bytes"] for each in map(json.loads, lines) if each.get("op") == "claim"}
    with open(path / f"containers/{container:04d}.bin", "r+b") as file:
        file.seek(slot * size)
        file.write(block.ljust(-(-len(block) // 4096) * 4096, b"\0"))
    writer = LineWriter()
    writer.put(
        put["seq"], put["grp"], bytes.fromhex(put["key"]), container, slot, len(block),
        checksum64(block), None, raw,
    )  # fmt: skip
    (path / "index.log").write_bytes(b"\n".join(lines[:-1]) + b"\n" + writer.getvalue())


def bomb(length: int) -> bytes:
    """Return an LZ4 block of `length` equal bytes."""
    import lz4.block

    packed: bytes = lz4.block.compress(bytes(length), store_size=False)
    return packed


@pytest.mark.parametrize(
    ("block", "raw"),
    [
        (bomb(16384), 16383),
        (bomb(16384), 12000),
        (bomb(12000), 16384),
        (bomb(1 << 20), 16384),
        (noise_of(900), 16384),
        (b"\xff" * 900, 16384),
        (b"\0", 16384),
        (b"\0" * 4000, 5000),
    ],
    ids=["longer", "much longer", "shorter", "bomb", "noise", "ones", "nothing", "zeros"],
)
def test_a_forged_block_is_a_miss_and_expands_no_further_than_its_length(
    open_small: Opener, tmp_path: Path, block: bytes, raw: int
) -> None:
    path = tmp_path / "region"
    store = open_small(slot_bytes="16K", compression="lz4")
    store.put(b"k", text_of(16384))
    store.snapshot()
    store.put(b"victim", text_of(16384))
    image = tmp_path / "image"
    subprocess.run(["cp", "-r", str(path), str(image)], check=True)
    # The claim is in the older journal.
    lines = (image / "index.log").read_bytes().split(b"\n")
    claim = next(
        line for line in (image / "index.log.bak").read_bytes().split(b"\n") if b"claim" in line
    )
    (image / "index.log").write_bytes(b"\n".join([lines[0], claim, *lines[1:]]))
    forge(image, block, raw)
    text = (image / "index.log").read_bytes().replace(claim + b"\n", b"")
    (image / "index.log").write_bytes(text)
    store = open_small(image, slot_bytes="16K")
    buffer = bytearray(b"mine" * 4096)
    assert store.get_into(b"victim", buffer) is None
    assert buffer == b"mine" * 4096
    assert store.get(b"victim") is None and store.get(b"k") == text_of(16384)
    assert (store.stats().corrupt, store.stats().limbo) == (1, 1)
    audit(store)


def test_a_length_beyond_the_largest_slot_is_damage(open_small: Opener, tmp_path: Path) -> None:
    store = open_small(slot_bytes="16K", compression="lz4")
    store.put(b"k", text_of(16384))
    image = tmp_path / "image"
    subprocess.run(["cp", "-r", str(tmp_path / "region"), str(image)], check=True)
    forge(image, bomb(1 << 20), 1 << 20)
    again = open_small(image, slot_bytes="16K")
    # The last line of a journal: a torn tail, so nothing was ever acknowledged.
    assert len(again) == 0 and again.stats().recovery.torn_bytes > 0


def test_damage_of_the_stored_bytes_is_found_by_their_checksum(
    open_small: Opener, tmp_path: Path
) -> None:
    store = open_small(slot_bytes="16K", compression="lz4", io_mode="buffered")
    store.put(b"k", text_of(16384))
    entry = store.stat(b"k")
    assert entry is not None
    with open(tmp_path / f"region/containers/{entry.container:04d}.bin", "r+b") as file:
        file.seek(entry.slot * 16384 + 5)
        file.write(b"?")
    assert store.get(b"k") is None and store.stats().corrupt == 1


NO_LZ4 = """
import sys
sys.modules["lz4"] = sys.modules["lz4.block"] = None
import tablespace
path = sys.argv[1]
try:
    tablespace.open(path + "-new", max_bytes="1M", slot_bytes="16K", compression="lz4")
except tablespace.MissingCodecError as error:
    assert isinstance(error, ImportError)
    print("open:", error)
try:
    tablespace.open(path + "-new", create=False)
except FileNotFoundError:
    print("nothing was made")
with tablespace.open(path) as store:
    assert store.get(b"plain") == b"plain" and store.stat(b"packed").length == 16384
    for call, more in ((store.get, []), (store.get_into, [bytearray(16384)])):
        try:
            call(b"packed", *more)
        except tablespace.TablespaceError as error:
            print("get:", error)
    assert store.get_many([b"plain", b"absent"]) == [b"plain", None]
    assert store.stats().corrupt == 0 and b"packed" in store
"""


def test_without_the_package_a_compressed_value_is_an_error_not_a_miss(
    open_small: Opener, tmp_path: Path
) -> None:
    store = open_small(slot_bytes="16K", compression="lz4")
    store.put_many([(b"plain", b"plain"), (b"packed", text_of(16384))])
    store.close()
    done = subprocess.run(
        [sys.executable, "-c", NO_LZ4, str(tmp_path / "region")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert [line.split(":")[0] for line in said] == ["open", "nothing was made", "get", "get"]
    assert done.stdout.count("Remedy: pip install tablespace[lz4]") == 3
    assert open_small(slot_bytes="16K").get(b"packed") == text_of(16384)


def test_names_of_every_length_carry_the_length_of_a_compressed_value(open_small: Opener) -> None:
    """The largest name has no room class of its own without the four bytes more."""
    store = open_small(**SIZES, compression="lz4")
    chance = random.Random(3)
    held: dict[bytes, tuple[bytes, bytes]] = {}
    for number in range(1500):
        key = b"%04d" % (number % 150)
        key = key.ljust(chance.choice((4, 5, 100, 251, 252, 253, 254, 255)), b"k")[:255]
        metadata = bytes(chance.choice((1, 2, 3, 4, 200, 254, 255)))
        value = text_of(chance.choice((10, 5000, 9000)))
        store.put(key, value, metadata=metadata)
        held[key] = (value, metadata)
        if number % 3 == 0:
            gone = chance.choice(sorted(held))
            assert store.delete(gone)
            del held[gone]
        if len(held) > 120:
            gone = next(iter(held))
            store.delete(gone)
            del held[gone]
    for turn in range(2):
        for key, (value, metadata) in held.items():
            entry = store.stat(key)
            assert entry is not None and entry.metadata == metadata
            assert store.get(key) == value
        audit(store)
        store.close()
        store = open_small(**SIZES)
        assert turn in (0, 1)


def test_awaited_calls_pack_and_unpack_too(open_small: Opener) -> None:
    store = open_small(**SIZES, compression="lz4")

    async def work() -> None:
        await asyncio.gather(*(store.aput(b"%d" % n, text_of(n)) for n in LENGTHS))
        found = await asyncio.gather(*(store.aget(b"%d" % n) for n in LENGTHS))
        assert found == [text_of(n) for n in LENGTHS]
        buffer = bytearray(70000)
        assert await store.aget_into(b"70000", buffer) == 70000 and buffer == text_of(70000)

    asyncio.run(work())
    assert store.stats().bytes_written < sum(LENGTHS) // 4


@pytest.mark.parametrize("wrong", ["zstd", "LZ4", True, 4, b"lz4"])
def test_another_compression_is_refused_with_the_accepted_ones(
    open_small: Opener, tmp_path: Path, wrong: object
) -> None:
    with pytest.raises(ValueError, match="compression must be one of None, lz4"):
        open_small(compression=wrong)
    assert not (tmp_path / "region").exists()
