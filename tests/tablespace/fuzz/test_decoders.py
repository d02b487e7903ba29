"""Mutated valid input for every decoder: no crash, no hang, only typed errors or refusals."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tablespace._core.journal_replay import JournalReplay, later_group_follows, next_record
from tablespace._core.line_codec import LineWriter, is_whole, parse, seal
from tablespace.errors import TablespaceError
from tablespace.journal import JOURNAL_NAME, decode_header
from tablespace.recovery import new_index
from tablespace.region import REGION_NAME, Region, decode_region
from tablespace.snapshot import (
    SNAPSHOT_NAME,
    capture_index,
    encode_snapshot,
    load_snapshot,
)
from tablespace.testing import Disk, SimulatedDirectory

GOLDEN = Path(__file__).parent.parent / "format" / "golden" / "v1" / "region"
SMALL = settings(
    max_examples=400,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

# Valid input, the same in every run: a golden region's files.
IDENTITY = (GOLDEN / REGION_NAME).read_bytes()[:4096]
REGION = decode_region(IDENTITY, REGION_NAME)
SNAPSHOT = (GOLDEN / SNAPSHOT_NAME).read_bytes()
JOURNAL = (GOLDEN / JOURNAL_NAME).read_bytes()
RECORDS = JOURNAL[JOURNAL.index(b"\n") + 1 :]


def mutate(data: bytes, chance: random.Random) -> bytes:
    """Return data with a few things changed, sometimes under a correct checksum."""
    out = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 5))):
        at = chance.randrange(len(out) + 1)
        piece = out[at : at + chance.randrange(1, 40)]
        way = chance.randrange(8)
        if way == 0 and at < len(out):
            out[at] ^= 1 << chance.randrange(8)
        elif way == 1:
            out[at : at + 1] = bytes([chance.randrange(256)])
        elif way == 2:
            del out[at : at + chance.choice((1, 2, 30, 500))]
        elif way == 3:
            out[at:at] = piece * chance.choice((1, 2, 50))
        elif way == 4:
            out[at:at] = chance.choice((b"\n", b"\0" * 100, b'"', b"[" * 3000, b"\xff\xfe", b"{}"))
        elif way == 5:
            digits = [place for place, byte in enumerate(out) if 48 <= byte <= 57]
            if digits:
                place = chance.choice(digits)
                out[place : place + 1] = chance.choice(
                    (b"-1", b"0", b"9" * 25, b"18446744073709551615", b"4294967296", b"1e9")
                )
        elif way == 6:
            other = chance.randrange(len(out) + 1)
            out[at:at] = out[min(at, other) : max(at, other)][:2000]
        else:
            del out[at:]
    if chance.random() < 0.7:
        lines = bytes(out).split(b"\n")
        lines = [
            seal(line[: line.rindex(b',"line":"')])[:-1] if b',"line":"' in line else line
            for line in lines
        ]
        return b"\n".join(lines)
    return bytes(out)


def typed(action: Callable[[], object]) -> None:
    try:
        action()
    except (TablespaceError, FileNotFoundError):
        pass


def try_line(data: bytes) -> None:
    for line in data.split(b"\n"):
        found = parse(line)
        if found is not None:
            assert is_whole(line) and 1 <= len(found.get("key", b"k")) <= 255
            assert again(found) == line


def again(record: dict[str, object]) -> bytes:
    """Write a parsed record anew: the layout is exact, so the text must be the same."""
    writer = LineWriter()
    if record["op"] == "claim":
        writer.claim(record["seq"], record["grp"], record["container"], record["slot_bytes"])
        return writer.getvalue()[:-1]
    if record["op"] == "release":
        writer.release(record["seq"], record["grp"], record["container"])
        return writer.getvalue()[:-1]
    place = (record["container"], record["slot"])
    if record["op"] in ("quarantine", "restore"):
        getattr(writer, str(record["op"]))(record["seq"], record["grp"], *place)
        return writer.getvalue()[:-1]
    if record["op"] == "put":
        writer.put(
            record["seq"],
            record["grp"],
            record["key"],
            *place,
            record["length"],
            record["check"],
            record["metadata"],
            record.get("lz4", 0),
        )
    else:
        writer.free(record["op"], record["seq"], record["grp"], record["key"], *place)
    return writer.getvalue()[:-1]


def try_snapshot(data: bytes) -> None:
    disk = Disk()
    disk.write_file(SNAPSHOT_NAME, data)
    typed(
        lambda: load_snapshot(SimulatedDirectory(disk), SNAPSHOT_NAME, REGION, new_index(REGION))
    )


def try_journal(data: bytes) -> None:
    typed(lambda: decode_header(data, REGION, "index.log"))
    for lenient in (False, True):
        index = new_index(REGION)
        replay = JournalReplay(index, 0)
        replay.lenient = lenient
        at = steps = 0
        while at < len(data) and steps < 1000:
            at = replay.feed(data, at)
            later_group_follows(data, at, replay.seq)
            at = next_record(data, at)
            steps += 1
        out_of_use = len(index.allocator.quarantined_slots())
        assert out_of_use == index.allocator.quarantined_count
        used = index.allocator.popcount() - out_of_use
        assert used == index.live_count == len(index.keys())


def try_region(data: bytes) -> None:
    def decode() -> None:
        assert isinstance(decode_region(data, "region.json"), Region)

    typed(decode)


def bad_slot_records() -> bytes:
    """Return records in which slots go out of use and one comes back."""
    writer = LineWriter()
    size = REGION.geometry.slot_sizes[0]
    writer.claim(1, 1, 0, size)
    writer.put(2, 1, b"key", 0, 1, 10, 7)
    writer.free("drop", 3, 3, b"key", 0, 1)
    writer.quarantine(4, 4, 0, 1)
    writer.quarantine(5, 4, 0, 2)
    writer.restore(6, 6, 0, 1)
    writer.put(7, 7, b"key", 0, 1, 10, 7)
    return writer.getvalue()


def snapshot_with_bad_slots() -> bytes:
    index = new_index(REGION)
    index.allocator.assign_container(0, 0)
    index.restore(b"key", 0, 2, 10, 7, 1)
    for slot in (0, 1, 3):
        index.allocator.quarantine_slot(0, slot)
    source = capture_index(index, 9)
    return b"".join(encode_snapshot(source, REGION))


DECODERS: dict[str, tuple[Callable[[bytes], None], bytes]] = {
    "line": (try_line, RECORDS),
    "journal": (try_journal, JOURNAL),
    "records": (try_journal, RECORDS),
    "snapshot": (try_snapshot, SNAPSHOT),
    "bad slots": (try_journal, bad_slot_records()),
    "snapshot of bad slots": (try_snapshot, snapshot_with_bad_slots()),
    "region": (try_region, IDENTITY.rstrip(b" \n")),
}


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("events", [1500, pytest.param(200_000, marks=pytest.mark.long)])
def test_mutated_input_is_refused_or_read(name: str, events: int) -> None:
    decode, valid = DECODERS[name]
    decode(valid)
    for seed in range(events):
        data = mutate(valid, random.Random(f"{name}/{seed}"))
        try:
            decode(data)
        except BaseException as error:
            raise AssertionError(f"{name}, seed {seed}: {error!r} for {data[:300]!r}") from error


@SMALL
@given(st.binary(max_size=600))
@example(b'{"tablespace":"region","format":1,"x":"\xff"}')
@example(b'{"x":' + b"[" * 4000)
@example(b'{"tablespace":"journal","format":' + b"9" * 400 + b"}\n")
def test_arbitrary_bytes_are_refused_or_read(data: bytes) -> None:
    for decode, _ in DECODERS.values():
        decode(data)
        decode(data + b"\n")
        decode(seal(data))


@SMALL
@given(
    seq=st.integers(1, (1 << 63) - 1),
    key=st.binary(min_size=1, max_size=255),
    container=st.integers(0, (1 << 32) - 1),
    slot=st.integers(0, (1 << 32) - 1),
    length=st.integers(0, (1 << 32) - 1),
    check=st.integers(0, (1 << 64) - 1),
    metadata=st.none() | st.binary(min_size=1, max_size=255),
    saved=st.integers(0, (1 << 32) - 1),
)
def test_every_record_is_read_as_written(
    seq: int,
    key: bytes,
    container: int,
    slot: int,
    length: int,
    check: int,
    metadata: bytes | None,
    saved: int,
) -> None:
    raw = min(length + saved, (1 << 32) - 1) if saved else 0
    compressed = {"lz4": raw} if raw > length else {}
    writer = LineWriter()
    writer.put(seq, seq, key, container, slot, length, check, metadata, compressed.get("lz4", 0))
    writer.free("drop", seq, seq, key, container, slot)
    put, drop = writer.getvalue().split(b"\n")[:2]
    found = parse(put)
    assert found == {
        "op": "put",
        "seq": seq,
        "grp": seq,
        "key": key,
        "container": container,
        "slot": slot,
        "length": length,
        "check": check,
        "metadata": metadata,
        **compressed,
    }
    assert again(found) == put and again(parse(drop)) == drop


def test_the_fuzzer_notices_a_decoder_that_lies() -> None:
    """The canary: a decoder that takes every line for whole must be found out."""

    def careless(data: bytes) -> None:
        for line in data.split(b"\n"):
            assert not line or is_whole(line)

    with pytest.raises(AssertionError):
        for seed in range(100):
            careless(mutate(RECORDS, random.Random(seed)))
